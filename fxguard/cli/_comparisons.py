"""``fxguard compare``: two records of one batch, from wherever they come."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fxguard.cli._showing import STDOUT, show, write_page, write_record
from fxguard.cli._statuses import Status
from fxguard.errors import UsageError

__all__ = ["add_compare"]


def add_compare(commands: Any) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "compare",
        help="show where two recorded runs compute something else",
        description="Compare two folders that fxguard.record or fxguard run --record wrote, by "
        "what values hold: modules and weights may have other names, and weights may be fused. "
        "Show the first operation on each side where they part, and its share of the difference of "
        "the "
        f"outputs. The exit status is {Status.DIFFERENT} when the programs or, beyond the "
        f"tolerance, their roundings differ, {Status.NOTHING} when nothing could be compared.",
    )
    command.add_argument("a", type=Path, metavar="A", help="a folder with a record, of one process")
    command.add_argument(
        "b", type=Path, metavar="B", help="another one, or one with those of all ranks"
    )
    command.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="how far outputs may be apart where the programs are the same: root mean square, "
        "relative (1e-6 or so in float32)",
    )
    command.add_argument("--html", type=Path, metavar="FILE.html", help="also make a page")
    command.add_argument("--json", metavar="FILE", help=f"write the comparison here; {STDOUT}")
    command.set_defaults(do=_compare)


def _compare(args: argparse.Namespace) -> int:
    for folder in (args.a, args.b):
        if not folder.exists():
            raise UsageError(f"no such folder: {folder}")
    from fxguard.matching.match import compare_recordings
    from fxguard.recording.ranks import read_record

    found = compare_recordings(
        read_record(args.a), read_record(args.b), output_tolerance=args.tolerance
    )
    if args.html is not None:
        write_page(found, args.html)
    if args.json is not None:
        write_record(args.json, found.to_dict())
    if args.json != "-":
        show(f"A: {args.a}: {found.a}\nB: {args.b}: {found.b}\n")
        show("\n".join(found.verdict), healthy=found.agrees)
        if args.html is not None:
            show(f"page: {args.html}")
    if found.outcome == "not compared":
        return Status.NOTHING
    return Status.FINE if found.agrees else Status.DIFFERENT
