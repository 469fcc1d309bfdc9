"""Where the records of two checkouts differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

__all__ = ["Difference", "apart", "differences", "in_groups"]

Record = dict[str, Any]

MISSING = "(nothing)"  # in the place of what one side lacks
WIDTH = 300  # characters of one side of a difference
WORD = re.compile(r"\w+|\s+|.")
PLACE = re.compile(r"\[\d+\]")  # in a list


@dataclass(frozen=True, slots=True)
class Difference:
    """What one record says otherwise, in one place."""

    name: str
    what: str  # the place in the record: "texts[0][2]"; or the whole difference
    before: str = ""
    now: str = ""

    def __str__(self) -> str:
        if self.before == self.now:
            return f"{self.name}: {self.what}"
        return f"{self.name}: {self.what}\n  before {self.before}\n  now    {self.now}"

    @property
    def change(self) -> tuple[str, str]:
        """The words that changed, without what stands around them; or the whole difference."""
        if repr(MISSING) in (self.before, self.now):
            return PLACE.sub("[]", self.what), "is on one side only"
        before, now = WORD.findall(self.before), WORD.findall(self.now)
        while before and now and before[0] == now[0]:
            del before[0], now[0]
        while before and now and before[-1] == now[-1]:
            del before[-1], now[-1]
        return ("".join(before), "".join(now)) if before or now else (self.what, "")


def differences(ours: dict[str, Record], theirs: dict[str, Record]) -> Iterator[Difference]:
    """The differences of all records, each change of words once a record. Fewer runs are none."""
    for name in sorted(ours.keys() ^ theirs.keys()):
        yield Difference(name, "only on one side")
    for name in sorted(ours.keys() & theirs.keys()):
        now, before = dict(ours[name]), dict(theirs[name])
        runs = now.pop("runs"), before.pop("runs")
        if runs[0] > runs[1]:
            yield Difference(name, f"{runs[0]} second runs instead of {runs[1]}")
        found = (Difference(name, *each) for each in apart(before, now))
        yield from {each.change: each for each in reversed(list(found))}.values()


def apart(before: Any, now: Any, place: str = "") -> Iterator[tuple[str, str, str]]:
    """Where two values differ, and what stands there: items, and lines of texts."""
    if before == now:
        return
    if isinstance(before, str) and isinstance(now, str) and "\n" in before + now:
        yield from apart(before.splitlines(), now.splitlines(), place)
    elif isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            within = f"{place}[{key!r}]" if place else str(key)
            yield from apart(before.get(key, MISSING), now.get(key, MISSING), within)
    elif isinstance(before, list) and isinstance(now, list):
        pairs = enumerate(zip_longest(before, now, fillvalue=MISSING))
        differing = ((index, *pair) for index, pair in pairs if pair[0] != pair[1])
        # Behind something that is on one side only all others stand in other places.
        for index, *pair in islice(differing, None if len(before) == len(now) else 1):
            yield from apart(*pair, f"{place}[{index}]")
    else:
        yield place, repr(before)[:WIDTH], repr(now)[:WIDTH]


def in_groups(found: Iterable[Difference]) -> list[Sequence[Difference]]:
    """Differences that change the same words, the most frequent first: one look for each."""
    groups: dict[tuple[str, str], list[Difference]] = {}
    for each in found:
        groups.setdefault(each.change, []).append(each)
    return sorted(groups.values(), key=len, reverse=True)
