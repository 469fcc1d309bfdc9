"""What fingerprints cost: a traced batch with them and without, and the file of it.

    python benchmarks/fingerprints.py
    python benchmarks/fingerprints.py --models t5 --size small --rounds 30

In each round one process runs, in random order, an ordinary guarded call, a call that is traced
without fingerprints, and one that is traced with them. Given are medians of milliseconds with their
quartiles, and bytes of a batch in the file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import fxguard
from fxguard.guard.recorder import Recorder
from harness import machine
from harness.cases import WARM_UP
from harness.models import MODELS, SHAPES, Inputs, with_own_code
from harness.quiet import quieten
from harness.tables import table, with_quartiles
from harness.timing import Rounds, cpu_clock, interleaved, spread

__all__ = ["main"]

FOREVER = range(10**5)


def guarded(model: nn.Module, folder: Path | None) -> nn.Module:
    """Guarded, and traced where there is a folder."""
    if folder is None:
        return fxguard.instrument(model)
    return fxguard.instrument(model, trace_batch_nums=FOREVER, trace_to=folder)


def measure(
    build: Callable[[], tuple[nn.Module, Inputs]], rounds: Rounds, backend: str
) -> list[dict[str, str]]:
    """A row for each way to run a model: its name, milliseconds, bytes of a batch."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = {
            "guarded": None,
            "traced, without": Path(temporary, "without"),
            "traced, with": Path(temporary, "with"),
        }
        calls: dict[str, Callable[[], object]] = {}
        for name, folder in folders.items():
            model, inputs = build()
            model = guarded(with_own_code(model.eval()), folder)
            called = model if backend == "eager" else torch.compile(model, backend=backend)
            calls[name] = caller(called, inputs, with_fingerprints=name != "traced, without")
        for call in calls.values():
            for _ in range(WARM_UP):
                call()
        times = interleaved(calls, cpu_clock, rounds)
        return [
            {
                "what": name,
                "ms": with_quartiles(spread(times[name]).scaled(1e3), 1),
                "bytes of a batch": bytes_of_a_batch(folder),
            }
            for name, folder in folders.items()
        ]


def caller(
    called: Callable[..., object], inputs: Inputs, *, with_fingerprints: bool
) -> Callable[[], object]:
    """One call of a model; without fingerprints as if its batches were not written."""
    if with_fingerprints:
        return lambda: called(**inputs)

    def call() -> None:
        with mock.patch.object(Recorder, "_writes", return_value=False):
            called(**inputs)

    return call


def bytes_of_a_batch(folder: Path | None) -> str:
    """The last line of a file."""
    if folder is None:
        return ""
    [path] = folder.glob("*.jsonl")
    return str(len(path.read_bytes().splitlines()[-1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["t5", "resnet50"], choices=list(MODELS))
    parser.add_argument("--size", default="quick", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", default="eager", help="a backend of TorchDynamo")
    given = parser.parse_args(arguments)
    quieten()
    print(machine.title(machine.describe("cpu")))
    for name in given.models:
        model, shape = MODELS[name], SHAPES[given.size][name]
        with torch.no_grad():
            rows = measure(
                lambda model=model, shape=shape: model.build(shape, torch.float32, "cpu"),  # type: ignore[misc]
                Rounds(0.0, given.rounds, given.rounds),
                given.backend,
            )
        print(f"\n{name}, {given.size}, {given.backend}")
        print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
