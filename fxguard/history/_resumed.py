"""What a resumed run knows of the one before: its last steps, so that bands go on with it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fxguard.errors import UsageError
from fxguard.history._causes import is_by_elimination
from fxguard.history._files import listed
from fxguard.history._judge import Judge
from fxguard.history._rows import KEPT
from fxguard.history._series import BUFFER, Row, Series
from fxguard.history._stretches import read_parts
from fxguard.report.event import Cause, Event
from fxguard.report.in_words import names_text

__all__ = ["Beginning", "judged", "last_rows"]

STEPS = 64  # in which a jump may have its cause in the first step
MOST = 3  # weights that are named
APART = 8  # usual changes of a weight's norm in a step
ROUNDING = 1e-4  # of a norm, as where a checkpoint is in half precision
OF_WEIGHTS: tuple[Cause, ...] = ("operation", "weights", "unknown")
ELSEWHERE = "this run does not begin where the one before has ended, and is judged by itself"


class Beginning:
    """The first steps of a resumed run, in which it shows whether it is the same training.

    The first step has its loss before anything is trained. If the operations of that are others
    than usual, with data as usual, the weights are not those of the run before; unless most of
    them are, and some were left out of a checkpoint.

    Args:
        series: in the order of their positions; more may come.
        before: the last steps of the run before.

    Attributes:
        rows: the steps.
    """

    def __init__(self, series: Sequence[Series], before: Sequence[Row]) -> None:
        self.rows: list[Row] = []
        self._series = series
        self._before = before[-STEPS:]
        self._is_restored = False
        self._others: list[str] = []  # weights that were not restored
        self._of = 0  # how many there are of all
        self._new: list[str] = []  # weights that the run before did not have
        self._weights = 0  # how many there are now

    def take(self, row: Row) -> None:
        """Take the next step; in the first, note how far weights are from the run before.

        Args:
            row: the step. The change of a weight that was not restored is added to it.
        """
        if not self.rows:
            self._note_new(row)
            drifts = {each.what: at for at, each in enumerate(self._series) if each.kind == "drift"}
            changes = {
                drifts[each.what]: _change([x.high[at] for x in self._before], row.high[at])
                for at, each in enumerate(self._series)
                if each.kind == "weight" and each.what in drifts and at < len(self._before[-1].high)
            }
            changed = {at: change for at, change in changes.items() if change}
            self._is_restored = 2 * len(changed) < len(changes)
            if self._is_restored:
                self._others = [self._series[at].what for at in changed]
                self._of = len(changes)
                for at, change in changed.items():
                    row.low[at] = row.high[at] = change
        self.rows.append(row)

    def _note_new(self, row: Row) -> None:
        before = self._before[-1].high
        for at, each in enumerate(self._series):
            if each.kind == "weight" and each.detail != BUFFER and not math.isnan(row.high[at]):
                self._weights += 1
                if not at < len(before) or math.isnan(before[at]):
                    self._new.append(each.what)

    @property
    def is_over(self) -> bool:
        """Whether what follows has no cause in the first step."""
        return len(self.rows) >= STEPS

    def in_words(self, event: Event) -> Event:
        """An event with what is known of weights that were not restored."""
        if event.step != self.rows[0].step:
            return event
        if self._new:
            event = replace(event, evidence=(*event.evidence, self._of_new(event.step)))
        if event.what not in self._others:
            return event
        count = len(self._others)
        text = (
            f"the run was resumed in step {event.step}, and the norms of {count} of {self._of} "
            f"weights are not what the run before has ended with: {names_text(self._others, MOST)}"
        )
        return replace(event, evidence=(text, *event.evidence[1:]))

    def _of_new(self, step: int) -> str:
        first, last, count = self._new[0], self._new[-1], len(self._new)
        which = first if count == 1 else f"from {first} to {last}"
        return (
            f"the run was resumed in step {step}, and {count} of {self._weights} weights were not "
            f"there before: {which}"
        )

    def elsewhere(self, events: Sequence[Event]) -> str:
        """What shows that this is another training, as a line; "" for nothing."""
        first = self.rows[0].step
        if self._is_restored:
            return ""
        for event in events:
            is_of_weights = event.cause in OF_WEIGHTS or is_by_elimination(event)
            if event.step <= first and is_of_weights:
                return f"step {first}: {ELSEWHERE}{': '.join(['', *event.evidence[-1:]])}"
        return ""


def _change(before: Sequence[float], now: float) -> float:
    """How far a weight's norm is from those of the last steps, relative to it; 0 if it goes on."""
    known = [x for x in before if math.isfinite(x)]
    if not known or not math.isfinite(now):
        return 0.0
    steps = sorted(abs(x - y) for x, y in itertools.pairwise(known))
    room = APART * steps[len(steps) // 2] if steps else 0.0
    room += ROUNDING * max(known)
    apart = max(now - max(known), min(known) - now)
    return apart / max(now, max(known)) if apart > room else 0.0


def judged(series: Sequence[Series], rows: Sequence[Row]) -> Judge:
    """A judge that has seen steps already, and has told of them.

    Args:
        series: in the order of their positions.
        rows: the steps.
    """
    judge = Judge()
    for one in series:
        judge.register(one)
    for row in rows:
        judge.seen(row)
    return judge


def last_rows(folder: Path, rank: int, series: Sequence[Series], end: int) -> list[Row]:
    """The last steps of a rank that are there in full; empty if that cannot be read.

    Args:
        folder: of the history.
        rank: of this process.
        series: those that the rows have, by position. How often a graph was captured is not among
            them: a process begins to count anew.
        end: the step behind the last.
    """
    positions = {one.name: at for at, one in enumerate(series) if one.kind != "graph"}
    rows: dict[int, Row] = {}
    try:
        found, _ = listed(folder)
        for stretch in found:
            if stretch.rank == rank and stretch.last is not None and end - KEPT <= stretch.last:
                for part in read_parts(folder / stretch.name):
                    _add(rows, part, positions, (end - KEPT, len(series)))
    except (OSError, UsageError):  # somebody tidies the folder, or has damaged it
        return []
    return [rows[step] for step in sorted(rows)]


def _add(
    rows: dict[int, Row], part: Any, positions: Mapping[str, int], of: tuple[int, int]
) -> None:
    """Add the rows of a table that begin with a step, each of so many series."""
    from pyarrow import compute

    first, width = of
    is_late = compute.greater_equal(part["step"], first)
    is_whole = compute.equal(part["step"], part["last_step"])
    part = part.filter(compute.and_(is_late, is_whole))
    columns = (part[name].to_pylist() for name in ("step", "series", "low", "high"))
    for step, name, low, high in zip(*columns, strict=True):
        row = rows.get(step)
        if row is None:
            row = rows[step] = Row(step, [math.nan] * width, [math.nan] * width)
        if (at := positions.get(name)) is not None:
            row.low[at], row.high[at] = low, high
