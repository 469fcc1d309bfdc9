"""Finds the events of a training run while it runs, and what caused each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor

from fxguard.history._bands import distances, in_octaves
from fxguard.history._causes import explained, growth, jump_of_growth
from fxguard.history._climbs import Climb, Climbs, begins
from fxguard.history._evidence import LOSS, of_loss
from fxguard.history._first import Exit, first_exit
from fxguard.history._gradients import Gradients
from fxguard.history._out_of_band import raised
from fxguard.history._rows import KEPT, Rows
from fxguard.history._said import said
from fxguard.history._series import Row, Series
from fxguard.history._watch import HUGE, STAYS, TINY, USUAL, Watch
from fxguard.measure.at_hand import own_arithmetic
from fxguard.report.event import Event

__all__ = ["Judge"]

IsData = Callable[[int], bool | None]

SETTLED = 32  # steps within the band after which an event has ended


def not_known(step: int) -> bool | None:
    """Of a step whose batch was not run again."""
    return None


class _Stage:
    """What is usual while one backward, or several, train the model.

    Attributes:
        had: positions of the losses that these began with.
        known: how many series it has taken.
        grows: position of the series that climbs.
        begin: the step in which its climb began.
        calm: steps since something was out of its band.
        jumped: the last step in which something was.
        event: the step of an event that has not ended.
        is_awaited: whether its loss has not moved yet.
        ended: the last step of the event before.
    """

    def __init__(self, had: Iterable[int] = ()) -> None:
        self.had = set(had)
        self.known = 0
        self.rows = Rows()
        self.climbs = Climbs()
        self.losses: dict[int, Watch] = {}
        self.gradients = Gradients()
        self.grows: int | None = None
        self.begin = -1
        self.calm = 0
        self.jumped = -STAYS - 1
        self.event: int | None = None
        self.is_awaited = False
        self.ended = -1

    def take(self, place: int, series: Series) -> None:
        """Take a series; its position is that in all rows."""
        self.known = place + 1
        if series.kind == "loss":
            self.losses[place] = Watch(rises=True)
        if series.is_gradient:
            self.gradients.add(place)


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
        self._stage = _Stage()
        self._earlier: list[_Stage] = []  # that lasted, and may come back
        self._losses = set[int]()  # positions of those that were measured
        # The loss, in the last step, behind an event: the step that opened that, and how far.
        self.moved: tuple[int, str] | None = None

    def register(self, series: Series) -> int:
        """Take a series, at any time; return its position in the rows from then on."""
        place = len(self._series)
        self._series.append(series)
        self._stage.take(place, series)
        return place

    def watch_of(self, loss: int) -> Watch | None:
        """What says whether a loss jumps; None if the series is no loss."""
        return self._stage.losses.get(loss)

    @property
    def has_event(self) -> bool:
        """Whether an event goes on that does not wait for its loss to move."""
        return self._stage.event is not None and not self._stage.is_awaited

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
        self._change_stage(row)
        stage = self._stage
        stage.rows.add(row)
        is_calm = self._is_calm(row.step)
        climb = stage.climbs.seen(stage.rows, self._series, is_calm=is_calm)
        if stage.climbs.told is None:
            stage.grows = None
        grown = [self._growth(climb)] if climb else []
        jumped, loss = self._jumped(row)
        self.moved = None
        if stage.event is not None:
            if stage.is_awaited and loss is not None:
                stage.is_awaited = False
                steps, table = stage.rows.last(2, len(self._series))
                self.moved = stage.event, of_loss(steps, table, len(steps) - 1, loss)
            stage.calm = 0 if jumped else stage.calm + 1
            if stage.calm >= SETTLED:
                stage.ended, stage.event = row.step, None
            return grown
        if jumped:
            stage.jumped = row.step
        event = self._explained(is_data) if jumped else None
        if event is None and row.step - stage.jumped <= STAYS:
            event = self._stays_up(is_data)
        if event is not None:
            stage.calm, stage.event = 0, row.step
            stage.is_awaited = not any(x.startswith(LOSS) for x in event.evidence)
            grown.append(event)
        return grown

    def _change_stage(self, row: Row) -> None:
        """Begin a stage where another backward trains the model, as after a pretraining.

        One that lasted goes on where its backward comes back, as after a search for a rate.
        """
        stage, high = self._stage, row.high
        losses = {x for x in stage.losses if x < len(high) and high[x] == high[x]}
        if not losses or not stage.had or losses & stage.had:
            stage.had |= losses
            self._losses |= losses
            return
        is_new = losses.isdisjoint(self._losses)
        back = next((each for each in self._earlier if each.had & losses), None)
        if back is None and not is_new:  # of a stage that did not last
            stage.had |= losses
            return
        if stage.rows.count >= USUAL and stage not in self._earlier:
            self._earlier.append(stage)
        self._stage = _Stage(losses) if back is None else back
        self._losses |= losses
        for place in range(self._stage.known, len(self._series)):
            self._stage.take(place, self._series[place])

    def _jumped(self, row: Row) -> tuple[bool, int | None]:
        """Whether a loss or a gradient is above its band, and the position of that loss."""
        high, found = row.high, None
        for place, watch in self._stage.losses.items():
            if place < len(high) and watch.jumps(high[place]):
                found = place
        return self._stage.gradients.jump(high, self._stage.rows) or found is not None, found

    def _is_calm(self, step: int) -> bool:
        """Whether no event goes on, and what is usual was learned after the last one."""
        stage = self._stage
        return stage.event is None and (stage.ended < 0 or step - stage.ended > USUAL)

    def _growth(self, climb: Climb) -> Event:
        steps, table = self._stage.rows.last(2 * USUAL, len(self._series))
        column = table[:, climb.place]
        if self._stage.grows != climb.place:
            self._stage.grows = climb.place
            self._stage.begin = steps[begins(column.abs().log2().clamp(TINY, HUGE))]
        event = growth(self._series[climb.place], climb, self._stage.begin, float(column[-1]))
        return replace(event, evidence=event.evidence + self._raised(steps, table, climb.place))

    def _raised(self, steps: list[int], table: Tensor, climbs: int) -> tuple[str, ...]:
        """The setting of an optimizer that was raised last, as a sentence; none for a schedule."""
        found: tuple[int, str] | None = None
        for place, known in enumerate(self._series):
            if known.kind == "setting" and place != climbs:
                lines = raised(table[:, place].abs().log2()).nonzero().flatten().tolist()
                if lines and (found is None or lines[-1] > found[0]):
                    one = Exit(lines[-1], place, 0.0, is_rare_write=False)
                    found = lines[-1], said(self._series, steps, table, one)
        return () if found is None else (found[1],)

    def _stays_up(self, is_data: IsData) -> Event | None:
        """The event of a loss that does not come back, and that no series explains.

        Second runs may have shown that its batches do. A loss that comes back, as behind each
        update of a target network, may do so all the time.
        """
        steps, table = self._stage.rows.last(KEPT, len(self._series))
        line = len(steps) - STAYS
        for place, watch in self._stage.losses.items():
            if watch.stays_up:
                far = distances(in_octaves(table, self._series))
                one = Exit(line, place, float(far[line, place]), is_rare_write=False)
                may_be = bool(is_data(steps[line]))
                return explained(self._series, steps, table, far, [one], may_be_data=may_be)
        return None

    def _explained(self, is_data: IsData) -> Event | None:
        """What the last row shows; None if nothing in it is out of its own band."""
        steps, table = self._stage.rows.last(KEPT, len(self._series))
        values = in_octaves(table, self._series)
        far = distances(values)
        climb = self._stage.climbs.told
        if climb is not None:
            return jump_of_growth(self._series, steps, table, far, climb, self._stage.begin)
        after = max(
            (line for line, step in enumerate(steps) if step <= self._stage.ended), default=-1
        )
        exits = first_exit(self._series, values, far, after)
        if not exits:
            return None
        may_be_data = is_data(steps[exits[0].line]) is not False
        return explained(self._series, steps, table, far, exits, may_be_data=may_be_data)
