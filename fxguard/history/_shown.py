"""What a person sees of a history: its verdict, its lines, its page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fxguard.errors import UsageError
from fxguard.history._lines import lines_of_event, lines_of_series, summary
from fxguard.history._series import Series
from fxguard.history._telling import Glimpse, telling
from fxguard.history.track import Track
from fxguard.report.display import Display, Displayed
from fxguard.report.event import Event
from fxguard.report.in_words import resumed_at
from fxguard.report.strict_json import recorded, strict_json

__all__ = ["ShownHistory"]

CELLS = 10**7  # of the maps of a page: numbers of a megabyte and more for each million


class ShownHistory(Displayed):
    """A history that prints, exports and shows itself."""

    folder: Path
    steps: range
    described: Mapping[str, Series]
    events: tuple[Event, ...]
    ranks: tuple[int, ...]
    about: Mapping[int, Mapping[str, Any]]
    resumed: tuple[int, ...]
    _seen_by: tuple[int | None, ...]  # of each event the first rank that saw it

    @property
    def inside(self) -> tuple[str, ...]:
        """Folders with histories of other models."""
        raise NotImplementedError

    def get(self, name: str, rank: int | None = None) -> Track:
        """One series over all steps."""
        raise NotImplementedError

    @property
    def whose(self) -> list[str]:
        """How many ranks and runs it is of, as far as there are several."""
        ranks = [f"{len(self.ranks)} ranks"] if len(self.ranks) > 1 else []
        return [*ranks, *resumed_at(self.resumed)]

    @property
    def verdict(self) -> list[str]:
        """What happened, in lines."""
        where = f"in {len(self.steps)} steps of {len(self.described)} series"
        if not self.events:
            return [f"no event {where}"]
        first, *others = self.events
        if not others:
            return first.verdict
        lines = [f"{len(self.events)} events {where}; the first at step {first.step}"]
        return [*lines, *(line for event in self.events for line in event.verdict)]

    def lines(self, rank: int | None = None) -> list[str]:
        """What happened, and the few series that tell each event as sparklines.

        Args:
            rank: whose series; those of a rank that saw the event if this is None.

        Raises:
            FxguardError: when there is no such rank, or when a file is damaged.
        """
        whose = [", ".join(self.whose)] if self.whose else []
        if not self.events:
            losses = [one.name for one in self.described.values() if one.kind == "loss"]
            tracks = [track for name in losses if len(track := self.get(name, rank))]
            return [*self.verdict, *(lines_of_series(tracks) if tracks else ()), *whose]
        told = [lines_of_event(event, found) for event, found in self._telling(rank)]
        if len(told) > 1:
            told = [["", *lines] for lines in told]
        heading = self.verdict[:1] if len(told) > 1 else []
        return [*heading, *(line for lines in told for line in lines), *whose]

    def lines_of(self, glob: str, rank: int | None = None) -> list[str]:
        """Series whose names match, as sparklines of all steps.

        Args:
            glob: of names; ``*`` stands for anything, also in the middle of it.
            rank: whose; of each series the first one that has it if this is None.

        Raises:
            FxguardError: when no name matches, or when there is no such rank.
        """
        return lines_of_series([self.get(name, rank) for name in self._matching(glob)])

    def _matching(self, glob: str) -> list[str]:
        order = sorted(self.described.values(), key=lambda one: one.order)
        found = [one.name for one in order if fnmatchcase(one.name, glob)]
        if not found:
            found = [one.name for one in order if fnmatchcase(one.name, f"*{glob}*")]
        if not found:
            raise UsageError(f"{self.folder} has no series that matches {glob!r}")
        return found

    def _telling(self, rank: int | None) -> Iterator[tuple[Event, list[Glimpse]]]:
        """Events and the series that tell them, of a rank that saw it if nobody asked for one."""
        known: dict[int | None, list[Track]] = {}
        for event, seen_by in zip(self.events, self._seen_by, strict=True):
            whose = seen_by if rank is None else rank
            if whose not in known:
                known[whose] = [self.get(name, whose) for name in self.described]
            yield event, telling(event, known[whose])

    def to_dict(self, series: str | None = None, rank: int | None = None) -> dict[str, Any]:
        """The events and the series that tell them, as plain data.

        Args:
            series: a glob of names: first, median and last number of each such series as well.
            rank: whose series, see :meth:`lines`.

        Raises:
            FxguardError: when no name matches, when there is no such rank, or when a file is
                damaged.
        """
        data = {
            "folder": str(self.folder),
            "first_step": self.steps[0] if self.steps else None,
            "last_step": self.steps[-1] if self.steps else None,
            "series_count": len(self.described),
            "ranks": list(self.ranks),
            "runs": list(self.about),
            "resumed": list(self.resumed),
            "inside": list(self.inside),
            "verdict": self.verdict,
            "events": [
                {**event.to_dict(), "series": [each.to_dict() for each in found]}
                for event, found in self._telling(rank)
            ],
            "series": [
                _described(self.get(name, rank))
                for name in (self._matching(series) if series is not None else ())
            ],
        }
        return recorded("history", data)

    def to_json(self, indent: int | None = None) -> str:
        """The events and the series that tell them, as strict JSON.

        Args:
            indent: blanks for each level; None writes one line.
        """
        return strict_json(self.to_dict(), indent)

    def to_html(self, path: str | os.PathLike[str], rank: int | None = None) -> None:
        """Write a page that needs no network: a map of all series by steps, and the events.

        Args:
            path: path of the file; overwritten if it exists.
            rank: the only one on the page; as many as have room if this is None.

        Raises:
            FxguardError: when the history holds no number, when there is no such rank, or when a
                file is damaged.
        """
        ranks = self._first_ranks() if rank is None else [rank]
        Path(path).write_text(self._page(ranks), encoding="utf-8")

    def _first_ranks(self) -> list[int]:
        """All ranks, first those that saw an event."""
        seen = [rank for rank in self._seen_by if rank is not None]
        return list(dict.fromkeys([*seen, *self.ranks]))

    def _page(self, ranks: Sequence[int]) -> str:
        """The page of the first of these ranks that have numbers and room."""
        from fxguard.history._page import page_of_history

        order = sorted(self.described.values(), key=lambda one: (one.kind == "time", one.order))
        found: dict[int, list[Track]] = {}
        cells = 0
        for rank in ranks:
            tracks = [track for one in order if len(track := self.get(one.name, rank))]
            cells += len(tracks) * max(map(len, tracks), default=0)
            if found and cells > CELLS:
                break
            if tracks:
                found[rank] = tracks
        if not found:
            raise UsageError(f"the history in {self.folder} holds no number: it has no page")
        return page_of_history(
            self.folder.resolve().name,
            self.verdict,
            found,
            self.events,
            resumed=self.resumed,
            all_ranks=len(self.ranks),
        )

    def _display(self) -> Display:
        return Display(
            self.verdict,
            healthy=not self.events,
            above=(str(self.folder),),
            below="\n".join(self.lines()[1:]),
            page=(lambda: self._page(self._first_ranks()[:1])) if len(self.steps) else None,
            rows=len(self.steps) * len(self.described) // 50,
            name="history",
        )


def _described(track: Track) -> dict[str, Any]:
    one = track.series
    first, middle, last = summary(track)
    return {
        "name": one.name,
        "kind": one.kind,
        "what": one.what,
        "source": one.source,
        "detail": one.detail,
        "rows": len(track),
        "first": first,
        "median": middle,
        "last": last,
    }
