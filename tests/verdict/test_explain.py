"""What the verdict says about an origin: what it read, what it needed, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.verdict import judge, origins
from support.masks import MASK, X, finfo_mask, report_of, softmax_of

WAYS = ("captured", "between graphs")


@contextmanager
def run_in(way: str) -> Iterator[None]:
    """Let models be captured, or leave all of them to Python."""
    torch.compiler.set_stance("default" if way == "captured" else "force_eager")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with run_in(request.param):
        yield request.param


NEEDED: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype, float]] = {
    "product": (lambda x: x * 300 * (x * 300), torch.float16, (6 * 300.0) ** 2),
    "power": (lambda x: (x * 1e30).pow(2), torch.float32, (6e30) ** 2),
    "exponential": (lambda x: torch.exp(x * 20), torch.float32, math.exp(120)),
    "matrix product": (lambda x: (x * 100) @ (x * 100).T, torch.float16, 77e4),
    "cast": (lambda x: (x.float() * 20000).half(), torch.float16, 120000.0),
    "method in place": (lambda x: (x * 300).mul_(x * 300), torch.float16, (6 * 300.0) ** 2),
}


@pytest.mark.parametrize("name", NEEDED)
def test_how_far_over_the_limit_it_went(name: str, way: str) -> None:
    """The same operation in float64 says what would have been needed, against ``math``."""
    function, dtype, needed = NEEDED[name]
    origin = report_of(function, X.to(dtype)).origins[0]
    assert origin.problem == "inf"
    assert origin.limit == torch.finfo(dtype).max
    if way == "captured" or not name.endswith("in place"):
        assert origin.needed == pytest.approx(needed, rel=1e-2)
        lines = "\n".join(report_of(function, X.to(dtype)).verdict)
        assert f"{origin.needed / origin.limit:.3g} times what {origin.dtype} holds" in lines


def test_a_dtype_that_the_user_asked_for_is_no_limit(way: str) -> None:
    """What a reduction would need is told also where it was told its dtype."""
    report = report_of(lambda x: torch.mul(x * 1e30, 1e30).sum(dtype=torch.float32), X)
    assert report.origins[0].needed == pytest.approx(6e60, rel=1e-2)
    report = report_of(lambda x: (x * 1e38).sum(dtype=torch.float32), X)
    assert report.origins[0].needed is not None
    half = report_of(lambda x: torch.full_like(x, 6e4).sum(dtype=torch.float16), X.half())
    assert half.origins[0].what == "sum"
    assert half.origins[0].needed == pytest.approx(X.numel() * 6e4, rel=1e-2)
    assert "what float16 holds (65504)" in "\n".join(half.verdict)


def test_what_no_dtype_holds_is_called_that(way: str) -> None:
    """log(0) is no matter of precision."""
    report = report_of(lambda x: torch.log(x - 1), X)
    assert report.origins[0].needed == math.inf
    assert report.origins[0].cause == "zero divisor"
    assert any("log(0" in line for line in report.verdict)


def test_where_the_magnitude_grew(way: str) -> None:
    """The steps that contributed most on the way back along the largest operand, in order."""

    def function(x: Tensor) -> Tensor:
        y = x * 100  # 6e2
        y = y + 1
        y = torch.relu(y) * 1.2
        return (y * 1000).half()  # 7e5

    origin = report_of(function, X).origins[0]
    assert [step.title for step in origin.climb] == ["mul", "mul"]
    assert [round(step.after / step.before) for step in origin.climb] == [100, 1000]
    values = [(step.before, step.after) for step in origin.climb]
    assert values == sorted(values)
    assert all(step.source is not None for step in origin.climb)


def test_the_climb_goes_through_the_larger_operand() -> None:
    """Two branches meet: the one that is large is told."""

    def function(x: Tensor) -> Tensor:
        small = torch.tanh(x)
        large = torch.exp(x * 14)
        return large * large * small

    origin = report_of(function, X).origins[0]
    assert (origin.what, origin.problem) == ("mul", "inf")
    assert [step.title for step in origin.climb] == ["mul", "exp"]


def test_what_it_spread_to(way: str) -> None:
    """Later operations that are bad because of it, by name and number, and the model's output."""

    def function(x: Tensor) -> Tensor:
        y = torch.exp(x * 100)
        return torch.relu(y).add(1).mul(2).sub(1)

    origin = report_of(function, X).origins[0]
    assert origin.what == "exp"
    assert origin.spread == ("relu", "add", "mul")
    assert origin.spread_count == 4
    assert origin.reached_output


def test_a_bad_value_that_stays_inside_does_not_reach_the_output() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return torch.nan_to_num(self.same(torch.exp(x * 100)))

    reports: list[fxguard.types.Report] = []
    fxguard.instrument(Inner(), on_detect=reports.append, strict=True)(X)
    assert not reports[0].origins[0].reached_output


def test_what_follows_is_told_as_such(way: str) -> None:
    """NaN made of the inf of another origin is no cause of its own; an independent one is."""

    def function(x: Tensor) -> Tensor:
        y = torch.exp(x * 100)
        z = torch.sqrt(-x)
        return (y - y) + z

    report = report_of(function, X)
    assert [(o.what, o.follows) for o in report.origins] == [
        *[("exp", False), ("sqrt", False), ("sub", True)]
    ]
    assert any(line.startswith("then sub made NaN") for line in report.verdict)


ROWS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "softmax": (lambda x: softmax_of(x.masked_fill(torch.ones_like(MASK), -math.inf)), True),
    "other dimension": (
        lambda x: torch.softmax(torch.where(X > 3, -math.inf, x).T, dim=0),
        True,
    ),
    "by hand": (
        lambda x: by_hand(x.masked_fill(torch.ones_like(MASK), -math.inf)),
        True,
    ),
    "no mask": (lambda x: softmax_of(torch.exp(x * 100)), False),
}


def by_hand(scores: Tensor) -> Tensor:
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("name", ROWS)
def test_a_fully_masked_row_is_called_that(name: str, way: str) -> None:
    """NaN out of a row of nothing but -inf; any other NaN is not called so."""
    function, masked = ROWS[name]
    report = report_of(function, X)
    text = "\n".join(report.verdict)
    assert ("masked row" in text) == masked
    assert any(origin.masked_row for origin in report.origins) == masked


def test_scores_that_overflow_under_a_mask_are_blamed_on_the_addition(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum with a mask of ``finfo.min`` may hold -inf; +inf in it is an overflow."""

    def function(scores: Tensor) -> Tensor:
        return softmax_of((scores * 1e4 + scores * 1e4) + finfo_mask(scores))

    scores = torch.tensor([[3.0, 1.0, -3.0], [3.2, 1.0, -1.0]]).half()

    assert report_of(function, scores / 4) is None

    def positive(x: Tensor) -> Tensor:
        mask = finfo_mask(x) + (~MASK).to(x.dtype) * 6e4
        return softmax_of(x * 1e4 + mask)

    report = report_of(positive, scores)
    assert report.origins[0].what == "add"
    assert report.origins[0].posinf_count
    monkeypatch.setattr(judge.Judgment, "overflowed", lambda _: set())
    assert report_of(positive, scores).origins[0].what == "softmax"


def test_memory_that_nobody_wrote_yet_is_no_fault(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``empty`` may hold anything until it is written; to return it is a fault."""

    def filled(x: Tensor) -> Tensor:
        memory = torch.full_like(x, math.nan)
        return memory.copy_(x)

    class Memory(nn.Module):
        """Stands for ``empty`` in memory that held NaN: a module returns it before it is full."""

        def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
            super().__init__()
            self.use, self.same = use, nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            memory = self.same(torch.full_like(x, math.nan))
            return self.use(memory, x)

    def reports_of(use: Callable[[Tensor, Tensor], Tensor], **options: Any) -> list[Any]:
        reports: list[fxguard.types.Report] = []
        fxguard.instrument(Memory(use), on_detect=reports.append, **options)(X)
        return reports

    def write(memory: Tensor, x: Tensor) -> Tensor:
        return memory.copy_(x) * 2

    assert reports_of(write, strict=True)[0].origins[0].what == "full_like"
    monkeypatch.setattr(origins, "UNINITIALISED", {"full_like"})
    assert not reports_of(write)
    assert not reports_of(write, strict=True)
    assert reports_of(lambda memory, x: memory + x)[0].origins[0].what == "full_like"
    partly = reports_of(lambda memory, x: memory.copy_(torch.sqrt(-x)) * 2)
    assert [origin.what for origin in partly[0].origins] == ["sqrt"]
    assert report_of(filled, X) is None


def test_the_operations_that_hand_out_memory() -> None:
    """Every torch function of that kind is in the table."""
    names = {name for name in dir(torch) if name.startswith("empty")}
    names |= {name for name in dir(Tensor) if name.startswith("new_empty")}
    assert names <= origins.UNINITIALISED


def test_a_mask_that_is_cast_to_a_narrower_dtype_is_still_one(way: str) -> None:
    """float32's lowest number is -inf in float16; a cast activation that overflows is none."""

    def mask(x: Tensor) -> Tensor:
        return ((1.0 - (~MASK).float()) * torch.finfo(torch.float32).min).to(x.dtype)

    assert report_of(lambda x: softmax_of(x + mask(x)), X.half()) is None
    assert report_of(mask, X.half()) is None
    assert report_of(lambda x: (x.float() * 1e5).to(x.dtype), X.half()).origins[0].what == "to"


def test_strict_lists_all_in_order_of_execution(way: str) -> None:
    """What was absorbed stands where it ran, not behind the rest."""

    def function(x: Tensor) -> Tensor:
        y = torch.where(x > 1, torch.log(x - 1), x)
        return torch.sqrt(-y)

    report = report_of(function, X, strict=True)
    assert [origin.what for origin in report.origins] == ["log", "sqrt"]
    assert not report.absorbed
