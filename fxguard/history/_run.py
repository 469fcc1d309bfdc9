"""One run of a training: its rows in files, and the events that these show."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fxguard.history._judge import Judge, not_known
from fxguard.history._news import News
from fxguard.history._resumed import Beginning, judged, last_rows
from fxguard.history._series import Row, Series
from fxguard.history._trials import Trial
from fxguard.history._tried import with_trial
from fxguard.history._writer import Writer
from fxguard.report import terminal
from fxguard.report.event import Event

__all__ = ["Run"]


class Run:
    """Writes rows down, and tells of events. A run in the folder of another one goes on with it.

    Args:
        folder: of the history.
        rank: of this process, and how many there are.
        about: the run, as plain data.
        series: in the order of their positions; the list is read, and more come.
        named: gives an event the name of the operation that has changed, if one has.
    """

    def __init__(
        self,
        folder: Path,
        rank: tuple[int, int],
        about: Mapping[str, str],
        series: list[Series],
        named: Callable[[Event], Event],
    ) -> None:
        self._writer = Writer(folder, rank=rank[0], about=about)
        self.number = self._writer.next_step  # of the step that runs
        self._rank, self._series, self._named = rank[0], series, named
        self._news = News(self._writer.folder, *rank)
        for each in series:
            self._writer.register(each)
        self._told: dict[int, Event] = {}  # the last of each step that has shown one
        rows = last_rows(self._writer.folder, self._rank, series, self.number)
        self.judge: Judge = judged(series, rows)
        self._beginning = Beginning(series, rows) if rows else None

    @property
    def folder(self) -> Path:
        """Of the history."""
        return self._writer.folder

    @property
    def broke_off(self) -> bool:
        """Whether nothing more is written, which was told."""
        return self._writer.broke_off

    def register(self, series: Series) -> None:
        """Take one more series."""
        self.judge.register(series)
        self._writer.register(series)

    def add(self, row: Row, trial: Trial | None) -> list[Event]:
        """Take the numbers of the step that has ended, and return the events that it shows.

        Args:
            row: the numbers.
            trial: second runs that may tell of its events; None if there were none.
        """
        if self._beginning is not None:
            self._beginning.take(row)
        self.number += 1
        self._writer.add(row)
        found = self.judge.seen(row, not_known if trial is None else trial.shows_data)
        events = self._as_before([with_trial(self._named(x), trial, self._series) for x in found])
        for event in events:
            self._writer.event(event)
        self._news.tell(events)
        if events:
            self._told[row.step] = events[-1]
        if self.judge.moved is not None:
            opened, sentence = self.judge.moved
            if (told := self._told.get(opened)) is not None:
                self._loss_moved(told, sentence, trial)
        return events

    def _loss_moved(self, event: Event, sentence: str, trial: Trial | None) -> None:
        """Write an event again, of which the loss has moved later."""
        lead = self.number - 1 - event.step
        event = replace(event, lead=lead, evidence=(*event.evidence, sentence))
        event = replace(event, tried=with_trial(event, trial, self._series).tried)
        self._writer.event(event)
        self._news.moved(event, sentence)

    def close(self) -> None:
        """End the files, and tell what waits."""
        self._news.close()
        self._writer.close()

    def _as_before(self, events: list[Event]) -> list[Event]:
        """The events of a step; none if a resumed run turns out to be another training."""
        if self._beginning is None:
            return events
        elsewhere = self._beginning.elsewhere(events)
        events = [*map(self._beginning.in_words, events)]
        if elsewhere:
            self.judge = judged(self._series, self._beginning.rows)
            if not self._rank:
                terminal.write(f"fxguard: {elsewhere}", sys.stderr)
        if elsewhere or self._beginning.is_over:
            self._beginning = None
        return [] if elsewhere else events
