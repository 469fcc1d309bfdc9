"""A model that asks its inputs which way to go is one graph for each way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxguard
from fxguard.capture import decisions

X = torch.linspace(-1, 1, 8).reshape(2, 4)
ALL, SOME, NONE = (torch.tensor(row) for row in ([1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0]))


BOTH = [(X, ALL), (X, SOME), (X, ALL), (X, NONE), (X, SOME)]


class Masked(nn.Module):
    """Applies a mask only if it masks something, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.linear(x)
        if mask is not None:
            mask = mask.to(torch.bool)
            if not mask.all():
                x = x.masked_fill(~mask, 0.0) * 2
        return x + 1


class Positions(nn.Module):
    """Asks what follows from the length of its input alone."""

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[-1]) + 1
        if ((positions[1:] - positions[:-1]) == 1).all():
            return x * 2
        return x * 3


class Pixels(nn.Module):
    """Scales its input where that is too large."""

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 1:
            x = x / 255
        return x.exp()


class Asserts(nn.Module):
    """Expects something of its mask."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        assert mask.any(), "nothing is left"
        return x * mask


class ByWeight(nn.Module):
    """Asks a weight, which each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.scale > 0.5 else x * 3


class Writes(nn.Module):
    """Writes to what it asks, through a view."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = mask.clone()
        mask.view(2, 2)[0].zero_()
        if mask.all():
            return x * 2
        return x * 3


class WritesAfterwards(nn.Module):
    """Writes to a mask that it has made, between two questions."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        lengths = torch.zeros(1, 4, dtype=torch.int64)
        if lengths.any():
            x = x * 7
        lengths[torch.arange(1), mask.sum()[None] - 1] = 1
        lengths = lengths.flip(1).cumsum(1).flip(1)
        return x * 2 if lengths.bool().all() else x * 3


class WritesInput(nn.Module):
    """Writes to the argument that it asks afterwards."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask[0] = 0
        if mask.all():
            return x * 2
        return x * 3


class Draws(nn.Module):
    """Tosses a coin."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) > 0.5:
            return x * 2
        return x * 3


class Or(nn.Module):
    """Uses the tensor that was asked."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * (mask.any() or mask.sum()) * (mask.all() and mask.sum())


class Recomputes(nn.Module):
    """Asks inside of a checkpointed function."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.inner, x, mask, use_reentrant=False)
        return output

    def inner(self, x: Tensor, mask: Tensor) -> Tensor:
        """What is computed again."""
        return x * 2 if mask.all() else x * 3


class Five(nn.Module):
    """Asks more than is guarded."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for at in range(4):
            if mask[at]:
                x = x * (at + 2)
        return x + 1 if mask.all() else x


def follow(model: nn.Module, *calls: tuple[Any, ...]) -> fxguard.types.Guard:
    """Compare calls of a model with those of its guarded self."""
    expected = []
    for each in calls:
        torch.manual_seed(0)
        expected.append(model(*(x.clone() for x in each)))
    guarded = fxguard.instrument(model)
    for each, result in zip(calls, expected, strict=True):
        torch.manual_seed(0)
        assert torch.equal(guarded(*(x.clone() for x in each)), result)
    return fxguard.guard_of(guarded)


@pytest.mark.parametrize(
    ("model", "calls"),
    [
        (Masked, BOTH),
        (Positions, [(torch.ones(2, length),) for length in (4, 5, 6, 7, 1)]),
        (Pixels, [(X,), (X * 200,), (X,)]),
        (Writes, BOTH),
        (WritesAfterwards, BOTH),
    ],
)
def test_each_way_is_one_graph(model: Callable[[], nn.Module], calls: list[Any]) -> None:
    """All operations are checked in a graph, none of the guards' is counted."""
    for each in calls:  # in a process of its own each would be the first
        guard = follow(model(), each, each)
        assert "in 1 graph" in guard.coverage()
        assert "break" not in guard.coverage()
        assert "between" not in guard.coverage()
    guard = follow(model(), *calls)
    assert "break" not in guard.coverage()
    assert "between" not in guard.coverage()


def test_what_is_checked_is_what_python_computes() -> None:
    """The frames are those of the way that the last call went."""
    guard = follow(Masked(), (X, ALL), (X, SOME))
    kinds = [frame.kind for frame in guard.frames()]
    assert kinds == ["Linear", "masked_fill", "mul", "add", "Masked"]


@pytest.mark.parametrize("model", [WritesInput, Draws, Or, Recomputes, Five])
def test_what_more_decides_is_as_in_python(model: Callable[[], nn.Module]) -> None:
    """There is a graph break, or none, and always the same result."""
    follow(model(), *([(X,)] * 3 if model is Draws else BOTH))


def test_a_mask_that_is_changed_in_place_decides_anew() -> None:
    """The guard looks at the values, not at the tensor."""
    model = Masked()
    guarded = fxguard.instrument(Masked())
    guarded.load_state_dict(model.state_dict())
    mask = ALL.clone()
    for value in (1, 0, 1):
        mask[2] = value
        assert torch.equal(guarded(X, mask), model(X, mask))
    assert torch.equal(guarded(X), model(X))
    assert torch.equal(guarded(X, mask[None].expand(2, 4)), model(X, mask))


def test_an_assertion_fails_as_in_python() -> None:
    """With its own exception and message."""
    guarded = fxguard.instrument(Asserts())
    guarded(X, SOME)
    with pytest.raises(AssertionError, match="nothing is left"):
        guarded(X, NONE)
    guarded(X, SOME)


def test_a_weight_is_asked_by_python() -> None:
    """It would be captured again each time that the answer changes."""
    guard = follow(ByWeight(), (X,), (X,))
    assert "in 2 graphs" in guard.coverage()


def test_more_than_one_element_is_an_error_as_ever() -> None:
    """The message is torch's."""

    class Ambiguous(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x > 0 else x

    with pytest.raises(RuntimeError, match="more than one value is ambiguous"):
        fxguard.instrument(Ambiguous())(X)


def test_much_is_not_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above a number of elements the graph ends, as without this."""
    monkeypatch.setattr(decisions, "MOST_ELEMENTS", 7)
    assert "in 2 graphs" in follow(Pixels(), (X,), (X,)).coverage()


def test_a_value_that_autocast_may_have_cast_is_asked_by_python() -> None:
    """The guard would compute it in another dtype."""

    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if (x @ x.T).sum() > 1 else x

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "in 2 graphs" in follow(Product(), (X,), (X,)).coverage()


def test_a_compiler_of_the_users_breaks_as_ever() -> None:
    """Only captures of fxguard's ask."""
    follow(Masked(), (X, ALL))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(Masked(), backend="eager", fullgraph=True)(X, ALL)


def test_a_nan_behind_a_decision_is_named() -> None:
    """The way that went wrong is the one that was taken."""
    guarded = fxguard.instrument(Masked())
    guarded(X, ALL)
    with pytest.raises(fxguard.NonFiniteError, match="masked_fill"):
        guarded(X.masked_fill(X > 0.9, torch.inf) * 0, SOME)
