"""What would fail in another dtype, what to keep in float32, and a model that keeps it there."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import fxguard
from support import zoo
from support.stories.overflows import OVERFLOW
from support.stories.rounded import PRECISION
from support.zoo import loss_of

from ..records import Cases, Record, guarded, of_result
from .stories import model_of

SMALL = ("cnn", "lstm", "encoder", "twice", "in_place", "containers")
LARGE = ("t5", "llama", "vit", "bert")
DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
STORIES = {**OVERFLOW, **PRECISION}


class Gated(nn.Module):
    """Overflows in float16 where its input is large; some of it is too small for float16."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))
        self.small = nn.Parameter(torch.full((8,), 1e-9))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.gate(x)) * self.up(x)
        return self.down(hidden / (hidden.abs().amax(-1, keepdim=True) + 1e-8)) + self.small


def gated(scale: float) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    return Gated(), (torch.randn(4, 8) * scale,), {}


def of_the_zoo(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    entry = zoo.ZOO[name]
    return entry.model(), *entry.inputs(torch.float32, entry.has_mask)


def of_a_story(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    story = STORIES[name]
    inputs = tuple(x.float() if x.is_floating_point() else x for x in story.inputs)
    return model_of(story.forward).float(), inputs, {}


def cases() -> Cases:
    """Models of the zoo, a gated layer, and stories of half precision before they went wrong."""
    makers = {name: functools.partial(of_the_zoo, name) for name in SMALL}
    makers |= {f"gated {scale:g}": functools.partial(gated, scale) for scale in (1, 400, 3e4)}
    for name, make in makers.items():
        for dtype in DTYPES:
            yield f"{name}/{dtype}", functools.partial(forecast, make, dtype)
            yield f"{name}/{dtype}/loss", functools.partial(forecast, make, dtype, loss_of)
        for dtype in DTYPES[:2]:
            for autocast in (False, True):
                run = functools.partial(plan, make, dtype, autocast)
                yield f"{name}/plan/{dtype}/{'autocast' if autocast else 'cast'}", run
    for name, dtype in zip(LARGE, DTYPES, strict=True):
        make = functools.partial(of_the_zoo, name)
        yield f"{name}/{dtype}", functools.partial(forecast, make, dtype)
        yield f"{name}/float16/loss", functools.partial(forecast, make, "float16", loss_of)
    for name in STORIES:
        make = functools.partial(of_a_story, name)
        yield f"{name}/float16", functools.partial(forecast, make, "float16")
    for number, name in enumerate(STORIES):
        if number % 2:
            make = functools.partial(of_a_story, name)
            yield f"{name}/plan", functools.partial(plan, make, "float16", False)
            yield f"{name}/kept", functools.partial(kept, make)
    for scale in (1, 400, 3e4):
        yield f"gated {scale:g}/kept", functools.partial(kept, functools.partial(gated, scale))


def forecast(make: Any, dtype: str, loss: Any = None) -> Record:
    """The forecast as text, JSON, a table and in a notebook."""
    model, args, kwargs = make()
    found = fxguard.forecast(model, *args, dtype=dtype, loss=loss, **kwargs)
    return {**of_result(found), "table": found.to_table()}


def plan(make: Any, dtype: str, autocast: bool) -> Record:
    """The plan of a forecast."""
    model, args, kwargs = make()
    found = fxguard.forecast(model, *args, dtype=dtype, **kwargs).plan(autocast=autocast)
    return {**of_result(found), "advice": found.advice}


def kept(make: Any) -> Record:
    """A model in float16 that keeps some operations in float32, guarded."""
    model, args, kwargs = make()
    found = fxguard.forecast(model, *args, **kwargs).plan()
    if not found.operations:
        return {"plan": str(found)}
    half = fxguard.keep_float32(model.half(), found)
    inputs = [x.half() if x.is_floating_point() else x for x in args]
    made: list[str] = []
    record = guarded(half, lambda called: made.append(str(called(*inputs))))
    fxguard.remove(half)
    return {**record, "plan": str(found), "made": made}
