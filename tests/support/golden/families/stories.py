"""Small NaNs as people write them, and what only looks wrong: every way in which a model runs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from support.masks import Function
from support.stories.bad_before import GIVEN
from support.stories.healthy import HEALTHY
from support.stories.overflows import OVERFLOW
from support.stories.poles import POLES
from support.stories.rounded import PRECISION
from support.ways import AOT, EAGER, PYTHON

from ..records import Cases, Record, guarded

EVERY = {**OVERFLOW, **PRECISION, **POLES, **GIVEN}
PAIRS = {name: (story.forward, story.inputs) for name, story in EVERY.items()}


def cases() -> Cases:
    """Each in eager mode, some under AOTAutograd, in plain Python, with a backward, with replay."""
    for place, (name, pair) in enumerate({**PAIRS, **HEALTHY}.items()):
        yield f"{name}/{EAGER}", functools.partial(told, *pair)
        if place % 4 == 0:
            yield f"{name}/{AOT}", functools.partial(told, *pair, way=AOT)
        if place % 4 == 1:
            yield f"{name}/{PYTHON}", functools.partial(told, *pair, way=PYTHON)
        if place % 4 == 2:
            yield f"{name}/replay", functools.partial(told, *pair, replay=True)
        if place % 2:
            yield f"{name}/backward", functools.partial(differentiated, *pair)


def told(forward: Any, inputs: Any, **options: Any) -> Record:
    """What is said of one forward."""

    def call(model: Any) -> None:
        with torch.no_grad():
            model(*inputs)

    return guarded(model_of(forward), call, **options)


def differentiated(forward: Any, inputs: Any, **options: Any) -> Record:
    """What is said of a forward and its backward, with gradients of all inputs."""

    def call(model: Any) -> None:
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        output = model(*leaves)
        if isinstance(output, Tensor) and output.requires_grad:
            output.abs().sum().backward()

    return guarded(model_of(forward), call, **options)


def model_of(forward: Any) -> nn.Module:
    """A story's function as a model."""
    return forward if isinstance(forward, nn.Module) else Function(forward)
