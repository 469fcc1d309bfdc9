"""How many kernels a step launches on a GPU, and how long it takes, with checks and without.

    python benchmarks/launches.py --json launches.json
    python benchmarks/launches.py --models gpt2 --size small

Launches are those that CUDA's own profiler sees, with copies and fills of memory. The steps are
short ones, in which the host is what everything waits for. Times are medians of interleaved steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import fxguard
from harness.cases import WARM_UP
from harness.models import MLP, MODELS, SHAPES
from harness.quiet import quieten
from harness.timing import Rounds, interleaved, spread

TOLD = (
    "{model:9} {work:8} {plain:5} launches, {ratio:6.3f} times as many with checks; "
    "{plain_ms:7.2f} ms, {time_ratio:6.3f} times"
)
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, time, print and write."""
    options = parser().parse_args(arguments)
    if not torch.cuda.is_available():
        parser().error("there is no CUDA device, and nothing is launched")
    quieten()
    results = []
    for name in options.models:
        for trains in (False, True):
            result = measured(name, options.size, trains=trains, rounds=options.rounds)
            results.append(result)
            print(TOLD.format_map(result), flush=True)
            if options.json:
                options.json.write_text(json.dumps({"results": results}, indent=1))
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    models = [name for name in MODELS if name != MLP]
    found.add_argument("--models", nargs="+", default=models, choices=models)
    found.add_argument("--size", choices=list(SHAPES), default="quick")
    found.add_argument("--rounds", type=int, default=30, help="timed steps of each")
    found.add_argument("--json", type=Path, help="a file for the results")
    return found


def measured(name: str, size: str, *, trains: bool, rounds: int) -> dict[str, Any]:
    """One model, with checks and without."""
    plain, checked = (step_of(name, size, trains, guarded) for guarded in (False, True))
    for step in (plain, checked):
        for _ in range(WARM_UP):
            step()
    counts = [launches_of(step) for step in (plain, checked)]
    steps = {"plain": plain, "checked": checked}
    times = interleaved(steps, seconds, Rounds(0.0, least=rounds, most=rounds))
    pairs = zip(times["checked"], times["plain"], strict=True)
    return {
        "model": name,
        "work": "training" if trains else "forward",
        "plain": counts[0],
        "checked": counts[1],
        "ratio": counts[1] / max(counts[0], 1),
        "plain_ms": 1e3 * spread(times["plain"]).median,
        "time_ratio": spread([own / alone for own, alone in pairs]).median,
    }


def step_of(name: str, size: str, trains: bool, guarded: bool) -> Callable[[], Any]:
    """A forward, or a forward, a backward and an update."""
    model, inputs = MODELS[name].build(SHAPES[size][name], torch.float32, "cuda")
    model.train(trains)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    if guarded:
        fxguard.instrument(model)

    def forward() -> Any:
        with torch.no_grad():
            return model(**inputs)

    def train() -> None:
        optimizer.zero_grad()
        output = model(**inputs)
        output.loss.backward()
        optimizer.step()

    return train if trains else forward


def launches_of(step: Callable[[], Any]) -> int:
    """What one step launches."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return sum(each.count for each in seen.key_averages() if each.key.startswith(LAUNCHES))


def seconds(step: Callable[[], Any]) -> float:
    """Of one step, with all that it has launched."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
