"""A second run begins as the first one did, and leaves no trace."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.batch.events import GraphRun
from fxguard.errors import FxguardError
from fxguard.graph.random_state import RandomState
from fxguard.rerun.same_start import as_before, copies_of, same_magnitude


class Net(nn.Module):
    """A product of an input and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def run_on(x: Tensor, model: nn.Module | None = None) -> GraphRun:
    graph = torch.fx.symbolic_trace(Net() if model is None else model)
    _, plan = fxguard.insert_checks(graph)
    state = RandomState.now((x,))
    return GraphRun(plan, graph, torch.zeros(len(plan.checks), 2), (x,), state, ("", ""), ())


def test_the_same_numbers_are_drawn_and_the_users_are_not_used_up() -> None:
    """What is drawn afterwards is what would have been drawn without it."""
    torch.manual_seed(3)
    run = run_on(torch.ones(3))
    first = torch.rand(4)
    expected = torch.get_rng_state()
    with as_before(run):
        assert torch.rand(4).tolist() == first.tolist()
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert torch.get_rng_state().tolist() == expected.tolist()


class Writes(Net):
    """Changes its input first."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) * self.weight


def test_what_it_may_write_is_copied() -> None:
    """An input of the first run stays as it is; one that is only read needs no copy."""
    x = torch.ones(3, requires_grad=True)
    (copy,) = copies_of(run_on(x, Writes()))
    assert copy.tolist() == x.tolist()
    assert copy.data_ptr() != x.data_ptr()
    assert not copy.requires_grad
    (same,) = copies_of(run_on(x))
    assert same is x


def test_a_freed_input_is_an_error() -> None:
    """FSDP frees what it gathered: nothing is computed from memory that is gone."""
    x = torch.ones(3)
    run = run_on(x)
    x.untyped_storage().resize_(0)
    with pytest.raises(FxguardError, match="has been freed"):
        copies_of(run)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1.0, 1.0, True),
        (1.0, 1.01, True),
        (1.0, 1.1, False),
        (0.0, 1e-31, True),
        (0.0, 1e-3, False),
        (math.inf, math.inf, True),
        (math.inf, 3e38, False),
        (math.nan, math.nan, True),
        (math.nan, math.inf, False),
    ],
)
def test_magnitudes_of_one_computation(one: float, other: float, same: bool) -> None:
    """Compilers keep more digits; inf and NaN are only equal to themselves."""
    assert same_magnitude(one, other) is same
    assert same_magnitude(other, one) is same
