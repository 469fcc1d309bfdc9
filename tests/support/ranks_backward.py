"""What ranks do for tests/ranks/test_backward_of_ranks.py: one of them has a bad gradient.

    torchrun --nproc_per_node 2 tests/support/ranks_backward.py folder

Each rank writes ``folder/wrapper-sync.rank.json``: what it was told.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fxguard

FAULTY = 1  # the rank whose input makes a gradient infinite
WRAPPERS = ("ddp", "fsdp", "tp")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().sum(-1).sqrt()


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    if wrapper == "fsdp":
        return fully_shard(model, mesh=mesh)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def work(wrapper: str, sync_ranks: bool, rank: int) -> list[str]:
    """The messages of two steps: a healthy one, then one in which a rank's input is 0."""
    torch.manual_seed(0)
    model = Net()
    nn.init.zeros_(model.up.bias)
    nn.init.zeros_(model.down.bias)
    model = wrapped(model, wrapper)
    target = model.module if wrapper == "ddp" else model
    found: list[str] = []
    fxguard.instrument(
        target, sync_ranks=sync_ranks, on_detect=lambda report: found.append(report.message)
    )
    for scale in (1.0, 0.0):
        torch.manual_seed(rank if wrapper != "tp" else 0)
        is_faulty = rank == FAULTY or wrapper == "tp"  # under tp all ranks have one input
        x = torch.randn(2, 4) * (scale if is_faulty else 1.0)
        model(x).sum().backward()
        model.zero_grad()
    return found


def main(folder: Path) -> None:
    """Run every case, on every rank at the same time."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    for wrapper, sync_ranks in itertools.product(WRAPPERS, (False, True)):
        torch._dynamo.reset()
        with contextlib.redirect_stderr(io.StringIO()):
            found = work(wrapper, sync_ranks, rank)
        (folder / f"{wrapper}-{sync_ranks}.{rank}.json").write_text(json.dumps(found))
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
