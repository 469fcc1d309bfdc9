"""What the first report of a process takes: from the call that turns bad to the printed verdict.

    python benchmarks/first_detection.py
    python benchmarks/first_detection.py --models t5 cnn --rounds 5

Each is one of a fresh process, for each small model of ``tests/support/zoo.py`` and each fault:

- ``large``: all weights of the matrices of the second half of the model are 3e38 or -3e38.
- ``nan``: a number in each of these is NaN.
- ``gradient``: the loss is multiplied by 3e38, so that gradients overflow.
- ``loss``: the loss is 0 and its square root is differentiated.

The model has run once before, so nothing is captured. What is given are medians of CPU seconds on
one thread, of the call (or the backward) that raises, and of printing its error: second runs, the
search for a cause, advice, and the import of all of this. No number stands where no fault was
found, as in a model that normalizes its weights. The longest is printed last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxguard
from harness import machine
from harness.quiet import quieten

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.zoo import ZOO, loss_of

MOST = 3.0  # seconds that it is to take


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parser().parse_args(arguments)
    if options.child:
        print(json.dumps(first_detection(options.models[0], options.child)))
        return 0
    print(machine.title(machine.describe("cpu")), end="\n\n")
    print("| | " + " | ".join(FAULTS) + " |")
    print("|---" * (len(FAULTS) + 1) + "|")
    longest = 0.0
    for model in options.models:
        cells = []
        for fault in FAULTS:
            rounds = [in_child(model, fault) for _ in range(options.rounds)]
            found = [seconds for seconds in rounds if seconds is not None]
            cells.append(f"{statistics.median(found):.2f}" if found else "")
            longest = max(longest, *found, 0.0)
        print(f"| {model} | " + " | ".join(cells) + " |", flush=True)
    print(f"\nthe longest: {longest:.2f} s of {MOST:g}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    text = (__doc__ or "").partition("\n")[0]
    found = argparse.ArgumentParser("first_detection.py", description=text)
    found.add_argument("--models", nargs="+", choices=ZOO, default=list(ZOO), metavar="MODEL")
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--child", choices=FAULTS, help=argparse.SUPPRESS)
    return found


def in_child(model: str, fault: str) -> float | None:
    """CPU seconds of a detection in a process of its own; None if nothing was detected."""
    command = [sys.executable, __file__, "--models", model, "--child", fault]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{model}, {fault}: {done.stderr}")
    seconds: float | None = json.loads(done.stdout.splitlines()[-1])
    return seconds


def first_detection(name: str, fault: str) -> float | None:
    """CPU seconds of the first detection in a model with a fault; None if there is none."""
    quieten()
    torch.set_num_threads(1)
    entry = ZOO[name]
    model = fxguard.instrument(entry.model())
    args, kwargs = entry.inputs(torch.float32, False)

    def step() -> Any:
        return model(*args, **kwargs)

    loss_of(step()).backward()
    bad_step = FAULTS[fault](model, step)
    start = time.process_time()
    try:
        bad_step()
    except fxguard.NonFiniteError as error:
        text = str(error)
    else:
        return None
    seconds = time.process_time() - start
    print(text)
    return seconds


def with_large_weights(model: nn.Module, step: Callable[[], Any]) -> Callable[[], Any]:
    """Overflows from the middle of the model on."""
    with torch.no_grad():
        for weight in second_half(model):
            weight.copy_(weight.sign() * 3e38)
    return step


def with_nan(model: nn.Module, step: Callable[[], Any]) -> Callable[[], Any]:
    """Weights that are bad before the call."""
    with torch.no_grad():
        for weight in second_half(model):
            weight.view(-1)[0] = torch.nan
    return step


def with_large_loss(model: nn.Module, step: Callable[[], Any]) -> Callable[[], Any]:
    """Gradients that overflow inside the model."""
    return lambda: (loss_of(step()) * 3e38).backward()


def with_bad_loss(model: nn.Module, step: Callable[[], Any]) -> Callable[[], Any]:
    """A gradient that is bad from its root on."""
    return lambda: (loss_of(step()) * 0).sqrt().backward()


def second_half(model: nn.Module) -> list[nn.Parameter]:
    """The matrices of the second half of a model."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    return matrices[len(matrices) // 2 :]


FAULTS: dict[str, Callable[[nn.Module, Callable[[], Any]], Callable[[], Any]]] = {
    "large": with_large_weights,
    "nan": with_nan,
    "gradient": with_large_loss,
    "loss": with_bad_loss,
}


if __name__ == "__main__":
    sys.exit(main())
