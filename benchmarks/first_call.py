"""What the first call of a model takes: capturing it, and putting checks into what was captured.

    python benchmarks/first_call.py
    python benchmarks/first_call.py --models t5 nbeats --rounds 5 --size full
    python benchmarks/first_call.py --models x-transformers --functions 20

Each first call is one of a fresh process, and the ways take turns. What is given are medians of CPU
seconds on one thread, of a forward without gradients or of what ``harness/first_calls.py`` says:

- ``plain``: the model alone.
- ``torch.compile``: TorchDynamo alone, ``model.compile(backend="eager")``.
- ``fxguard``: the model instrumented. It may be captured on another path, that of plain Python.
- ``in TorchDynamo`` and ``own part``: the same call taken apart, in another process in which a
  signal looks at the stack in each ms of CPU time. Its own are those moments in which the innermost
  function of fxguard or TorchDynamo is fxguard's, and all in which a mark is traced. Those in which
  that function has called what it was given, such as a graph or one operation between two graphs,
  count for neither: there the model computes, with the checks in its graphs, which each later call
  pays for, too. In TorchDynamo's ``eval_frame`` some of its own C code is among them.

A model is measured where its package is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import linecache
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import fxguard
from harness import machine
from harness.first_calls import CASES
from harness.models import SHAPES
from harness.quiet import quieten

PLAIN, COMPILE, FXGUARD, APART = "plain", "torch.compile", "fxguard", "apart"
WAYS = (PLAIN, COMPILE, FXGUARD, APART)
OWN, TORCHDYNAMO, NEITHER = "own part", "in TorchDynamo", "neither"
RUNS_GRAPHS = ("/torch/_dynamo/eval_frame.py", "/torch/_dynamo/external_utils.py")
CALL_AS_GIVEN = re.compile(r"\b(fn|func|function)\(\*args")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parser().parse_args(arguments)
    if options.child:
        print(json.dumps(first_call(options.models[0], options.size, options.child)))
        return 0
    print(machine.title(machine.describe("cpu")), end="\n\n")
    titles = ("", PLAIN, COMPILE, FXGUARD, "times", TORCHDYNAMO, OWN, "times", "graphs")
    print("| " + " | ".join(titles) + " |")
    print("|---" * len(titles) + "|")
    for model in options.models:
        package = CASES[model].package
        if importlib.util.find_spec(package) is None:
            print(f"left out: {model}: {package} is not installed")
            continue
        rounds = [
            {way: in_child(model, options.size, way) for way in WAYS} for _ in range(options.rounds)
        ]
        print(row(model, rounds), flush=True)
        if options.functions:
            print_functions(rounds, options.functions)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser("first_call.py", description=(__doc__ or "").partition("\n")[0])
    found.add_argument(
        "--models", nargs="+", choices=CASES, default=list(CASES), metavar="MODEL", help="which"
    )
    found.add_argument("--size", choices=SHAPES, default="full", help="of the first five")
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument(
        "--functions", type=int, default=0, metavar="N", help="list the longest of the own part"
    )
    found.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    return found


def in_child(model: str, size: str, way: str) -> dict[str, Any]:
    """CPU seconds of a first call in a process of its own, by name."""
    command = [sys.executable, __file__, "--models", model, "--size", size, "--child", way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{model}, {way}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(model: str, rounds: Sequence[dict[str, dict[str, Any]]]) -> str:
    """The medians of a model, as a row of a table."""

    def median(way: str, name: str = "seconds") -> float:
        return statistics.median(found[way][name] for found in rounds)

    plain, guarded = median(COMPILE), median(FXGUARD)
    traced, own = median(APART, TORCHDYNAMO), median(APART, OWN)
    cells = (f"{median(PLAIN):.2f}", f"{plain:.2f}", f"{guarded:.2f}", f"{guarded / plain:.2f}")
    parts = (f"{traced:.2f}", f"{own:.2f}", f"{own / traced:.2f}" if traced else "")
    return " | ".join((f"| {model}", *cells, *parts, str(rounds[-1][FXGUARD]["graphs"]))) + " |"


def print_functions(rounds: Sequence[dict[str, dict[str, Any]]], count: int) -> None:
    """The functions of fxguard in which most of its own part was spent, with seconds."""
    seconds: Counter[str] = Counter()
    for found in rounds:
        seconds.update(found[APART]["functions"])
    for name, total in seconds.most_common(count):
        print(f"{total / len(rounds):8.3f}  {name}")


def first_call(model: str, size: str, way: str) -> dict[str, Any]:
    """CPU seconds of the first call, and where they were spent if they are taken apart."""
    quieten()
    torch.set_num_threads(1)
    warm = Warm()
    prepare(warm, way)
    warm(torch.ones(3))  # what is loaded and set up once
    torch.manual_seed(0)
    case = CASES[model].make(size)
    guard = prepare(case.model, way)
    places: Counter[str] = Counter()
    functions: Counter[str] = Counter()

    def look(_: int, frame: FrameType | None) -> None:
        place, function = place_of(frame)
        places[place] += 1
        if place == OWN:
            functions[function] += 1

    if way == APART:
        signal.signal(signal.SIGPROF, look)
        signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    start = time.process_time()
    case.run()
    seconds = time.process_time() - start
    signal.setitimer(signal.ITIMER_PROF, 0)
    share = seconds / max(places.total(), 1)
    return {
        "seconds": seconds,
        "functions": {name: count * share for name, count in functions.most_common()},
        "graphs": 0 if guard is None else len(guard._captures.plans),
        **{name: places[name] * share for name in (OWN, TORCHDYNAMO)},
    }


def prepare(model: nn.Module, way: str) -> Any:
    """Let a model run in one of the ways; its guard, if it has one."""
    if way == COMPILE:
        nn.Module.compile(model, backend="eager")
    elif way != PLAIN:
        return fxguard.guard_of(fxguard.instrument(model))
    return None


def place_of(frame: FrameType | None) -> tuple[str, str]:
    """Who computes: fxguard, TorchDynamo, or neither, such as the model; and in which function."""
    place = function = ""
    while frame is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        is_ours = "/fxguard/" in file and "/benchmarks/" not in file
        if is_ours and frame.f_code.co_name == "_leave_mark":
            return OWN, name_of(frame)
        if not place and (is_ours or "/torch/_dynamo/" in file):
            place, function = OWN if is_ours else TORCHDYNAMO, name_of(frame)
            runs = is_ours or file.endswith(RUNS_GRAPHS)
            if runs and CALL_AS_GIVEN.search(linecache.getline(file, frame.f_lineno or 0)):
                place = NEITHER
        frame = frame.f_back
    return place or NEITHER, function


def name_of(frame: FrameType) -> str:
    """``batch/observer.unobserved``: the file of a function, and its name."""
    file = Path(frame.f_code.co_filename)
    return f"{file.parent.name}/{file.stem}.{frame.f_code.co_name}"


class Warm(nn.Module):
    """Two operations."""

    def forward(self, values: Tensor) -> Tensor:
        return values.sin() + 1


if __name__ == "__main__":
    sys.exit(main())
