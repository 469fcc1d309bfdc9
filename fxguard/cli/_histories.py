"""``fxguard history``: what has changed before the loss did, and where two runs part."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from typing import Any

from fxguard.cli._showing import STDOUT, show, write_page, write_record
from fxguard.cli._statuses import Status
from fxguard.errors import UsageError
from fxguard.history.divergence import TOLERANCE, compare_histories
from fxguard.history.history import History, load_history

__all__ = ["add_history"]


def add_history(commands: Any) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "history",
        help="show what changed before the loss of a training run did, or where two runs part",
        description="Show the events of a history that --history wrote: what changed first, and "
        "the few series that tell it. Of two histories of the same training, show the first "
        f"number that differs. The exit status is {Status.DETECTED} when there are events, "
        f"{Status.DIFFERENT} when two histories differ, {Status.NOTHING} when nothing could be "
        "compared.",
    )
    command.add_argument("a", type=Path, metavar="FOLDER", help="that --history wrote")
    command.add_argument(
        "b", type=Path, metavar="B", nargs="?", help="another one: show where the two part"
    )
    command.add_argument(
        "--html", type=Path, metavar="FILE.html", help="also make a page: a map of all series"
    )
    command.add_argument("--open", action="store_true", help="show the page in a browser")
    command.add_argument(
        "--json", metavar="FILE", help=f"write the events and their series here; {STDOUT}"
    )
    command.add_argument(
        "--series",
        metavar="GLOB",
        help="also show all steps of the series whose names match: 'loss*', 'weight blocks.0.*'",
    )
    command.add_argument(
        "--rank",
        type=int,
        metavar="N",
        help="show the series of this rank, in text and page (those of a rank that saw the event)",
    )
    command.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="of two histories, how far apart two numbers may be, relative to the larger one "
        f"({TOLERANCE:g})",
    )
    command.set_defaults(do=_history)


def _history(args: argparse.Namespace) -> int:
    history = load_history(args.a)
    inside = [load_history(args.a / name) for name in history.inside]
    if args.b is not None:
        return _compare(args, history)
    if args.tolerance is not None:
        raise UsageError("--tolerance is for two histories: fxguard history A B")
    if args.open and args.html is None:
        raise UsageError("--open shows the page, and --html FILE.html says where to write it")
    if args.rank is not None and args.rank not in history.ranks:
        raise UsageError(f"the history in {args.a} has no rank {args.rank}")
    lines = history.lines_of(args.series, args.rank) if args.series is not None else []
    if args.html is not None:
        write_page(history, args.html, args.rank)
    if args.json is not None:
        write_record(args.json, history.to_dict(args.series, args.rank))
    if args.json != "-":
        show("\n".join(history.lines(args.rank)), healthy=not history.events)
        for other in inside:  # of other models
            show("\n".join(["", f"{other.folder}:", *other.lines()]), healthy=not other.events)
        if lines:
            show("\n".join(["", *lines]))
        if args.html is not None:
            show(f"page: {args.html}")
    if args.open:
        webbrowser.open(args.html.resolve().as_uri())
    return Status.DETECTED if any(each.events for each in (history, *inside)) else Status.FINE


def _compare(args: argparse.Namespace, a: History) -> int:
    for name in ("html", "series", "rank"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} shows one history, and two were given")
    tolerance = TOLERANCE if args.tolerance is None else args.tolerance
    found = compare_histories(a, load_history(args.b), tolerance)
    if args.json is not None:
        write_record(args.json, found.to_dict())
    if args.json != "-":
        show(f"A: {args.a}\nB: {args.b}\n")
        show("\n".join(found.verdict), healthy=found.agrees)
    if not found.compared:
        return Status.NOTHING
    return Status.DIFFERENT if found.differs else Status.FINE
