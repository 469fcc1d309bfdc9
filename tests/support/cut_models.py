"""Models that TorchDynamo cuts into graphs, leaves to Python or enters whole.

Each overflows for a faulty input, in a module whose full name is known, and runs three ways as in
``ways``. A healthy input gives the bits of the plain model and no report, a faulty one gives its
bits and one report that blames the operation by its full name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import fxguard
from support.ways import assert_same_bits, prepared, the_way


def modes() -> tuple[bool, ...]:
    """Whether autocast, inference_mode and gradients are on."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
    )


LOW, HIGH = torch.full((2, 4), 0.5), torch.full((2, 4), 1e3)


class Block(nn.Module):
    """Overflows in exp where its input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(4))
            self.linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.linear(x)) * 0.1


# Structure.


class Bare(nn.Module):
    """Has no parameter of its own."""

    def __init__(self, inner: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.inner = inner()

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def functions() -> nn.Module:
    return nn.Sequential(Function(torch.square), Function(torch.exp), Function(torch.neg))


def half_frozen() -> nn.Module:
    model = nn.Sequential(Block(), Block())
    model[0].requires_grad_(False)
    return model


class BesideMeta(nn.Module):
    """One part has no data and is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.unused = nn.Linear(4, 4, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Shared(nn.Module):
    """One module at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * 2)


# Control flow.


class ReturnsEarly(nn.Module):
    """By shape, which TorchDynamo guards."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.block(x)
        if x.shape[0] == 1:
            return hidden
        return self.last(hidden)


class ReturnsEarlyByValue(ReturnsEarly):
    """By a number, at which TorchDynamo ends the graph."""

    def forward(self, x: Tensor) -> Tensor:
        if x.max().item() > 5:
            return self.block(x)
        return self.last(x)


class CallsItself(nn.Module):
    """The root is called again, inside its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return self(x * 2, depth - 1) if depth else self.block(x)


class Recursive(nn.Module):
    """A part calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = CallsItself()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + 1


# Graph breaks, three modules deep.


class BreaksBefore(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return torch.exp(x) * 0.1


class BreaksAfter(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.exp(self.linear(x))
        torch._dynamo.graph_break()
        return x * 0.1


@torch.compiler.disable
def left_to_python(x: Tensor) -> Tensor:
    return torch.exp(x) * 0.1


class ComputesBetween(Block):
    def forward(self, x: Tensor) -> Tensor:
        return left_to_python(self.linear(x)) + 1


@torch.compiler.disable
def through_data(x: Tensor) -> Tensor:
    return torch.exp(x).data * 0.1


@torch.compiler.disable
def through_transpose(x: Tensor) -> Tensor:
    return torch.exp(x).T * 0.1


class AliasesBetween(Block):
    """What overflowed is gone, its memory is not."""

    def forward(self, x: Tensor) -> Tensor:
        return through_data(self.linear(x)) + 1


class TransposesBetween(Block):
    def forward(self, x: Tensor) -> Tensor:
        return through_transpose(self.linear(x)) + 1


def deep(block: Callable[[], nn.Module]) -> nn.Module:
    model = Outer()
    model.outer = Outer()
    model.outer.inner = Outer()
    model.outer.inner.block = block()
    return model


class Outer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        (child,) = self.children()
        return child(x) * 2


# Modes inside.


class Inside(nn.Module):
    """A mode around one part of the forward."""

    def __init__(self, mode: Callable[[], Any]) -> None:
        super().__init__()
        self.mode = mode
        self.block, self.last = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            hidden = self.block(x)
        return self.last(hidden.float().clone())


def bfloat16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


MODES: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": bfloat16,
}


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    where: str  # full name of the module to blame
    what: str = "exp"
    faulty: Tensor = field(default_factory=lambda: HIGH)


DEEP = "outer.inner.block"
CASES = {
    "no parameters of its own": Case(Bare, "inner"),
    "twice no parameters": Case(lambda: Bare(Bare), "inner.inner"),
    "functions": Case(functions, "1"),
    "half frozen": Case(half_frozen, "0"),
    "a part on meta": Case(BesideMeta, "block"),
    "shared": Case(Shared, "first", faulty=torch.full((2, 4), 8.0)),
    "returns early": Case(ReturnsEarly, "block", faulty=HIGH[:1]),
    "returns early by value": Case(ReturnsEarlyByValue, "block"),
    "calls itself": Case(CallsItself, "block"),
    "recursive": Case(Recursive, "block.block"),
    "breaks before": Case(lambda: deep(BreaksBefore), DEEP),
    "breaks after": Case(lambda: deep(BreaksAfter), DEEP),
    "computes between": Case(lambda: deep(ComputesBetween), DEEP),
    "aliases between": Case(lambda: deep(AliasesBetween), DEEP),
    "transposes between": Case(lambda: deep(TransposesBetween), DEEP),
    **{f"{name} inside": Case(lambda m=mode: Inside(m), "block") for name, mode in MODES.items()},
}
CUT = [name for name, case in CASES.items() if case.where == DEEP]


def check(case: Case, way: str, mode: str = "nothing") -> fxguard.types.Guard:
    """Both twins of one case, each twice: four batches, of which the last two are bad."""
    calls = [LOW, LOW, case.faulty, case.faulty]
    with the_way(way), MODES[mode]():
        plain = prepared(case.make(), way)
        expected = [plain(x) for x in calls]
        torch._dynamo.reset()
        reports: list[fxguard.types.Report] = []
        model = fxguard.instrument(case.make(), on_detect=reports.append)
        guarded = prepared(model, way)
        for x, output in zip(calls, expected, strict=True):
            before = modes()
            assert_same_bits(guarded(x), output)
            assert modes() == before
    guard = fxguard.guard_of(model)
    assert guard.batch_number == len(calls)  # however many graphs there are
    assert [report.batch_number for report in reports] == [2, 3]
    for report in reports:
        origin = report.origins[0]
        blamed = (origin.what, origin.frame.name, origin.problem)
        assert blamed == (case.what, case.where, "inf"), origin.message
    names = {name for name, _ in model.named_modules()}
    assert {frame.name for frame in guard.frames()} <= names
    assert [frame.title for frame in guard.frames()].count(type(model).__name__) == 1
    return guard
