"""Two models on the same inputs: with a planted difference, in another dtype, compiled."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fxguard
from support import zoo
from support.planting_differences import (
    FAULTS,
    Planted,
    copy_with,
    planted_in,
    weights_to_change,
    with_noise,
)

from ..records import Cases, Record, of_result

SMALL = ("cnn", "lstm", "encoder", "twice", "in_place")
# Of transformers: in which other form, and with which fault.
LARGE = (
    ("t5", "float16", "negated"),
    ("llama", "same", "scaled"),
    ("vit", "aot_eager", "permuted"),
)


def same(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


OTHERS: dict[str, Callable[[nn.Module], Any]] = {
    "same": same,
    "float16": lambda model: same(model).half(),
    "bfloat16": lambda model: same(model).bfloat16(),
    "float64": lambda model: same(model).double(),
    "aot_eager": lambda model: torch.compile(same(model), backend="aot_eager"),
    "trains": lambda model: same(model).train(),
}


def cases() -> Cases:
    """Models of the zoo; a few of each kind for those of transformers, which take long."""
    for name in SMALL:
        for other in OTHERS:
            yield f"{name}/{other}", functools.partial(compared, name, OTHERS[other])
        for number, fault in enumerate(FAULTS):
            for place in (0.2, 0.7):
                run = functools.partial(with_another_weight, name, fault, place)
                yield f"{name}/weight {fault}/{place}", run
            for seed in (10 * number, 10 * number + 1):
                run = functools.partial(with_another_operation, name, fault, seed)
                yield f"{name}/operation {fault}/{seed}", run
        for given in ({"tolerance": 1e-3}, {"output_tolerance": 1e-9}, {"gradients": False}):
            run = functools.partial(compared, name, OTHERS["bfloat16"], **given)
            yield f"{name}/bfloat16/{given}", run
        yield f"{name}/page", functools.partial(page, name)
    for name, other, fault in LARGE:
        yield f"{name}/{other}", functools.partial(compared, name, OTHERS[other])
        yield f"{name}/{fault}", functools.partial(with_another_weight, name, fault, 0.5)
        yield f"{name}/operation", functools.partial(with_another_operation, name, fault, 3)


def model_of(name: str) -> nn.Module:
    return with_noise(zoo.ZOO[name].model())


def compared(name: str, change: Callable[[nn.Module], Any], **options: Any) -> Record:
    """What is said of a model and a changed copy."""
    model = model_of(name)
    return of_result(comparison(name, model, change(model), **options))


def comparison(name: str, model: nn.Module, other: Any, **options: Any) -> Any:
    """The comparison on the inputs of the zoo."""
    entry = zoo.ZOO[name]
    args, kwargs = entry.inputs(torch.float32, entry.has_mask)
    return fxguard.compare(model, other, *args, **options, **kwargs)


def with_another_weight(name: str, fault: str, place: float) -> Record:
    """A fault in one weight of the copy."""
    model = model_of(name)
    weights = weights_to_change(model, fault)
    other = copy_with(model, weights[int(len(weights) * place)], fault)
    return of_result(comparison(name, model, other))


def with_another_operation(name: str, fault: str, seed: int) -> Record:
    """A fault in what one operation of the copy makes."""
    model = model_of(name)
    other = same(model)
    planted = Planted(fault, random.Random(seed))
    with planted_in(other, planted):
        found = comparison(name, model, other)
    return {**of_result(found), "planted": planted.title}


def page(name: str) -> Record:
    """The comparison as a table, and in a notebook."""
    model = model_of(name)
    found = comparison(name, model, OTHERS["float16"](model))
    return {"table": found.to_table(), "html": found._repr_html_()}
