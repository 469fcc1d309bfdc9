"""Where the records of two checkouts differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Difference", "differences", "first_difference", "in_groups"]

Record = dict[str, Any]

WIDTH = 300  # characters of one side of a difference
WORD = re.compile(r"\w+|\s+|.")


@dataclass(frozen=True, slots=True)
class Difference:
    """What one record first says otherwise, in one of its parts."""

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
        before, now = WORD.findall(self.before), WORD.findall(self.now)
        while before and now and before[0] == now[0]:
            del before[0], now[0]
        while before and now and before[-1] == now[-1]:
            del before[-1], now[-1]
        return ("".join(before), "".join(now)) if before or now else (self.what, "")


def differences(ours: dict[str, Record], theirs: dict[str, Record]) -> Iterator[Difference]:
    """The differences of all records. Fewer second runs are none."""
    for name in sorted(ours.keys() ^ theirs.keys()):
        yield Difference(name, "only on one side")
    for name in sorted(ours.keys() & theirs.keys()):
        now, before = dict(ours[name]), dict(theirs[name])
        runs = now.pop("runs"), before.pop("runs")
        if runs[0] > runs[1]:
            yield Difference(name, f"{runs[0]} second runs instead of {runs[1]}")
        for part in sorted(now.keys() | before.keys()):
            if now.get(part) != before.get(part):
                place, one, other = first_difference(before.get(part), now.get(part))
                yield Difference(name, f"{part}{place}", one, other)


def first_difference(before: Any, now: Any, place: str = "") -> tuple[str, str, str]:
    """Where two values first differ, and what stands there: an item, or a line of a text."""
    if isinstance(before, str) and isinstance(now, str) and "\n" in before + now:
        return first_difference(before.splitlines(), now.splitlines(), place)
    pairs: list[tuple[object, Any, Any]] = []
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(index, *pair) for index, pair in enumerate(zip(before, now, strict=True))]
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        pairs = [(key, before[key], now[key]) for key in before]
    for key, one, other in pairs:
        if one != other:
            return first_difference(one, other, f"{place}[{key!r}]")
    return place, repr(before)[:WIDTH], repr(now)[:WIDTH]


def in_groups(found: Iterable[Difference]) -> list[Sequence[Difference]]:
    """Differences that change the same words, the most frequent first: one look for each."""
    groups: dict[tuple[str, str], list[Difference]] = {}
    for each in found:
        groups.setdefault(each.change, []).append(each)
    return sorted(groups.values(), key=len, reverse=True)
