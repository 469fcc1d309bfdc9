"""What an error budget costs, in training steps of the model in float32.

    python benchmarks/error_budget.py
    python benchmarks/error_budget.py --models gpt2 --size quick

Times of the processor, of one thread: a budget in bfloat16 with the capture of the graphs, of the
loss (one backward in float64) and of the logits (four), over the median of three training steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate

import fxguard
from harness.models import MODELS, SHAPES

NUMBERS: dict[str, Callable[[Any], Any] | None] = {"loss": None, "logits": lambda out: out.logits}


def measured(name: str, size: str) -> list[tuple[str, str, float, float, float, float]]:
    """The rows of one model."""
    model, inputs = MODELS[name].build(SHAPES[size][name], torch.float32, "cpu")
    model.eval()
    steps = []
    for _ in range(4):
        start = time.process_time()
        model.zero_grad()
        model(**inputs).loss.backward()
        steps.append(time.process_time() - start)
    plain = statistics.median(steps[1:])  # the first one warms up
    rows = []
    for number, of in NUMBERS.items():
        start = time.process_time()
        budget = fxguard.error_budget(model, of=of, **inputs)
        taken = time.process_time() - start
        rows.append((name, number, plain, taken, taken / plain, budget.explained))
    return rows


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt2", "llama"], metavar="MODEL")
    parser.add_argument("--size", default="full", choices=list(SHAPES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in given.models for row in measured(name, given.size)]
    head = ("model", "number", "step, s", "budget, s", "steps", "explained")
    print(tabulate(rows, head, floatfmt=("", "", ".2f", ".2f", ".1f", ".3f")))


if __name__ == "__main__":
    main()
