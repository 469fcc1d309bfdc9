"""An operation that makes infinities all the time, as a mask does, is looked at now and then."""

from __future__ import annotations

from fxguard.batch.loss import Loss
from fxguard.batch.plain_operations import USUAL, TurnedBad

LINE = "train.py", 7


def test_the_first_ones_are_looked_at_and_one_of_each_loss() -> None:
    turned_bad = TurnedBad()
    batch = Loss(0, turned_bad).batch
    assert not any(batch.is_usual("log", LINE, is_nan=False) for _ in range(USUAL))
    assert [batch.is_usual("log", LINE, is_nan=False) for _ in range(3)] == [False, True, True]
    batch.look_anew()
    assert [batch.is_usual("log", LINE, is_nan=False) for _ in range(3)] == [False, True, True]
    again = Loss(1, turned_bad).batch
    assert [again.is_usual("log", LINE, is_nan=False) for _ in range(3)] == [False, True, True]


def test_each_line_and_kind_for_itself() -> None:
    batch = Loss(0).batch
    for _ in range(USUAL + 2):
        batch.is_usual("log", LINE, is_nan=False)
    assert not batch.is_usual("log", LINE, is_nan=True)
    assert not batch.is_usual("log", ("train.py", 8), is_nan=False)
    assert not batch.is_usual("div", LINE, is_nan=False)
    assert batch.is_usual("log", LINE, is_nan=False)
