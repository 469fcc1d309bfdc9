"""Operands are made smaller and simpler, and the operation fails on them as it did."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody writes F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxguard.graph.one_operation import OneOperation
from fxguard.reproduce import shrinking
from fxguard.reproduce.reproducible import same_failure, same_gradient
from fxguard.reproduce.shrinking import Shrinker, size_of

HALF = torch.float16


def shrunk(operation: OneOperation) -> OneOperation:
    sameness = same_gradient if operation.is_backward else same_failure
    shrinker = Shrinker(operation, sameness)
    before = shrinker.failure
    assert before is not None, "it does not fail"
    shrinker.shrink()
    evidence = shrinker.operation.evidence()
    assert evidence is not None
    assert sameness(evidence) == before
    return shrinker.operation


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * scale


def masked_scores() -> Tensor:
    scores = drawn(2, 4, 16, 16)
    scores[1, 2, 3] = -torch.inf
    return scores


def with_zero() -> Tensor:
    x = drawn(4, 5).abs()
    x[2, 3] = 0
    return x


CASES: dict[str, tuple[Callable[[], OneOperation], list[list[int]]]] = {
    "elementwise": (
        lambda: OneOperation("mul", operator.mul, (drawn(4, 64, scale=300).to(HALF),) * 2),
        [[1, 1], [1, 1]],
    ),
    "rows and columns": (
        lambda: OneOperation(
            "matmul",
            torch.matmul,
            (drawn(2, 8, 32, scale=500).to(HALF), drawn(32, 16, scale=500).to(HALF)),
        ),
        [[1, 1, 1], [1, 1]],
    ),
    "a method with a keyword": (
        lambda: OneOperation("softmax", "softmax", (masked_scores(),), {"dim": -1}),
        [[1, 1, 1, 1]],
    ),
    "a number that says a size": (
        lambda: OneOperation(
            "layer_norm", F.layer_norm, (torch.zeros(4, 64, dtype=HALF), (64,), None, None, 0.0)
        ),
        [[1, 1]],
    ),
    "indices": (
        lambda: OneOperation(
            "cross_entropy", F.cross_entropy, (drawn(8, 10), torch.full((8,), -100))
        ),
        [[1, 1], [1]],
    ),
    "a gradient": (
        lambda: OneOperation(
            "sqrt", torch.sqrt, (with_zero(),), incoming={0: drawn(4, 5)}, operand=0
        ),
        [[1, 1], [1, 1]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_smallest_slice_is_found(name: str) -> None:
    """One element where one element is enough, whatever the operation is called with."""
    operation, shapes = CASES[name]
    assert [list(x.shape) for x in shrunk(operation()).tensors] == shapes


def test_what_takes_many_stays_many() -> None:
    """A sum of ones that overflows takes more than 65504 of them, and not many more."""
    found = shrunk(OneOperation("sum", torch.sum, (torch.ones(2**18, dtype=HALF),)))
    assert 65504 < found.tensors[0].numel() < 65504 * 1.01


def test_numbers_become_simple() -> None:
    """A divisor of 0 stays, and what it divides becomes 1."""
    found = shrunk(OneOperation("div", torch.div, (drawn(8, 8), torch.zeros(8, 1))))
    assert [x.item() for x in found.tensors] == [1, 0]


def test_of_a_large_operand_that_cannot_be_cut_pairs_stay() -> None:
    """Two elements at a time are simplified there, and not one by one."""

    def whole(x: Tensor) -> Tensor:
        return x.view(8, 16).square()

    x = drawn(8, 16).to(HALF) + 5
    x[3, 7] = 3e4
    found = shrunk(OneOperation("whole", whole, (x,)))
    assert found.tensors[0].shape == x.shape
    kept = (found.tensors[0] != 0) & (found.tensors[0] != 1)
    assert kept.nonzero().tolist() == [[3, 6], [3, 7]]


def test_the_failure_stays_the_same() -> None:
    """0 / 0 would be simpler than x / 0, and is another problem."""
    infinite = shrunk(OneOperation("div", torch.div, (torch.tensor([3.7]), torch.zeros(1))))
    assert torch.isinf(infinite.run())
    overflows = OneOperation("mul", torch.mul, (torch.tensor([3e4], dtype=HALF),) * 2)
    evidence = shrunk(overflows).evidence()
    assert evidence is not None
    assert evidence.same is not None
    assert 65504 < evidence.same < torch.inf, "an overflow, and no product of infinities"


def test_cutting_stops_where_it_is_small_enough() -> None:
    """Cuts are views until then: nothing is copied."""
    x = torch.full((1024, 64), 3e4, dtype=HALF)
    shrinker = Shrinker(OneOperation("mul", torch.mul, (x, 3.0)), same_failure)
    shrinker.cut(10_000)
    assert size_of(shrinker.operation) <= 10_000
    cut = shrinker.operation.tensors[0]
    assert cut.numel() > 1
    assert cut.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_what_does_not_fail_is_said() -> None:
    """And nothing is made of it."""
    shrinker = Shrinker(OneOperation("exp", torch.exp, (torch.zeros(3),)), same_failure)
    assert not shrinker.fails
    shrinker.shrink()
    assert shrinker.operation.tensors[0].shape == (3,)


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found until then is good enough."""
    now = iter(range(10**9))
    monkeypatch.setattr(shrinking.time, "monotonic", lambda: float(next(now)))
    x = torch.full((2**12,), 3e4, dtype=HALF)
    shrinker = Shrinker(OneOperation("mul", torch.mul, (x, 3.0)), same_failure, seconds=4)
    shrinker.shrink()
    assert 1 < shrinker.operation.tensors[0].numel() < 2**12


@settings(max_examples=50, deadline=None)
@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False))
def test_simpler_numbers_are_simpler(number: float) -> None:
    """Fewer digits, never the number itself: else the search would not end."""
    found = list(shrinking.simpler(number))
    assert number not in found
    assert [float(f"{number:.{n}g}") for n in range(1, len(found) - 1)] == found[2:]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_failure_of_a_product_stays_one(data: Any) -> None:
    """Drawn operands, drawn places of what fails."""
    shape = data.draw(st.tuples(*[st.integers(1, 6)] * 3))
    left, right = drawn(*shape[:2]), drawn(*shape[1:])
    bad = data.draw(st.sampled_from([torch.inf, torch.nan, 3e38]))
    left[data.draw(st.integers(0, shape[0] - 1)), data.draw(st.integers(0, shape[1] - 1))] = bad
    operation = OneOperation("mm", torch.mm, (left, right * 1e3))
    if operation.evidence() is not None:
        found = shrunk(operation)
        assert found.tensors[0].numel() <= left.numel()
