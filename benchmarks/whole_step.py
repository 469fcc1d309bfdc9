"""What looking at the backward costs: training steps with ``backward=True`` and without it.

    python benchmarks/whole_step.py
    python benchmarks/whole_step.py --sizes small quick --models llama vit --threads 1

A step is forward, backward, AdamW's step and ``zero_grad``. In each round a copy of the model with
``backward=True``, one with ``backward=False`` and a plain one make a step each, in random order. A
ratio is one of two times of the same round; given are the median of the ratios and their quartiles.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fxguard
from harness import machine
from harness.cases import WARM_UP
from harness.models import MODELS, SHAPES, Inputs, Shape, with_own_code
from harness.quiet import quieten
from harness.tables import table, with_quartiles
from harness.timing import Rounds, cpu_clock, interleaved, spread

__all__ = ["main"]


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "off": lambda model: fxguard.instrument(model, backward=False),
    "on": lambda model: fxguard.instrument(model, backward=True),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a line for each model."""
    options = parser().parse_args(arguments)
    quieten()
    torch.set_num_threads(options.threads)
    print(machine.title(machine.describe("cpu")), end="\n\n")
    rows = []
    for size in options.sizes:
        for name in options.models:
            shape = SHAPES[size][name]
            shape = dataclasses.replace(shape, batch=shape.batch * options.batch_factor)
            rows.append({"size": size} | measured(name, shape, Rounds(options.budget)))
    print(table(rows))
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser("whole_step.py", description=(__doc__ or "").partition("\n")[0])
    add = found.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--sizes", nargs="+", choices=SHAPES, default=["small", "quick"])
    add("--batch-factor", type=int, default=1, help="multiplies the size of batches")
    add("--threads", type=int, default=1, help="of the CPU")
    add("--budget", type=float, default=20.0, help="seconds of rounds for each model")
    return found


def measured(name: str, shape: Shape, rounds: Rounds) -> dict[str, str]:
    """One line of the table."""
    model, inputs = MODELS[name].build(shape, torch.float32, "cpu")
    steps = {
        way: step_of(prepare(with_own_code(copy.deepcopy(model).train())), inputs)
        for way, prepare in WAYS.items()
    }
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    times = interleaved(steps, cpu_clock, rounds)
    on_over_off = list(zip(times["on"], times["off"], strict=True))
    weights = len(list(model.parameters()))
    more = spread([on - off for on, off in on_over_off]).median
    return {
        "model": MODELS[name].title,
        "weights": f"{weights}",
        "ms plain": f"{spread(times['plain']).median * 1e3:.2f}",
        "ms off": f"{spread(times['off']).median * 1e3:.2f}",
        "on / off": with_quartiles(spread([on / off for on, off in on_over_off]), 3),
        "µs for each weight": f"{more / weights * 1e6:.1f}",
        "rounds": f"{len(on_over_off)}",
    }


def step_of(model: nn.Module, inputs: Inputs) -> Callable[[], None]:
    """A training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        output: Any = model(**inputs)
        loss: Tensor = output.sum() if isinstance(output, Tensor) else output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    sys.exit(main())
