"""What ``sync_ranks=True`` costs: one small collective at the end of each batch.

    torchrun --nproc_per_node 2 benchmarks/ranks.py
    torchrun --nproc_per_node 4 benchmarks/ranks.py --rounds 500

A tiny MLP runs on each rank with and without it, in turns. Rank 0 prints the difference in
microseconds: that of a forward in which no rank waits for another.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence

import torch
from torch import distributed

import fxguard
from harness import machine
from harness.models import MLP, MODELS, SHAPES
from harness.quiet import quieten
from harness.timing import spread

__all__ = ["main"]

WARM_UP = 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("ranks.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=300)
    rounds = parser.parse_args(arguments).rounds
    quieten()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    model, inputs = MODELS[MLP].build(SHAPES["small"][MLP], torch.float32, "cpu")
    alone = fxguard.instrument(copy.deepcopy(model).eval())
    together = fxguard.instrument(copy.deepcopy(model).eval(), sync_ranks=True)
    over: list[float] = []
    with torch.no_grad():
        for done in range(WARM_UP + rounds):
            seconds = []
            for run in (alone, together):
                distributed.barrier()
                start = time.perf_counter()
                run(**inputs)
                seconds.append(time.perf_counter() - start)
            if done >= WARM_UP:
                over.append(seconds[1] - seconds[0])
    if distributed.get_rank() == 0:
        found = spread(over).scaled(1e6)
        print(machine.title(machine.describe("cpu")))
        print(
            f"sync_ranks with {distributed.get_world_size()} ranks on this machine: "
            f"{found.median:.0f} µs for each forward (quartiles {found.q1:.0f} and {found.q3:.0f})"
        )
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
