"""The commands that read files: ``fxguard report`` and ``fxguard diff``. They need no torch."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Any

from fxguard.api.diff import diff
from fxguard.cli._ending import say
from fxguard.cli._showing import STDOUT, show, write_page, write_record
from fxguard.cli._statuses import Status
from fxguard.errors import FxguardError, UsageError
from fxguard.report.load import load_report
from fxguard.report.strict_json import recorded
from fxguard.report.terminal import Progress
from fxguard.trace.file import load_trace
from fxguard.trace.trace import Trace

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add both commands to the command line."""
    report = commands.add_parser(
        "report",
        help="make an HTML page of a trace or a report",
        description="Make one HTML page, which needs no network, of a trace that --trace-to wrote "
        "or of a report that --report FILE.json wrote, and print the verdict. Of a folder, one "
        "page for each trace in it.",
    )
    report.add_argument("file", type=Path, metavar="FILE | FOLDER")
    report.add_argument(
        "-o",
        "--html",
        type=Path,
        metavar="FILE.html",
        help="where to write the page (next to FILE, under its name with .html)",
    )
    report.add_argument(
        "--open",
        action="store_true",
        help="show the page in a browser; of several, the first with a detection",
    )
    report.add_argument(
        "--json", metavar="FILE", help=f"write files, pages and verdicts here; {STDOUT}"
    )
    report.set_defaults(do=_report)
    compare = commands.add_parser(
        "diff",
        help="show where two traces part",
        description="Align two traces by operation and show the first operation where they part, "
        "then the largest difference. What is compared are smallest and largest magnitudes, and "
        "fingerprints (mean, norm, two sums with seeded signs) where both files have them. The "
        f"exit status is {Status.DIFFERENT} when they differ, {Status.NOTHING} when nothing could "
        "be compared.",
    )
    compare.add_argument("a", type=Path, metavar="A", help="a file that --trace-to wrote")
    compare.add_argument(
        "b", type=Path, metavar="B", nargs="?", help="another one (A itself if left out)"
    )
    compare.add_argument(
        "--batches",
        type=_two_numbers,
        metavar="N,M",
        help="compare batch N of A with batch M of B (batches of the same number)",
    )
    compare.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="how far apart two magnitudes may be, relative to the tensor's largest (enough for "
        "rounding in the coarsest dtype of the traces: 1e-4 for float32, 1e-2 for float16)",
    )
    compare.add_argument(
        "--history",
        type=Path,
        metavar="FOLDER",
        help="a history of this training, which --history wrote: rank operations by how many times "
        "their usual change from step to step they differ",
    )
    compare.add_argument("--format", choices=("text", "table"), default="text")
    compare.add_argument("--json", metavar="FILE", help=f"write every difference here; {STDOUT}")
    compare.add_argument(
        "--html", type=Path, metavar="FILE.html", help="also make a page with both curves"
    )
    compare.set_defaults(do=_diff)


def _two_numbers(text: str) -> tuple[int, int]:
    try:
        first, second = map(int, text.split(","))
    except ValueError:
        message = f"two batch numbers with a comma between them, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None
    return first, second


def _report(args: argparse.Namespace) -> int:
    files = [args.file]
    if args.file.is_dir():
        files = sorted(args.file.glob("*.jsonl"))
        if not files:
            raise UsageError(f"no traces in the folder {args.file}: their names end in .jsonl")
        if args.html is not None:
            raise UsageError("-o names one page, and a folder gives one for each trace in it")
    pages: list[dict[str, Any]] = []
    damaged: list[dict[str, str]] = []
    shows = args.json != "-"
    for file in files:
        try:
            shown = load_report(file) if file.suffix == ".json" else _load(file)
        except FxguardError as error:
            if len(files) == 1:
                raise
            damaged.append({"file": str(file), "problem": str(error)})  # others can still be read
            say(str(error))
            continue
        page = args.html or file.with_suffix(".html")
        write_page(shown, page)
        healthy = isinstance(shown, Trace) and shown.is_healthy
        told = {"file": str(file), "page": str(page), "healthy": healthy, "verdict": shown.verdict}
        pages.append(told)
        if not shows:
            continue
        if len(files) > 1:
            show(f"{file}:")
        show("\n".join(shown.verdict), healthy=healthy)
        show(f"page: {page}")
    if args.json is not None:
        write_record(args.json, recorded("pages", {"pages": pages, "damaged": damaged}))
    if args.open and pages:
        first = min(pages, key=lambda each: bool(each["healthy"]))
        webbrowser.open(Path(first["page"]).resolve().as_uri())
    return Status.DAMAGED if damaged else Status.FINE


def _load(path: Path) -> Trace:
    with Progress(sys.stderr, f"reading {path}") as progress:
        return load_trace(path, on_progress=progress.advance)


def _diff(args: argparse.Namespace) -> int:
    a = _load(args.a)
    if args.b is None and args.batches is None:
        raise UsageError("with one file, --batches N,M says which of its batches to compare")
    b = a if args.b is None else _load(args.b)
    name_a, name_b = str(args.a), str(args.b or args.a)
    if args.batches is not None:
        a, b = _only(a, args.batches[0], name_a), _only(b, args.batches[1], name_b)
    result = replace(diff(a, b, tolerance=args.tolerance, history=args.history), a=name_a, b=name_b)
    if args.html is not None:
        write_page(result, args.html)
    if args.json is not None:
        write_record(args.json, result.to_dict())
    if args.json == "-":
        pass
    elif args.format == "table":
        show(result.to_table(), healthy=True)
    else:
        show(f"A: {name_a}\nB: {name_b}\n")
        show("\n".join(result.verdict), healthy=result.agrees)
    if not result.compared:
        return Status.NOTHING
    return Status.DIFFERENT if result.differs else Status.FINE


def _only(trace: Trace, number: int, path: str) -> Trace:
    """The trace reduced to one of its batches."""
    chosen = [batch for batch in trace.batches if batch.number == number]
    if not chosen:
        numbers = ", ".join(str(batch.number) for batch in trace.batches) or "none"
        raise UsageError(f"{path} has no batch {number}; it has {numbers}")
    return replace(trace, batches=tuple(chosen[:1]))
