"""The numbers of one step: many at once are as one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from fxguard.history._norms import Number
from fxguard.history._open_step import OpenStep, as_range

NUMBERS = [1.0, 0.0, math.inf, 2.0]


def opened(count: int = 4) -> tuple[OpenStep, list[int]]:
    """A step, and the positions of some series."""
    step = OpenStep(lambda series: None)
    return step, [step.series("weight", f"w{i}") for i in range(count)]


def rows_of(
    series: Sequence[int], *given: tuple[Sequence[Number], Sequence[Number] | None]
) -> tuple[list[float], list[float]]:
    step, _ = opened()
    for numbers, by in given:
        step.note_all(series, numbers, by)
    row = step.row(0)
    return row.low, row.high


@pytest.mark.parametrize(
    "given",
    [
        pytest.param([(NUMBERS, None)], id="once"),
        pytest.param([(NUMBERS, None), ([0.5, 3.0, 1.0, 2.0], None)], id="twice in a row"),
        pytest.param([([1.0, math.nan, 2.0, 3.0], None)], id="nan"),
        pytest.param([(NUMBERS, [2.0, 0.0, 1.0, 0.0])], id="quotients"),
        pytest.param([([*map(torch.tensor, NUMBERS)], None)], id="on a device"),
        pytest.param([([1.0, torch.tensor(4.0), 2.0, 3.0], None)], id="some on a device"),
    ],
)
def test_many_at_once_are_as_one_by_one(
    given: list[tuple[Sequence[Number], Sequence[Number] | None]],
) -> None:
    step, places = opened()
    together = as_range(places)
    assert isinstance(together, range)
    for numbers, by in given:
        for at, place in enumerate(places):
            step.note_all([place], numbers[at : at + 1], None if by is None else by[at : at + 1])
    alone = step.row(0)
    for found, wanted in zip(rows_of(together, *given), (alone.low, alone.high), strict=True):
        assert torch.tensor(found).equal(torch.tensor(wanted)) or str(found) == str(wanted)


def test_the_numbers_of_one_step_do_not_stay_for_the_next() -> None:
    step, places = opened()
    step.note_all(as_range(places), NUMBERS)
    step.row(0)
    step.note_all(as_range(places[:2]), [5.0, 6.0])
    row = step.row(1)
    assert row.high[:2] == row.low[:2] == [5.0, 6.0]
    assert all(map(math.isnan, row.high[2:]))


def test_positions_that_do_not_follow_one_another_are_no_range() -> None:
    assert as_range([3, 4, 6]) == [3, 4, 6]
    assert as_range([3, 4, 5]) == range(3, 6)
    assert as_range([]) == range(0)


def test_a_series_is_found_by_what_its_name_is_made_of() -> None:
    step, places = opened()
    assert step.series("weight", "w2") == places[2]
    assert step.series("weight", "w2", detail="buffer") == len(places)
