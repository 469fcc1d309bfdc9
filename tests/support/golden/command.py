"""The command line: write the records of one checkout, or compare those of two."""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import __doc__ as about
from .differences import Difference, differences, in_groups
from .families import FAMILIES
from .folders import HERE
from .sides import Side, log_of, made_in, write

__all__ = ["main"]

ROOT = HERE.parents[2]
SHOWN = 100  # groups of differences, of each of which one is printed


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 where both sides say the same, 1 where not, 2 where one did not end."""
    options = parsed(arguments)
    if options.write is not None:
        write(options.root.resolve(), options.only, options.every, options.write)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("now.json", "before.json")]
        roots = [options.root.resolve(), options.against.resolve()]
        running = [
            made_in(root, options.only, options.every, file)
            for root, file in zip(roots, files, strict=True)
        ]
        ends = [each.wait() for each in running]
        for root, file, end in zip(roots, files, ends, strict=True):
            if end:
                print(log_of(file).read_text(errors="replace"), f"{root}: status {end}", sep="\n")
                return 2
        now, before = map(Side.read, files)
    found = list(differences(now.records, before.records))
    print(*shown(found), *report(now, before, len(found)), sep="\n")
    return 1 if found else 0


def shown(found: Sequence[Difference]) -> Iterator[str]:
    """One difference of each group, and how many others are like it."""
    groups = in_groups(found)
    for first, *others in groups[:SHOWN]:
        yield f"{first}\n  and {len(others)} like it" if others else str(first)
    if len(groups) > SHOWN:
        yield f"... and {len(groups) - SHOWN} more kinds"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, of which one says what to do."""
    parser = argparse.ArgumentParser(prog="golden", description=(about or "").partition("\n")[0])
    parser.add_argument("--against", type=Path, help="the other checkout")
    parser.add_argument("--root", type=Path, default=ROOT, help="this checkout, where not here")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the records of one side")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES, metavar="FAMILY")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try one case of N")
    options = parser.parse_args(arguments)
    if options.write is None and options.against is None:
        parser.error("--against a checkout, or --write a file")
    return options


def report(now: Side, before: Side, differing: int) -> list[str]:
    """A line for each family, the second runs of the worked example, and the sum."""
    counts = Counter(name.partition("/")[0] for name in now.records)
    lines = [
        f"{name:<12}{counts[name]:>5} records{own:>7.1f} s of the processor in{clock:>7.1f} s"
        for name, (own, clock) in now.seconds.items()
    ]
    for record in now.records.values():
        lines += record.get("begun by", [])
    runs = f"{now.runs} second runs ({before.runs} before)"
    return [*lines, f"{len(now.records)} records, {differing} differences, {runs}"]
