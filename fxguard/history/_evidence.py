"""Sentences of an event beside that of what left its band first."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fxguard.history._bands import NO_DRIFT
from fxguard.history._beside import beside_others
from fxguard.history._first import Exit
from fxguard.history._given import compares
from fxguard.history._out_of_band import BACK, OUT
from fxguard.history._said import in_words, said
from fxguard.history._series import BUFFER, SUMMED, Series
from fxguard.history._watch import TINY
from fxguard.report.in_words import times

__all__ = [
    "LOSS",
    "beside",
    "besides",
    "furthest",
    "in_a_row",
    "listed",
    "more_backwards",
    "of_loss",
    "other_writes",
]

LOSS = "the loss "  # how sentences of it begin
NEARLY = 2.0  # deviations
MOST_STEPS = 3  # that are named
MOST_NAMED = 4  # weights


def other_writes(
    series: list[Series], steps: list[int], table: Tensor, exits: list[Exit], first: Exit
) -> list[str]:
    """What else was written as a weight was, and when it was written before."""
    if not _is_write(series[first.place]):
        return []
    others = sum(_is_write(series[one.place]) for one in exits) - 1
    lines = (table[: first.line, first.place].log2() > NO_DRIFT).nonzero().flatten().tolist()
    earlier = [str(steps[line]) for line in lines[-MOST_STEPS:]]
    found = []
    if others:
        found.append(f"so {'are' if others > 1 else 'is'} {others} more weight{'s' * (others > 1)}")
    if earlier:
        which = f"step{'s' * (len(earlier) > 1)} {', '.join(earlier)}"
        found.append(f"it was written before {which}, too")
    return found


def _is_write(known: Series) -> bool:
    """Whether a series is what something else than the optimizer has written of a weight."""
    return known.kind == "drift" and known.detail != BUFFER


def more_backwards(series: list[Series], steps: list[int], table: Tensor, first: Exit) -> list[str]:
    """From when on gradients are the sum of more backwards than before, since something changed."""
    for place, known in enumerate(series):
        if known.detail == SUMMED and place != first.place:
            before = table[max(0, first.line - BACK) : first.line, place].nan_to_num(0.0)
            most = float(before.amax()) if len(before) else 0.0
            more = (table[first.line :, place] > most).nonzero().flatten().tolist()
            if more and most:
                one = Exit(first.line + more[0], place, 0.0, is_rare_write=False)
                return [said(series, steps, table, one)]
    return []


def beside(series: list[Series], table: Tensor, first: Exit) -> list[str]:
    """By how much a gradient has grown beside the others, where by itself it is in its band."""
    if first.distance >= OUT:
        return []
    places, octaves = beside_others(series, table[: first.line + 1].log2().clamp(min=TINY))
    if first.place not in places:
        return []
    column = octaves[:, places.index(first.place)]
    grown = float(column[-1] - column[max(0, first.line - BACK) : -1].nanmedian())
    return [f"beside the other gradients it is {times(2**grown)} times as large as is usual"]


def furthest(series: list[Series], steps: list[int], far: Tensor, first: Exit) -> list[str]:
    """What is furthest from its band of what ran before, though not out of it."""
    distances = far[first.line].nan_to_num(0.0).abs().tolist()
    before = [
        (distance, known)
        for distance, known in zip(distances, series, strict=True)
        if known.kind in ("input", "target", "operation")
        and distance >= NEARLY
        and not (known.kind == "operation" and compares(series, known))
    ]
    if not before:
        return []
    distance, known = max(before, key=lambda each: each[0])
    return [
        f"furthest from its band in step {steps[first.line]} is {in_words(known)}{known.where}: by "
        f"{distance:.2g} deviations"
    ]


def listed(weights: list[Series]) -> str:
    """The first of some weights by name, and how many more there are."""
    named = [one.what for one in weights[:MOST_NAMED]]
    more = len(weights) - len(named)
    if more:
        return f"{', '.join(named)} and {more} more"
    return in_a_row(named, "and")


def in_a_row(names: Sequence[str], word: str) -> str:
    """``x, y or z``."""
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def besides(kept: list[Series]) -> list[str]:
    """What an operation may read that its module keeps."""
    if not kept:
        return []
    each = "is" if len(kept) == 1 else "are"
    return [f"it may read {listed(kept)}, which {each} written in each step"]


def of_loss(steps: list[int], table: Tensor, moved: int, loss: int) -> str:
    """How far a loss has moved in a line."""
    before, now = float(table[max(0, moved - 1), loss]), float(table[moved, loss])
    return f"{LOSS}goes from {before:.3g} to {now:.3g} in step {steps[moved]}"
