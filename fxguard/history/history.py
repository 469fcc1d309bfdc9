"""Reads the history of a training run: the series of all steps, and the events.

Needs no torch. A history can be read while it is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fxguard.errors import UsageError
from fxguard.history._events import read_events
from fxguard.history._files import listed
from fxguard.history._meta import metas_of, read_meta
from fxguard.history._of_ranks import seen_by_ranks
from fxguard.history._series import Series
from fxguard.history._shown import ShownHistory
from fxguard.history._stream import glance
from fxguard.history._stretches import empty_table
from fxguard.history._tracks import Numbers
from fxguard.history.needed import need_pandas, need_pyarrow
from fxguard.history.track import Track
from fxguard.report.event import Event

__all__ = ["History", "Series", "Track", "load_history"]

TRIES = 8  # at reading a folder that is written; a stretch closes every 4,096 steps

T = TypeVar("T")


def load_history(folder: str | Path) -> History:
    """Read a folder that ``history=`` or ``--history`` wrote.

    The numbers are read when they are asked for.

    Args:
        folder: path of the folder.

    Raises:
        FxguardError: when it holds no history, when a file is damaged, or without pyarrow.
        OSError: when there is no such folder.

    Example::

        history = fxguard.load_history("history")
        print(history)
        loss = history.get("loss train.py:31")
        print(loss.steps[-1], loss.high[-1])
    """
    need_pyarrow()
    return _again_if_replaced(lambda: _load(Path(folder)))


def _load(folder: Path) -> History:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: it is no folder")
    found, _ = listed(folder)
    metas = [read_meta(path) for path in metas_of(folder)]
    if not found and not any(meta.runs for meta in metas):
        raise UsageError(f"{folder}: it holds no history of fxguard")
    described: dict[str, Series] = {}
    abouts: dict[int, Mapping[str, Any]] = {}
    ranks = {each.rank for each in found}
    ends = [each.last for each in found if each.last is not None]
    for meta in metas:
        described = {**meta.series, **described}
        for run in meta.runs.values():
            ranks.add(run.rank)
            abouts.setdefault(run.run, run.about)
    for each in found:
        abouts.setdefault(each.run, {})
        if each.last is None:
            series, last = glance(folder / each.name)
            described = {**{one.name: one for one in series}, **described}
            ends += [] if last is None else [last]
    first = min((each.first for each in found), default=0)
    steps = range(first, max(ends, default=first - 1) + 1)
    first_of_runs: dict[int, int] = {}
    for each in found:
        first_of_runs[each.run] = min(each.first, first_of_runs.get(each.run, each.first))

    def ranks_at(step: int) -> set[int]:
        """The ranks that have this step."""
        return {x.rank for x in found if x.first <= step and (x.last is None or step <= x.last)}

    def rank_of(event: Event) -> int | None:
        """The first rank that saw it."""
        return min(event.ranks or ranks_at(event.step), default=None)

    events = tuple(seen.event for seen in seen_by_ranks(read_events(folder), ranks_at))

    return History(
        folder,
        steps,
        described,
        events,
        tuple(map(rank_of, events)),
        tuple(sorted(ranks)),
        dict(sorted(abouts.items())),
        tuple(x for x in sorted(first_of_runs.values()) if first < x < steps.stop),
    )


class History(ShownHistory):
    """The history of a training run: what :func:`fxguard.load_history` returns.

    Attributes:
        folder: where it is.
        steps: the steps that it has, of all runs together.
        described: its series by their names.
        events: what happened, in order of the steps.
        ranks: the processes that have written to it.
        about: its runs by their numbers, and what is known about each.
        resumed: the first step of each run but the first.
    """

    def __init__(
        self,
        folder: Path,
        steps: range,
        described: Mapping[str, Series],
        events: tuple[Event, ...],
        seen_by: tuple[int | None, ...],
        ranks: tuple[int, ...],
        about: Mapping[int, Mapping[str, Any]],
        resumed: tuple[int, ...],
    ) -> None:
        self.folder, self.steps, self.described = folder, steps, described
        self.events, self.ranks, self.about, self.resumed = events, ranks, about, resumed
        self._seen_by = seen_by  # of each event the first rank that saw it
        self._numbers: dict[int, Numbers] = {}

    @property
    def series(self) -> tuple[str, ...]:
        """The names of the series, in the order of execution."""
        return tuple(sorted(self.described, key=lambda name: self.described[name].order))

    @property
    def runs(self) -> tuple[int, ...]:
        """The numbers of the runs: a training that was resumed has several."""
        return tuple(self.about)

    @property
    def inside(self) -> tuple[str, ...]:
        """The names of folders in this one that hold histories of other models of its program."""
        found = (each for each in self.folder.iterdir() if each.is_dir())
        return tuple(sorted(each.name for each in found if metas_of(each)))

    def get(self, name: str, rank: int | None = None) -> Track:
        """One series over all steps.

        Args:
            name: one of :attr:`series`.
            rank: the process; the first one that has measured it if this is None.

        Raises:
            FxguardError: when there is no such series or rank, or when a file is damaged.
        """
        series = self.described.get(name)
        if series is None:
            raise UsageError(f"the history in {self.folder} has no series {name!r}")
        if rank is not None and rank not in self.ranks:
            raise UsageError(f"the history in {self.folder} has no rank {rank}")
        asked = self.ranks if rank is None else (rank,)
        have_it = (each for each in asked if name in self._of_rank(each).parts)
        each = next(have_it, asked[0])
        columns = self._of_rank(each).columns(name)
        low, high, steps, last_steps = (
            columns[key] for key in ("low", "high", "step", "last_step")
        )
        return Track(series, each, steps, last_steps, low, high, columns["run"])

    def _of_rank(self, rank: int) -> Numbers:
        if rank not in self._numbers:
            self._numbers[rank] = _again_if_replaced(lambda: Numbers.of(self.folder, rank))
        return self._numbers[rank]

    def to_dataframe(self) -> Any:
        """All numbers as a DataFrame of pandas, one row for a series and a step.

        Its columns are run, rank, step, last_step, series, low and high.

        Raises:
            FxguardError: without pandas, or when a file is damaged.
        """
        need_pandas()
        import pyarrow

        tables = [empty_table()]
        tables += [table for rank in self.ranks for table in self._of_rank(rank).tables]
        return pyarrow.concat_tables(tables).unify_dictionaries().to_pandas(use_threads=False)

    def __str__(self) -> str:
        steps = f"steps {self.steps[0]} to {self.steps[-1]}" if self.steps else "no steps"
        parts = [steps, f"{len(self.series)} series", *self.whose]
        count = len(self.events)
        parts.append("no events" if not count else f"{count} event{'s' * (count > 1)}")
        return "\n".join([", ".join(parts), *(event.headline for event in self.events)])

    __repr__ = __str__  # what an interactive session shows


def _again_if_replaced(read: Callable[[], T]) -> T:
    for tried in range(TRIES - 1):
        try:
            return read()
        except FileNotFoundError:  # a file has been replaced since it was listed
            time.sleep(0.01 * 2**tried)
    return read()
