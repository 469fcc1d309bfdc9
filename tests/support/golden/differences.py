"""Where the records of two checkouts differ."""

from __future__ import annotations

from typing import Any

__all__ = ["differences", "first_difference"]

Record = dict[str, Any]

WIDTH = 300  # characters of one side of a difference


def differences(ours: dict[str, Record], theirs: dict[str, Record]) -> list[str]:
    """A line for each record that is not the same, but for fewer second runs."""
    found = [f"{name}: only on one side" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        now, before = dict(ours[name]), dict(theirs[name])
        runs = now.pop("runs"), before.pop("runs")
        if runs[0] > runs[1]:
            found.append(f"{name}: {runs[0]} second runs instead of {runs[1]}")
        for part in sorted(now.keys() | before.keys()):
            if now.get(part) != before.get(part):
                place, one, other = first_difference(before.get(part), now.get(part))
                found.append(f"{name}: {part}{place}\n  before {one}\n  now    {other}")
    return found


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
