"""The differences between two traces, as words and as a table. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxguard.records import Row, RowRole
from fxguard.report.in_words import names_text
from fxguard.trace import _elements_text, _usual_text
from fxguard.trace.batch_diff import BatchDiff, Match, ranked

__all__ = ["difference_text", "table", "verdict_lines"]


def verdict_lines(batches: Sequence[BatchDiff], history: str | None = None) -> list[str]:
    """Where two traces diverge: the first operation that differs, and the one that differs most.

    Args:
        batches: at least one.
        history: the folder of the history that says what is usual: then the most unusual change
            takes the place of the largest one.
    """
    unranked = [] if history is None else [*_usual_text.unranked(batches, history)]
    differing = [(batch, match) for batch in batches for match in batch.differing]
    if not differing:
        aligned = [match for batch in batches for match in batch.aligned]
        if any(match.compared for match in aligned):
            what, compared = _elements_text.compared(batches)
            return [f"{what} agree: {_counts(batches)}", *compared, *unranked, *_alone(batches)]
        reason = "no frame is in both"
        if aligned:
            reason = f"of {len(aligned)} frames in both, none has numbers in both"
        return [f"nothing could be compared: {reason}", *_alone(batches)]
    batch, first = differing[0]
    lines = [f"they part at {_headline(first, batch)}", f"  {_reason(first, batch)}", *_rows(first)]
    if history is not None and _usual_text.is_ranked(batches):
        lines += _usual_text.ranking(batches, history)
    else:
        lines += _largest(differing)
    compared = _elements_text.compared(batches)[1]
    return [*lines, *unranked, _counts(batches), *compared, *_alone([batch])]


def table(
    batches: Sequence[BatchDiff], tablefmt: str, most: int | None, *, with_usual: bool = False
) -> str:
    """Every operation that differs, with a row for each value it made; see ``Diff.to_table``."""
    from tabulate import tabulate

    rows = [
        [
            batch.a.number,
            match.frame.title,
            pair.a.label,
            *_cells(pair.a),
            *_cells(pair.b),
            difference_text(pair.distance),
            *([_usual_text.times_text(match)] if with_usual else []),
            str(match.frame.source or ""),
        ]
        for batch, match in ranked(batches)
        for pair in match.of(RowRole.OUTPUT)
        if pair.differs
    ][:most]
    if tablefmt in ("github", "pipe"):
        rows = [[str(cell).replace("|", r"\|") for cell in row] for row in rows]
    headers = (
        *("batch", "operation", "value", "A abs min", "A abs max"),
        *("B abs min", "B abs max", "difference"),
        *(["times the usual change"] if with_usual else []),
        "source",
    )
    return tabulate(rows, headers=headers, tablefmt=tablefmt, disable_numparse=True)


def difference_text(difference: float | None) -> str:
    """A difference as shown everywhere; ``-`` if nothing could be compared."""
    if difference is None:
        return "-"
    return "0" if difference == 0 else f"{difference:.1e}"


def _largest(differing: Sequence[tuple[BatchDiff, Match]]) -> Iterator[str]:
    """The largest difference, unless it is the first."""
    batch, largest = max(differing, key=lambda each: each[1].distance)
    if largest is not differing[0][1]:
        yield f"the largest difference: {_headline(largest, batch)}"
        yield from _rows(largest)


def _headline(match: Match, batch: BatchDiff) -> str:
    return f"{match.frame.title}, {batch.numbers}"


def _rows(match: Match) -> Iterator[str]:
    """What one operation read, held and made in both traces."""
    if match.frame.source is not None:
        yield f"  {match.frame.source}"
    yield f"  {'A abs min  abs max':<19}  {'B abs min  abs max':<19}  difference"
    for pair in match.rows:
        a, b = (" ".join(f"{cell:>9}" for cell in _cells(row)) for row in (pair.a, pair.b))
        mark = "" if not pair.differs else "  <-"
        yield f"  {a}  {b}  {difference_text(pair.distance):>10}  {pair.a.label}{mark}"
        yield from _elements_text.rows(pair)


def _reason(match: Match, batch: BatchDiff) -> str:
    """The reason of the first difference."""
    if held := [pair.a.label for pair in match.of(RowRole.PARAMETER) if pair.differs]:
        return f"its {names_text(held)} differs already"
    read = [pair for pair in match.of(RowRole.INPUT) if pair.differs]
    if not read:
        return _elements_text.reason(match)
    root = batch.aligned[-1] if batch.aligned else match
    inputs = [pair.a.label for pair in root.of(RowRole.INPUT) if pair.differs]
    if inputs and not root.frame.name:
        return f"the models were given something else: {names_text(inputs)}"
    labels = names_text([pair.a.label for pair in read])
    return f"what it read differs already: {labels}; nothing that could be compared made it so"


def _counts(batches: Sequence[BatchDiff]) -> str:
    aligned = [match for batch in batches for match in batch.aligned]
    differing = sum(match.differs for match in aligned)
    compared = sum(match.compared for match in aligned)
    line = f"{differing} of {compared} compared frames differ"
    if len(batches) > 1:
        line += f" in {len(batches)} batches"
    if compared < len(aligned):
        line += f"; {len(aligned) - compared} have no numbers in one of the traces"
    return line


def _alone(batches: Sequence[BatchDiff]) -> Iterator[str]:
    """The operations with another name, and those in only one of the traces."""
    aligned = [match for batch in batches for match in batch.aligned]
    renamed = [f"{m.frame.title} -> {m.renamed_to}" for m in aligned if m.renamed_to]
    only_in_a = [match.frame.title for batch in batches for match in batch.only_in_a]
    only_in_b = [match.frame.title for batch in batches for match in batch.only_in_b]
    for what, titles in (
        ("renamed", renamed),
        ("only in A", only_in_a),
        ("only in B", only_in_b),
    ):
        if titles:
            yield f"{what}: {names_text(titles)}"


def _cells(row: Row) -> tuple[str, str]:
    if row.abs_min is None or row.abs_max is None:
        return ("", row.note)
    return (f"{row.abs_min:.2e}", f"{row.abs_max:.2e}")
