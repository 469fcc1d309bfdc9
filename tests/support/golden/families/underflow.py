"""Numbers that a dtype cannot hold become 0, in the forward and in gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fxguard
from support import zoo
from support.ways import AOT, PYTHON

from ..records import Cases, Record, guarded, of_reports, raised_by

HALF = torch.float16


class Gate(nn.Module):
    """What the layer makes is multiplied by a small number, and by it again."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(16, 16), scale

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x) * self.scale
        return hidden * self.scale


def squares(x: Tensor) -> Tensor:
    return (x * 1e-4).square().sum(-1)


def variance(x: Tensor) -> Tensor:
    small = x * 1e-4
    return (small - small.mean(-1, keepdim=True)).pow(2).mean(-1)


def probabilities(x: Tensor) -> Tensor:
    return (x * 10).softmax(-1).prod(-1)


def exponentials(x: Tensor) -> Tensor:
    return torch.exp(-x.abs() * 30)


def products(x: Tensor) -> Tensor:
    return (x * 1e-4) @ (x * 1e-4).mT


def after_a_break(x: Tensor) -> Tensor:
    hidden = x * 1e-4
    torch._dynamo.graph_break()
    return hidden * 1e-4


def in_a_branch(x: Tensor) -> Tensor:
    return torch.where(x > 9, x, x * 1e-4 * 1e-4)


FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(squares, variance, probabilities, exponentials, products, after_a_break, in_a_branch),
)


class Function(nn.Module):
    """A module around a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def cases() -> Cases:
    """Shares, dtypes and ways; a backward whose gradients are 0 throughout."""
    for function in FUNCTIONS:
        make = functools.partial(Function, function)
        name = function.__name__
        yield name, functools.partial(called, make)
        yield f"{name}/bfloat16", functools.partial(called, make, dtype=torch.bfloat16)
        yield f"{name}/replay", functools.partial(called, make, replay=True)
    gate = functools.partial(Gate, 1e-4)
    for title, options in {
        "share 1": {"underflow": 1.0},
        "share 0.01": {"underflow": 0.01},
        "aot": {"way": AOT},
        "python": {"way": PYTHON},
        "raise": {"on_detect": "raise"},
        "warn": {"on_detect": "warn"},
        "replay": {"replay": True},
        "strict": {"strict": True},
        "ignored": {"ignore": ["*:mul"]},
        "modules": {"granularity": "module"},
        "traced": {"trace_batch_nums": [0]},
        "twice": {"batches": 2},
    }.items():
        yield f"gate/{title}", functools.partial(called, gate, **options)
    for scale in (1.0, 1e-2, 1e-6):
        yield f"gate/{scale:g}", functools.partial(called, functools.partial(Gate, scale))
    for name in ("cnn", "lstm", "encoder", "t5"):
        yield f"zoo/{name}", functools.partial(of_the_zoo, name)
    for factor in (1.0, 1e-3, 1e-7):
        for option in ({}, {"underflow": 0.5}, {"on_detect": "warn"}, {"loss_scale": 1024.0}):
            title = "/".join(map(str, option.values()))
            run = functools.partial(zero_gradients, factor, **option)
            yield f"gradients/{factor:g}/{title}", run


def called(
    make: Callable[[], nn.Module], dtype: torch.dtype = HALF, batches: int = 1, **options: Any
) -> Record:
    """What is said of a forward in which numbers vanish."""
    torch.manual_seed(0)
    model, x = make().to(dtype), torch.randn(8, 16).to(dtype)

    def call(model: Any) -> None:
        for _ in range(batches):
            model(x)

    return guarded(model, call, **{"underflow": 0.5, **options})


def of_the_zoo(name: str) -> Record:
    """A model of the zoo in half precision."""
    entry = zoo.ZOO[name]
    args, kwargs = entry.inputs(HALF, entry.has_mask)
    return guarded(entry.model(HALF), lambda model: model(*args, **kwargs), underflow=0.05)


def zero_gradients(factor: float, **options: Any) -> Record:
    """What is said of steps whose loss is small."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).half()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    reports: list[fxguard.types.Report] = []

    def run() -> Record:
        with fxguard.watch(model, **{"on_detect": reports.append, **options}):
            for _ in range(2):
                optimizer.zero_grad()
                (model(torch.ones(4, 8, dtype=HALF)).mean() * factor).backward()
                optimizer.step()
        return {}

    return {**raised_by(run), **of_reports(reports)}
