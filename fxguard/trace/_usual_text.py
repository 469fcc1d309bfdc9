"""Changes beside the usual ones, as words. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxguard.records import Frame
from fxguard.report.in_words import names_text, times
from fxguard.trace.batch_diff import BatchDiff, Match, ranked

__all__ = ["is_ranked", "ranking", "times_text", "unranked"]

UNUSUAL = 6.0  # times the usual change: it takes as many deviations for a loss to jump
MOST = 5  # operations in the text; the table has all of them


def is_ranked(batches: Sequence[BatchDiff]) -> bool:
    """Whether a history says of any operation that differs what is usual."""
    return any(match.times_usual is not None for batch in batches for match in batch.differing)


def ranking(batches: Sequence[BatchDiff], history: str) -> Iterator[str]:
    """The operations with the most times their usual change, with their numbers.

    Args:
        batches: of which :func:`is_ranked` is true.
        history: the folder.
    """
    order = [each for each in ranked(batches) if each[1].times_usual is not None]
    batch, first = order[0]
    usual = first.usual
    assert usual is not None
    yield f"changed most against what is usual: {first.frame.title}, {batch.numbers}"
    yield (
        f"  {times_text(first)} times its usual change from step to step; "
        f"{usual.as_large or 'none'} of the last {usual.steps} changes in {history} "
        f"{'was' if usual.as_large <= 1 else 'were'} as large"
    )
    yield f"  {'times':>6}  {'A abs max':>9}  {'B abs max':>9}  usual"
    for pair, match in order[:MOST]:
        a, b = ("" if x is None else f"{x:.2e}" for x in _largest(match))
        factor = match.usual and match.usual.usual_factor
        where = "" if len(batches) == 1 else f", {pair.numbers}"
        yield (
            f"  {times_text(match):>6}  {a:>9}  {b:>9}  x {factor or 1:<5.3g}"
            f"  {_named(match)}{where}"
        )
    far = (match for match in batch.differing if (match.times_usual or 0.0) > UNUSUAL)
    if (begins := next(far, first)) is not first:
        number = f"{UNUSUAL:g}"
        yield f"  the first of more than {number} times, in order of execution: {_named(begins)}"


def unranked(batches: Sequence[BatchDiff], history: str) -> Iterator[str]:
    """Of which operations a history does not say what is usual."""
    aligned = [match for batch in batches for match in batch.aligned if match.compared]
    known = [match.usual for match in aligned if match.usual is not None]
    if aligned and not known:
        yield (
            f"not ranked: {history} has no series of any operation of these batches; they are "
            "found by module, operation and line"
        )
        return
    if known and all(each.usual is None for each in known):
        steps = max(each.steps for each in known)
        changes = f"{steps} change{'s' * (steps != 1)} from step to step"
        yield f"not ranked: {history} has {changes}, too few to say what is usual"
        return
    lacking = [
        match.frame for batch in batches for match in batch.differing if match.times_usual is None
    ]
    if lacking:
        how = "ranked last" if is_ranked(batches) else "not ranked"
        yield f"{how}, as {history} does not say what is usual for them: {_kinds(lacking)}"


def _kinds(frames: Sequence[Frame]) -> str:
    """Operations by name, and how many modules and gradients there are."""
    forward = [frame for frame in frames if frame.phase in ("forward", "loss")]
    modules = sum(not frame.is_op for frame in forward)
    others = len(frames) - len(forward)
    titles = [frame.title for frame in forward if frame.is_op]
    found = [names_text(titles)] if titles else []
    found += [f"{modules} module{'s' * (modules > 1)}"] if modules else []
    found += [f"{others} frame{'s' * (others > 1)} of the backward or the step"] if others else []
    return ", ".join(found)


def times_text(match: Match) -> str:
    """How many times the usual change it is; ``-`` if nobody knows what is usual."""
    return "-" if match.times_usual is None else times(match.times_usual)


def _named(match: Match) -> str:
    source = match.frame.source
    return match.frame.title if source is None else f"{match.frame.title}  {source.place}"


def _largest(match: Match) -> Iterator[float | None]:
    for frame in (match.a, match.b):
        rows = () if frame is None else frame.outputs
        yield max((row.abs_max for row in rows if row.abs_max is not None), default=None)
