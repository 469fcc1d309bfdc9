"""Finds the events of a training run while it runs, and what caused each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from fxguard.history._bands import distances, in_octaves
from fxguard.history._causes import explained, growth, jump_of_growth
from fxguard.history._climbs import Climb, Climbs, begins
from fxguard.history._first import Exit, first_exit, raised
from fxguard.history._gradients import Gradients
from fxguard.history._rows import KEPT, Rows
from fxguard.history._said import said
from fxguard.history._series import Row, Series
from fxguard.history._watch import HUGE, TINY, USUAL, Watch
from fxguard.measure.at_hand import own_arithmetic
from fxguard.report.event import Event

__all__ = ["Judge"]

IsData = Callable[[int], bool | None]

SETTLED = 32  # steps within the band after which an event has ended


def not_known(step: int) -> bool | None:
    """Of a step whose batch was not run again."""
    return None


class Judge:
    """Reads each step once, in order.

    Example:
        >>> judge = Judge()
        >>> place = judge.register(Series("loss train.py:9", "loss", "loss"))
        >>> [judge.seen(Row(step, [2.0], [2.0])) for step in range(80)][-1]
        []
        >>> judge.seen(Row(80, [9.0], [9.0]))[0].cause
        'unknown'
    """

    def __init__(self) -> None:
        self._series: list[Series] = []
        self._had = set[int]()  # positions of losses
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Know nothing of what is usual."""
        self._rows = Rows()
        self._climbs = Climbs()
        self._losses: dict[int, Watch] = {}
        self._gradients = Gradients()
        self._grows: int | None = None  # position of the series that climbs
        self._begin = -1  # step in which its climb began
        self._calm = 0  # steps since something was out of its band
        self._event: int | None = None  # step of an event that has not ended
        self._ended = -1  # last step of the event before
        for place, series in enumerate(self._series):
            self._watch(place, series)

    def register(self, series: Series) -> int:
        """Take a series, at any time; return its position in the rows from then on."""
        place = len(self._series)
        self._series.append(series)
        self._watch(place, series)
        return place

    def _watch(self, place: int, series: Series) -> None:
        if series.kind == "loss":
            self._losses[place] = Watch(rises=True)
        if series.kind == "gradient" and not series.detail:
            self._gradients.add(place)

    def watch_of(self, loss: int) -> Watch | None:
        """What says whether a loss jumps; None if the series is no loss."""
        return self._losses.get(loss)

    @property
    def has_event(self) -> bool:
        """Whether an event goes on."""
        return self._event is not None

    def seen(self, row: Row, is_data: IsData = not_known) -> list[Event]:
        """Take the numbers of one step; return the events that it shows.

        Args:
            row: the numbers.
            is_data: given the step in which something left its band, whether second runs have shown
                that the batch is the cause, or another cause; None if they have shown neither.
        """
        with own_arithmetic():
            return self._seen(row, is_data)

    def _seen(self, row: Row, is_data: IsData) -> list[Event]:
        if self._is_another_stage(row):
            self._begin_anew()
        numbers = self._rows.add(row)
        is_calm = self._is_calm(row.step)
        climb = self._climbs.seen(self._rows, self._series, is_calm=is_calm)
        if self._climbs.told is None:
            self._grows = None
        grown = [self._growth(climb)] if climb else []
        jumped = self._jumped(row, numbers)
        if self._event is not None:
            self._calm = 0 if jumped else self._calm + 1
            if self._calm >= SETTLED:
                self._ended, self._event = row.step, None
            return grown
        if not jumped:
            return grown
        event = self._explained(is_data)
        if event is not None:
            self._calm, self._event = 0, row.step
            grown.append(event)
        return grown

    def _is_another_stage(self, row: Row) -> bool:
        """Whether another backward trains the model from now on, as after a pretraining."""
        losses = {x for x in self._losses if x < len(row.high) and row.high[x] == row.high[x]}
        had, self._had = self._had, self._had | losses
        return bool(had and losses) and not had & losses

    def _jumped(self, row: Row, numbers: Tensor) -> bool:
        """Whether a loss or a gradient is above its band."""
        high, found = row.high, False
        for place, watch in self._losses.items():
            found |= place < len(high) and watch.jumps(high[place])
        return self._gradients.jump(numbers, self._rows) or found

    def _is_calm(self, step: int) -> bool:
        """Whether no event goes on, and what is usual was learned after the last one."""
        return self._event is None and (self._ended < 0 or step - self._ended > USUAL)

    def _growth(self, climb: Climb) -> Event:
        steps, table = self._rows.last(2 * USUAL, len(self._series))
        column = table[:, climb.place]
        if self._grows != climb.place:
            self._grows = climb.place
            self._begin = steps[begins(column.abs().log2().clamp(TINY, HUGE))]
        event = growth(self._series[climb.place], climb, self._begin, float(column[-1]))
        return replace(event, evidence=event.evidence + self._raised(steps, table, climb.place))

    def _raised(self, steps: list[int], table: Tensor, climbs: int) -> tuple[str, ...]:
        """The setting of an optimizer that was raised last, as a sentence; none for a schedule."""
        found: tuple[int, str] | None = None
        for place, known in enumerate(self._series):
            if known.kind == "setting" and place != climbs:
                lines = raised(table[:, place].abs().log2()).nonzero().flatten().tolist()
                if lines and (found is None or lines[-1] > found[0]):
                    one = Exit(lines[-1], place, 0.0, is_first_write=False)
                    found = lines[-1], said(self._series, steps, table, one)
        return () if found is None else (found[1],)

    def _explained(self, is_data: IsData) -> Event | None:
        """What the last row shows; None if nothing in it is out of its own band."""
        steps, table = self._rows.last(KEPT, len(self._series))
        values = in_octaves(table, self._series)
        far = distances(values)
        climb = self._climbs.told
        if climb is not None:
            return jump_of_growth(self._series, steps, table, far, climb, self._begin)
        after = max((line for line, step in enumerate(steps) if step <= self._ended), default=-1)
        exits = first_exit(self._series, values, far, after)
        if not exits:
            return None
        may_be_data = is_data(steps[exits[0].line]) is not False
        return explained(self._series, steps, table, far, exits, may_be_data=may_be_data)
