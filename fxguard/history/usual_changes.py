"""The changes between two batches, beside what usually changes from step to step of a history.

Needs no torch.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from fxguard.history._places import Place, place_of, placed
from fxguard.history._series import Series
from fxguard.history._watch import ENOUGH, FLOOR, NORMAL, USUAL, octaves
from fxguard.history.history import History
from fxguard.history.track import Track
from fxguard.records import Frame, title_of
from fxguard.trace.align import renaming
from fxguard.trace.batch_diff import BatchDiff, Match
from fxguard.trace.diff import Diff
from fxguard.trace.usual_change import UsualChange

__all__ = ["with_usual_changes"]

Line = tuple[str, str]  # title of an operation, and its place in the source


def with_usual_changes(found: Diff, history: History) -> Diff:
    """A comparison of batches in which each operation with a series has its usual change.

    Args:
        found: the comparison.
        history: of the training that the batches are from.

    Raises:
        FxguardError: when a file of the history is damaged.
    """
    usual = _UsualChanges(history)
    return replace(
        found,
        batches=tuple(replace(each, matches=tuple(usual.of(each))) for each in found.batches),
        history=str(history.folder),
    )


class _UsualChanges:
    """What is usual for each series of a history, read when it is asked for."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.names = _Names(history.described)
        self._usual: dict[str, list[float]] = {}

    def of(self, batch: BatchDiff) -> Iterator[Match]:
        """The matches of a batch, with their usual changes."""
        of_a = self.names.of(batch.a.frames)
        of_b = self.names.of(batch.b.frames)
        for match in batch.matches:
            name = of_a.get(id(match.a)) or of_b.get(id(match.b))
            change = None if name is None else _change(match)
            if name is None or change is None:
                yield match
            else:
                yield replace(match, usual=self._compared(name, change))

    def _compared(self, name: str, change: float) -> UsualChange:
        if name not in self._usual:
            self._usual[name] = changes_of(self.history.get(name))
        changes = self._usual[name]
        as_large = sum(each >= change for each in changes)
        usual = max(FLOOR, NORMAL * median(changes)) if len(changes) >= ENOUGH else None
        return UsualChange(name, change, usual, len(changes), as_large)


class _Names:
    """The series of a history, found by the frames of a batch."""

    def __init__(self, described: Mapping[str, Series]) -> None:
        self._lines: dict[Line, dict[Place, str]] = defaultdict(dict)
        self._in_module: dict[Line, set[Line]] = defaultdict(set)  # by the name of a module
        for series in described.values():
            if series.kind == "operation":
                line = series.what, series.source
                self._lines[line][place_of(series.detail)] = series.name
                self._in_module[series.what.rpartition(" ")[0], series.source].add(line)
        self._modules = {module for module, _ in self._in_module}

    def of(self, frames: Sequence[Frame]) -> dict[int, str]:
        """The name of the series of each frame that has one, by ``id(frame)``."""
        rename = renaming({frame.name for frame in frames}, self._modules)
        lines = [self._line_of(frame, rename) for frame in frames]
        counts = Counter(lines)
        seen: Counter[Line | None] = Counter()
        found = {}
        for frame, line in zip(frames, lines, strict=True):
            if line is not None:
                series = self._lines[line]
                place = placed(seen[line], counts[line], series)
                seen[line] += 1
                if place is not None:
                    found[id(frame)] = series[place]
        return found

    def _line_of(self, frame: Frame, rename: Callable[[str], str]) -> Line | None:
        """Operation and line of a frame, as the series have them."""
        if frame.phase not in ("forward", "loss"):
            return None
        name = rename(frame.name)
        places = [frame.source.place, ""] if frame.source is not None else [""]
        for place in places:  # a series has no line where only torch has one
            if frame.is_op:
                lines = {(title_of(name, frame.kind), place)} & self._lines.keys()
            elif frame.source is not None:  # a module that is a single operation
                lines = self._in_module.get((name, place), set())
            else:
                lines = set()
            if len(lines) == 1:
                return next(iter(lines))
        return None


def changes_of(track: Track) -> list[float]:
    """How much a series has changed from one measured step to the next, in octaves.

    They are those of the last steps, without steps of which only extremes are kept, and without
    NaN.
    """
    found: list[tuple[int, float]] = []
    for index in range(len(track) - 1, -1, -1):
        if len(found) > USUAL or track.steps[index] != track.last_steps[index]:
            break
        if not math.isnan(track.high[index]):
            found.append((track.runs[index], octaves(track.high[index])))
    return [abs(now - before) for (run, now), (other, before) in pairwise(found) if run == other]


def _change(match: Match) -> float | None:
    """How much the largest magnitude that an operation made differs, in octaves."""
    a, b = (None if frame is None else _largest(frame) for frame in (match.a, match.b))
    if a is None or b is None:
        return None
    if math.isnan(a) or math.isnan(b):
        return 0.0 if math.isnan(a) and math.isnan(b) else math.inf
    return abs(octaves(a) - octaves(b))


def _largest(frame: Frame) -> float | None:
    numbers = [row.abs_max for row in frame.outputs if row.abs_max is not None]
    return next((x for x in numbers if math.isnan(x)), max(numbers, default=None))
