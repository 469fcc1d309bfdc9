"""``try`` blocks that set back, under ``finally``, what was set before are captured."""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.capture._undoing import undoes

GOOD, BAD = torch.eye(3), -torch.eye(3)


class Config:
    """As of a model."""

    def __init__(self) -> None:
        self.is_causal = True


class Base(nn.Module):
    """Factorizes a matrix, which fails for one that is not positive definite."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.scale.weight)
        self.mode, self.depth = "plain", 0
        self.config = Config()

    def factor(self, x: Tensor) -> Tensor:
        """The operation that fails."""
        return torch.linalg.cholesky(self.scale(x))

    def state(self) -> list[Any]:
        """What a call may change."""
        return [self.mode, self.depth, vars(self.config)]


class Keeps(Base):
    """Sets an attribute for its operation."""

    def forward(self, x: Tensor) -> Tensor:
        old = self.mode
        self.mode = "fast"
        try:
            y = self.factor(x)
        finally:
            self.mode = old
        return y + 1


class Counts(Base):
    """Counts how deep it is."""

    def forward(self, x: Tensor) -> Tensor:
        self.depth += 1
        try:
            return self.factor(x) * self.depth
        finally:
            self.depth -= 1


class Deletes(Base):
    """Has an attribute only for its operation."""

    def forward(self, x: Tensor) -> Tensor:
        self.config.extra = 2
        try:
            return self.factor(x) * self.config.extra
        finally:
            del self.config.extra


def overridden(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A decorator, as transformers has it, that sets a configuration for a forward."""

    def wrapper(self: Any, x: Tensor, is_causal: bool | None = None) -> Tensor:
        if is_causal is not None:
            is_set = hasattr(self.config, "is_causal")
            if is_set:
                original = self.config.is_causal
            self.config.is_causal = is_causal
        try:
            output = forward(self, x)
        finally:
            if is_causal is not None:
                if is_set:
                    self.config.is_causal = original
                else:
                    del self.config.is_causal
        return output

    return wrapper


class Decorated(Base):
    """Multiplies by what its configuration says."""

    @overridden
    def inner(self, x: Tensor) -> Tensor:
        """What is decorated."""
        return self.factor(x) * (2 if self.config.is_causal else 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, is_causal=False) + self.inner(x)


CAPTURED = [Keeps, Counts, Deletes, Decorated]


@pytest.mark.parametrize("model", CAPTURED)
def test_what_is_set_back_is_captured(model: type[Base]) -> None:
    """There is one graph, and a call that raises leaves everything as it was."""
    plain, guarded = model(), fxguard.instrument(model())
    for x in (GOOD, BAD, GOOD):
        results = []
        for each in (plain, guarded):
            try:
                results.append(each(x))
            except torch.linalg.LinAlgError as error:
                results.append(str(error))
        assert str(results[0]) == str(results[1])
        assert guarded.state() == plain.state()
    assert "in 1 graph" in fxguard.guard_of(guarded).coverage()
    assert "between" not in fxguard.guard_of(guarded).coverage()


class Misses(Base):
    """Counts its calls under ``finally``."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.factor(x)
        finally:
            self.depth += 1


class Other(Base):
    """Sets back another attribute than it has set."""

    def forward(self, x: Tensor) -> Tensor:
        old = self.mode
        self.mode = "fast"
        try:
            return self.factor(x)
        finally:
            self.config.is_causal = old


class Rebinds(Base):
    """Sets back what it has found meanwhile."""

    def forward(self, x: Tensor) -> Tensor:
        old = self.mode
        try:
            old = old + "!"
            y = self.factor(x)
        finally:
            self.mode = old
        return y


class Handles(Base):
    """Handles the exception as well."""

    def forward(self, x: Tensor) -> Tensor:
        self.depth += 1
        try:
            return self.factor(x)
        except torch.linalg.LinAlgError:
            return x * 0
        finally:
            self.depth -= 1


class Breaks(Base):
    """Has a graph break between setting and its ``try`` block."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        old = self.mode
        self.mode = "fast"
        torch._dynamo.graph_break()
        try:
            y = self.factor(x)
        finally:
            self.mode = old
        return y


class Data(Base):
    """Sets the data of a weight, which the graph does at once."""

    def forward(self, x: Tensor) -> Tensor:
        old = self.scale.weight.data
        self.scale.weight.data = old * 2
        try:
            y = self.factor(x)
        finally:
            self.scale.weight.data = old
        return y

    def state(self) -> list[Any]:
        """What a call may change."""
        return self.scale.weight.tolist()


class InPlace(Base):
    """Counts in a buffer, in its `try` block."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        try:
            y = self.factor(x)
        finally:
            self.count -= 1
        return y

    def state(self) -> list[Any]:
        """What a call may change."""
        return [self.count.item()]


class Property(Base):
    """Sets a buffer through a property."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.zeros(()))

    @property
    def factor_of(self) -> Tensor:
        """A copy of the buffer."""
        return self.held.clone()

    @factor_of.setter
    def factor_of(self, value: Tensor) -> None:
        self.held.copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        old = self.factor_of
        self.factor_of = old + 1
        try:
            y = self.factor(x)
        finally:
            self.factor_of = old
        return y

    def state(self) -> list[Any]:
        """What a call may change."""
        return [self.held.item()]


class Else(Base):
    """Has its operation where only ``finally`` sees its exception."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            mode = self.mode
        except AttributeError:
            mode = ""
        else:
            x = self.factor(x)
        finally:
            self.depth += 1
        return x * len(mode)


@pytest.mark.parametrize(
    "model", [Misses, Other, Rebinds, Handles, Breaks, Data, InPlace, Property, Else]
)
def test_what_is_more_than_that_is_left_to_python(model: type[Base]) -> None:
    """It happens where an operation raises, as in plain Python."""
    plain, guarded = model(), fxguard.instrument(model())
    for x in (GOOD, BAD, GOOD, BAD):
        for each in (plain, guarded):
            with suppress(torch.linalg.LinAlgError):
                each(x)
        assert guarded.state() == plain.state()


@pytest.mark.parametrize(
    ("before", "final", "expected"),
    [
        ("t = v.set(1)", "v.reset(t)", True),
        ("t = v.set(1)", "w.reset(t)", False),
        ("t = v.set(1)", "v.reset(t, 1)", False),
        ("t = v.set(1); t = 2", "v.reset(t)", False),
        ("old = a.b", "a.b = old", True),
        ("old = a.b", "a.c = old", False),
        ("old = a.b; a.b = 1", "a.b = old", True),
        ("a.b = 1; old = a.b", "a.b = old", False),
        ("a.n += 1; a.n += 1", "a.n -= 1", False),
        ("old = f()", "a.b = old", False),
        ("a.n += 1", "a.n -= 1", True),
        ("a.n += 1", "a.n -= 2", False),
        ("a.n += 1", "a.n += 1", False),
        ("a.b = 1", "del a.b", True),
        ("a.b = 1", "del a.c", False),
        ("old = a.b", "pass", True),
        ("old = a.b", "print()", False),
        ("old = a.b", "a.b = old; print()", False),
    ],
)
def test_pairs(before: str, final: str, expected: bool) -> None:
    """Each pair that is known, and some like it."""
    block = ast.parse("try:\n  pass\nfinally:\n  " + final.replace("; ", "\n  ")).body[0]
    assert isinstance(block, ast.Try)
    assert undoes(block, ast.parse(before).body) is expected
