"""Numbers as a line of block characters."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from fxguard.report.sparkline import MARK, sparkline


def test_the_height_of_a_block_is_the_number() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([7, math.nan, 0, math.inf], 8) == "█ ▁!"


def test_a_spike_is_in_the_block_that_stands_for_many() -> None:
    """The largest of each stretch is drawn, and stretches begin at the mark."""
    numbers = [0.0] * 50 + [9.0] + [0.0] * 49
    drawn = sparkline(numbers, 10, mark=50)
    assert drawn == "▁▁▁▁▁│█▁▁▁▁"
    assert sparkline(numbers, 10, mark=47).index(MARK) == 5


def test_noise_stays_small() -> None:
    assert sparkline([1.0, 1.01, 0.99], 3, span=1.0) == "▁▁▁"
    assert len(set(sparkline([1.0, 1.01, 0.99], 3))) == 3


def test_nothing_is_an_empty_line() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([math.nan] * 3, 10) == "   "
    assert sparkline([5.0] * 3, 10) == "▁▁▁"


@given(st.lists(st.floats(), max_size=300), st.integers(1, 60), st.integers(0, 299))
def test_it_is_never_wider_than_it_may_be(numbers: list[float], width: int, mark: int) -> None:
    """But for the bar, and one block more where a stretch begins at the mark."""
    at = mark if mark < len(numbers) else None
    drawn = sparkline(numbers, width, mark=at)
    assert len(drawn) <= width + 2
    assert drawn.count(MARK) == (at is not None)
