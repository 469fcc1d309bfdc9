"""Results to text: a table for each case, the means over models, and the targets."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from harness.cases import Result
from harness.models import MLP, MODELS
from harness.summary import FIRST_CALL, FIXED, MEMORY, TIME, Score, targets
from harness.timing import Spread
from harness.tools import TOOLS

__all__ = ["notes_text", "result_text", "summary_text", "table", "targets_text", "with_quartiles"]

WORDS = frozenset({"tool", "mode", "work", "dtype", "what"})  # columns of text, not of numbers


def table(rows: Sequence[dict[str, str]]) -> str:
    """Rows of one heading each, numbers flush right."""
    sides = ["left" if name in WORDS else "right" for name in rows[0]]
    return tabulate(rows, headers="keys", colalign=sides, disable_numparse=True)


def with_quartiles(spread: Spread, digits: int) -> str:
    """A median and how far the middle half of the rounds spreads around it."""
    return f"{spread.median:.{digits}f} [{spread.q1:.{digits}f}, {spread.q3:.{digits}f}]"


def result_text(result: Result) -> str:
    """The table of one case; for the tiny MLP in microseconds."""
    case, tiny = result.case, result.case.model == MLP
    unit, scale = ("µs", 1e6) if tiny else ("ms", 1e3)
    rows = []
    for tool in result.tools:
        row = {"tool": tool.tool, unit: f"{tool.seconds.median * scale:.1f}"}
        if tiny:
            row["µs over plain"] = with_quartiles(tool.over_plain.scaled(scale), 1)
        else:
            row["times plain"] = with_quartiles(tool.ratio, 3)
        row["first call s"] = f"{tool.first.wall_s:.2f}"
        row["its CPU s"] = f"{tool.first.cpu_s:.2f}"
        row["peak MiB"] = f"{tool.peak_bytes / 2**20:.1f}"
        row["its ratio"] = f"{tool.peak_bytes / result.plain.peak_bytes:.3f}"
        rows.append(row)
    title = (
        f"{MODELS[case.model].title}, {case.dtype}, {case.mode}, {case.work}  "
        f"({result.parameters / 1e6:.3g} M parameters, batch {case.shape.batch}, "
        f"{result.rounds} rounds)"
    )
    left_out = [f"left out: {name}: {reason}" for name, reason in result.left_out.items()]
    return "\n".join([title, "", table(rows), *left_out])


def summary_text(scores: Sequence[Score]) -> str:
    """Geometric means over models."""
    groups: dict[tuple[str, str, str, str], dict[str, Score]] = {}
    for score in scores:
        if score.what != FIXED:
            key = (score.mode, score.work, score.dtype, score.tool)
            groups.setdefault(key, {})[score.what] = score
    rows = [
        {
            **dict(zip(("mode", "work", "dtype", "tool"), key, strict=True)),
            **{
                what: f"{found[what].value:.3f}" if what in found else ""
                for what in (TIME, FIRST_CALL, MEMORY)
            },
            "models": str(found[TIME].models),
        }
        for key, found in groups.items()
    ]
    title = "Geometric means over models, times the plain model's"
    return f"{title}\n\n{table(rows)}" if rows else ""


def targets_text(scores: Sequence[Score]) -> str:
    """What fxguard is to cost at most, beside what it costs."""
    rows = [
        {
            "what": target.what,
            "mode": score.mode,
            "work": score.work,
            "dtype": score.dtype,
            "tool": score.tool,
            "target": f"{target.most:g}",
            "measured": f"{score.value:.1f}" if target.what == FIXED else f"{score.value:.3f}",
            "met": "yes" if score.value <= target.most else "no",
        }
        for target, score in targets(scores)
    ]
    return f"Targets\n\n{table(rows)}" if rows else ""


def notes_text(results: Sequence[Result]) -> str:
    """What each tool that ran is."""
    ran = {tool.tool for result in results for tool in result.tools}
    return "\n".join(
        f"{tool.name}: {tool.note}" for tool in TOOLS.values() if tool.name in ran and tool.note
    )
