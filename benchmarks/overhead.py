"""What looking for inf and NaN costs: fxguard and the alternatives, side by side.

    python benchmarks/overhead.py --quick
    python benchmarks/overhead.py --json overhead.json --chart overhead.png
    python benchmarks/overhead.py --models t5 vit --modes eager --work training --dtypes float32
    python benchmarks/overhead.py --device cuda --modes eager inductor reduce-overhead max-autotune

Everything runs in one process on the same inputs, each tool on its own copy of the same model. In
each round every tool runs once, in random order; a ratio is one of two times of the same round, and
what is given is the median of the ratios with their quartiles. The first call is timed once, under
Inductor with empty caches and in one process; its ratio is one of CPU times, which other programs
disturb less. A training step is forward and backward; the
optimizer, the same for all, would only bring every ratio nearer to 1. All models have random
weights and are healthy: nothing is detected.

All models, dtypes and modes take some hours, nearly all of it for compiling.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import fxguard
from harness import machine
from harness.cases import FORWARD, TRAINING, Case, Result, measure
from harness.models import MLP, MODELS, SHAPES
from harness.quiet import quieten
from harness.summary import scores, targets
from harness.tables import notes_text, result_text, summary_text, targets_text
from harness.timing import Rounds
from harness.tools import EAGER, MODES, PLAIN, SAMPLED, TOOLS, Tool, absent

DTYPES = ("float32", "bfloat16", "float16")

# What --quick measures: model, mode and work, and what it leaves out.
QUICK = (
    ("t5", "eager", FORWARD),
    ("t5", "eager", TRAINING),
    ("vit", "eager", FORWARD),
    (MLP, "eager", FORWARD),
    ("vit", "inductor", FORWARD),
)
NOT_QUICK = frozenset({"torch.compile eager", "torch.sum", "DebugMode"})
NOT_QUICK_COMPILED = frozenset({"plain again", SAMPLED, "DebugUnderflowOverflow", "nan_asserts"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write and draw; the exit status is 1 when fxguard detects something."""
    options = parser().parse_args(arguments)
    if options.chart and importlib.util.find_spec("matplotlib") is None:
        parser().error("--chart needs matplotlib: pip install 'fxguard[bench]'")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser().error("--device cuda: there is no CUDA device")
    quieten()
    if options.threads:
        torch.set_num_threads(options.threads)
    environment = machine.describe(options.device)
    print(machine.title(environment), end="\n\n")
    for tool in TOOLS.values():
        if reason := absent(tool):
            print(f"left out: {tool.name}: {reason}", end="\n\n")
    rounds = Rounds(options.budget or (3 if options.quick else 20), least=3 if options.quick else 5)
    if options.rounds:
        rounds = Rounds(0, options.rounds, options.rounds)
    results = []
    for case in cases(options):
        try:
            result = measure(case, tools_for(case, options), rounds, options.device)
        except fxguard.NonFiniteError as error:
            print(f"fxguard stopped a healthy run: {case}: {error}", file=sys.stderr)
            return 1
        results.append(result)
        print(result_text(result), end="\n\n", flush=True)
        if options.json:  # a long run that is stopped leaves what it has
            text = json.dumps(as_record(results, environment), indent=1)
            options.json.write_text(text + "\n")
    found = scores(results)
    for text in (summary_text(found), targets_text(found), notes_text(results)):
        if text:
            print(text, end="\n\n")
    if options.chart:
        from harness.chart import draw

        draw(as_record(results, environment), options.chart)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    summary = (__doc__ or "").partition("\n")[0]
    found = argparse.ArgumentParser("overhead.py", description=summary)
    add = found.add_argument
    add("--quick", action="store_true", help="a small selection, in under two minutes")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    add("--modes", nargs="+", choices=MODES, metavar="MODE", help=f"of {', '.join(MODES)}")
    add("--work", nargs="+", choices=(FORWARD, TRAINING), default=[FORWARD, TRAINING])
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    add("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), metavar="TOOL")
    add("--size", choices=SHAPES, default="full", help="of models and inputs")
    add("--batch-factor", type=at_least_one, default=1, help="multiplies the size of batches")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--threads", type=at_least_one, help="of the CPU; what torch takes unless given")
    add("--budget", type=float, help="seconds of rounds for each case: 20, with --quick 3")
    add("--rounds", type=at_least_one, help="so many rounds, however long they take")
    add("--json", type=Path, help="write all numbers to this file")
    add("--chart", type=Path, help="draw the means to this file")
    return found


def at_least_one(text: str) -> int:
    """A positive number, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """What the options ask for."""
    if options.quick:
        for model, mode, work in QUICK:
            yield Case(model, SHAPES["quick"][model], "float32", mode, work)
        return
    modes = options.modes or (list(MODES) if options.device == "cuda" else ["eager", "inductor"])
    for dtype in options.dtypes:
        if not can_run(dtype, options.device):
            print(f"left out: {dtype}: this {options.device} is not made for it", end="\n\n")
            continue
        for mode in modes:
            for model in options.models:
                shape = SHAPES[options.size][model]
                shape = dataclasses.replace(shape, batch=shape.batch * options.batch_factor)
                for work in options.work:
                    if model != MLP or work == FORWARD:
                        yield Case(model, shape, dtype, mode, work)


def can_run(dtype: str, device: str) -> bool:
    """Whether a device computes with this dtype, and does not only emulate it."""
    if dtype == "float32" or (dtype == "float16" and device == "cuda"):
        return True
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # The public names for this ask about one operation; oneDNN answers for matrix products.
    known = {
        "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported,
        "float16": torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return bool(known[dtype]())


def tools_for(case: Case, options: argparse.Namespace) -> list[Tool]:
    """What is compared in a case; always with the plain model, first."""
    left_out = NOT_QUICK if case.mode in EAGER else NOT_QUICK | NOT_QUICK_COMPILED
    return [
        tool
        for name, tool in TOOLS.items()
        if name == PLAIN
        or (
            name in options.tools and not (options.quick and case.model != MLP and name in left_out)
        )
    ]


def as_record(results: Sequence[Result], environment: dict[str, str | int]) -> dict[str, Any]:
    """Everything that was measured, for a JSON file."""
    found = scores(results)
    return {
        "environment": environment,
        "notes": {name: tool.note for name, tool in TOOLS.items() if tool.note},
        "results": [dataclasses.asdict(result) for result in results],
        "scores": [dataclasses.asdict(score) for score in found],
        "targets": [
            {"most": target.most, "met": score.value <= target.most, **dataclasses.asdict(score)}
            for target, score in targets(found)
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
