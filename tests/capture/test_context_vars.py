"""A ``ContextVar`` that a model sets and sets back does not end a graph."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard

COLLECTED: ContextVar[list[Tensor] | None] = ContextVar("COLLECTED", default=None)
FACTOR: ContextVar[int] = ContextVar("FACTOR", default=1)
UNSET: ContextVar[int] = ContextVar("UNSET")
X = torch.ones(2, 4)


class Layer(nn.Module):
    """Gives what it computes to who collects."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * FACTOR.get()
        collected = COLLECTED.get()
        if collected is not None:
            collected.append(x)
        return x


class Collects(nn.Module):
    """Returns what its layers have computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor, factor: int | None = None) -> list[Tensor]:
        found: list[Tensor] = []
        token = COLLECTED.set(found)
        try:
            x = self.second(self.scaled(x, factor))
        finally:
            COLLECTED.reset(token)
        assert COLLECTED.get() is None
        return [*found, x]

    def scaled(self, x: Tensor, factor: int | None) -> Tensor:
        """The first layer, with a factor of its own."""
        if factor is None:
            return self.first(x)  # type: ignore[no-any-return]
        outer = FACTOR.set(factor + 1)
        token = FACTOR.set(factor)
        try:
            return self.first(x)  # type: ignore[no-any-return]
        finally:
            FACTOR.reset(token)
            FACTOR.reset(outer)


def same(model: nn.Module, *calls: tuple[Any, ...]) -> str:
    """Compare calls of a model before and after it is guarded; what was covered."""
    expected = [model(*each) for each in calls]
    guarded = fxguard.instrument(model)
    found = [guarded(*each) for each in calls]
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)
    assert COLLECTED.get() is None
    return fxguard.guard_of(guarded).coverage()


def test_what_is_set_back_is_one_graph() -> None:
    """Hooks and layers find in the graph what they find in Python."""
    assert "in 1 graph" in same(Collects(), (X,), (X,))
    assert "in 1 graph" in same(Collects(), (X, 3), (X, 3))


def test_what_was_set_outside_is_guarded() -> None:
    """Another value of the variable is another graph."""
    guarded = fxguard.instrument(Layer())
    plain = guarded(X)
    for factor in (2, 3, 2, 1):
        token = FACTOR.set(factor)
        found = guarded(X)
        FACTOR.reset(token)
        assert torch.equal(found, plain * factor)


class LeavesSet(nn.Module):
    """Sets a variable for who comes later."""

    def forward(self, x: Tensor) -> Tensor:
        FACTOR.set(5)
        return x * 2


class AsksForMore(nn.Module):
    """Uses a variable in ways that cannot be followed."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = x * UNSET.get()
        except LookupError:
            x = x * 7
        return x * UNSET.get(2)


class LeavesToken(nn.Module):
    """Has a graph break while a variable is set."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        token = FACTOR.set(3)
        torch._dynamo.graph_break()
        x = x * FACTOR.get()
        FACTOR.reset(token)
        return x * FACTOR.get()


@torch.library.custom_op("fxguard_tests::times_factor", mutates_args=())
def times_factor(x: Tensor) -> Tensor:
    """Asks for a variable when it runs."""
    return x.mul(FACTOR.get())


@times_factor.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class IsAsked(nn.Module):
    """Sets a variable for an operation that asks for it."""

    def forward(self, x: Tensor) -> Tensor:
        token = FACTOR.set(3)
        try:
            y: Tensor = times_factor(x)
        finally:
            FACTOR.reset(token)
        return y * FACTOR.get()


class ResetsTwice(nn.Module):
    """Sets a variable back twice, which is an error."""

    def forward(self, x: Tensor) -> Tensor:
        token = FACTOR.set(3)
        x = x * 2
        FACTOR.reset(token)
        FACTOR.reset(token)
        return x


@pytest.mark.parametrize("model", [LeavesSet, AsksForMore, LeavesToken, IsAsked])
def test_everything_else_is_left_to_python(model: type[nn.Module]) -> None:
    """What is set stays set, and each value is that of Python."""
    token = FACTOR.set(1)
    plain = [model()(X) for _ in range(2)]
    after = FACTOR.get()
    FACTOR.set(1)
    guarded = fxguard.instrument(model())
    found = [guarded(X) for _ in range(2)]
    assert FACTOR.get() == after
    FACTOR.reset(token)
    assert all(map(torch.equal, plain, found))
    assert "unchecked" not in fxguard.guard_of(guarded).coverage()


def test_the_exception_is_that_of_python() -> None:
    """An error in the use of a variable is raised as ever."""
    with pytest.raises(RuntimeError, match="has already been used once"):
        fxguard.instrument(ResetsTwice())(X)


def test_a_compiler_of_the_users_breaks_as_ever() -> None:
    """Only captures of fxguard's follow a variable."""
    fxguard.instrument(Collects())(X)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(Collects(), backend="eager", fullgraph=True)(X)
