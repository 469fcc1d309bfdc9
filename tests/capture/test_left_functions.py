"""What TorchDynamo fails on is left to Python, and as little as possible with it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.guard.guard import GuardedModel
from fxguard.install.captures import MOST_ANEW

X = torch.ones(2, 8)

KEEPS_APART = pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="this torch leaves a function to Python for everybody",
)


@pytest.fixture(autouse=True)
def fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere in these tests such a failure is an error."""
    monkeypatch.setattr(GuardedModel, "fallback", True)


@torch.library.custom_op("fxguard_tests::known_to_python", mutates_args=())
def known_to_python(x: Tensor) -> Tensor:
    """An operation that TorchDynamo fails on."""
    return x.clone()


@known_to_python.register_fake
def _(x: Tensor) -> Tensor:
    raise RuntimeError("only bfloat16 is known here")


class Fails(nn.Module):
    """Has such an operation in a function that others call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(x) * 2

    def middle(self, x: Tensor) -> Tensor:
        """Two calls above it."""
        return self.inner(self.layer(x)) + 1

    def inner(self, x: Tensor) -> Tensor:
        """Its place."""
        output: Tensor = known_to_python(x)
        return output


def test_functions_around_an_operation_that_fails_are_not_traced_to_it_in_turn(
    traced: list[str],
) -> None:
    """The layer is traced once in vain, and then captured."""
    guarded = fxguard.instrument(Fails())
    assert torch.equal(guarded(X), guarded(X))
    assert traced == ["middle"]
    assert "checked 4 of 4 operations in 0 graphs and 4" in fxguard.guard_of(guarded).coverage()


@KEEPS_APART
def test_a_model_that_was_given_a_wrong_argument_is_captured_with_a_right_one() -> None:
    """The failure of a call is none of the next."""
    guarded = fxguard.instrument(nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.ReLU()))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        guarded(torch.ones(2, 9))
    guarded(X)
    assert "checked 2 of 2 operations in 1 graph" in fxguard.guard_of(guarded).coverage()


@KEEPS_APART
def test_a_model_that_always_raises_is_not_always_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its exception is soon that of Python, at once."""
    guarded = fxguard.instrument(nn.Sequential(nn.Linear(8, 8)))
    captures = fxguard.guard_of(guarded)._captures  # type: ignore[attr-defined]
    forgotten = []
    forget = captures.forget_forms
    monkeypatch.setattr(captures, "forget_forms", lambda: (forgotten.append(1), forget()))
    for _ in range(MOST_ANEW + 3):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            guarded(torch.ones(2, 9))
    assert len(forgotten) == MOST_ANEW
