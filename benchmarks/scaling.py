"""How fxguard's cost grows with a model, its inputs, and the frames that are kept.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --along layers sequence --mode inductor --json scaling.json

A narrow Llama is changed in one respect at a time. Times are ratios to the plain model, interleaved
as in ``overhead.py``; the first call is absolute.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import fxguard
from harness import machine
from harness.cases import FORWARD, TRAINING, Case, Result, measure
from harness.models import Shape
from harness.quiet import quieten
from harness.tables import table, with_quartiles
from harness.timing import Rounds
from harness.tools import FXGUARD, MODES, PLAIN, TOOLS, Tool

BASE = Shape(width=128, layers=2, batch=2, length=128)
KEPT = 21  # frames that fxguard keeps unless told otherwise

# What is changed, and to what.
ALONG = {
    "layers": (2, 4, 8, 16, 32, 48),
    "sequence": (64, 128, 256, 512, 1024, 2048, 4096),
    "batch": (1, 2, 4, 8, 16, 32, 64),
    "frames": (21, 100, 1000, 10_000),
}
QUICK = {name: values[:2] for name, values in ALONG.items()}
NAMES = {"layers": "layers", "sequence": "length", "batch": "batch"}  # of a shape


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: what was changed to which value, and what came of it."""

    along: str
    value: int
    result: Result


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; the exit status is 1 when fxguard detects something."""
    options = parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser().error("--device cuda: there is no CUDA device")
    quieten()
    if options.threads:
        torch.set_num_threads(options.threads)
    environment = machine.describe(options.device)
    print(machine.title(environment), end="\n\n")
    points: list[Point] = []
    for along in options.along:
        try:
            found = list(measured(along, options))
        except fxguard.NonFiniteError as error:
            print(f"fxguard stopped a healthy run: {error}", file=sys.stderr)
            return 1
        points += found
        print(f"{along}, {options.mode}\n\n{table(list(map(row, found)))}", end="\n\n", flush=True)
    if options.json:
        record = {"environment": environment, "points": list(map(dataclasses.asdict, points))}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    summary = (__doc__ or "").partition("\n")[0]
    found = argparse.ArgumentParser("scaling.py", description=summary)
    add = found.add_argument
    add("--along", nargs="+", choices=ALONG, default=list(ALONG), help="what is changed")
    add("--work", nargs="+", choices=(FORWARD, TRAINING), default=[FORWARD, TRAINING])
    add("--mode", choices=MODES, default="eager")
    add("--quick", action="store_true", help="the two smallest values of each")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--threads", type=int, help="of the CPU; what torch takes unless given")
    add("--budget", type=float, default=4.0, help="seconds of rounds for each value")
    add("--json", type=Path, help="write all numbers to this file")
    return found


def measured(along: str, options: argparse.Namespace) -> Iterator[Point]:
    """Every value of what is changed."""
    for value in (QUICK if options.quick else ALONG)[along]:
        shape = dataclasses.replace(BASE, **{NAMES[along]: value} if along in NAMES else {})
        frames = value if along == "frames" else KEPT
        for work in options.work:
            case = Case("llama", shape, "float32", options.mode, work)
            rounds = Rounds(options.budget, least=3)
            yield Point(along, value, measure(case, tools(frames), rounds, options.device))


def tools(frames: int) -> list[Tool]:
    """The plain model and both ways of fxguard, keeping so many frames."""

    def keeping(model: nn.Module, **options: bool) -> nn.Module:
        return fxguard.instrument(model, max_frames_to_save=frames, **options)  # type: ignore[arg-type]

    return [
        TOOLS[PLAIN],
        dataclasses.replace(TOOLS[FXGUARD], prepare=keeping),
        dataclasses.replace(
            TOOLS["fxguard replay"], prepare=lambda model: keeping(model, replay=True)
        ),
    ]


def row(point: Point) -> dict[str, str]:
    """One line of the table."""
    plain, *others = point.result.tools
    found = {
        point.along: f"{point.value}",
        "work": point.result.case.work,
        "plain ms": f"{plain.seconds.median * 1e3:.1f}",
    }
    for tool in others:
        found[tool.tool] = with_quartiles(tool.ratio, 3)
        found[f"first call s, {tool.tool}"] = f"{tool.first.wall_s:.2f}"
    found["rounds"] = f"{point.result.rounds}"
    return found


if __name__ == "__main__":
    sys.exit(main())
