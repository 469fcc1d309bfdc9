"""What ranks do for tests/ranks/test_backward_of_ranks.py: one of them has a bad gradient.

    torchrun --nproc_per_node 2 tests/support/ranks_backward.py folder

Each rank writes ``folder/wrapper-sync.rank.json``: what it was told, and its last gradients.
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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fxguard

FAULTY = 1  # the rank whose input makes a gradient infinite
WRAPPERS = ("ddp", "fsdp", "blocks", "tp")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().sum(-1).sqrt()


class Blocks(nn.Module):
    """Sharded one by one, and the rest together."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.head = nn.Linear(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x)[:, None])


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    if wrapper == "blocks":
        fully_shard(model.net, mesh=mesh)
    if wrapper in ("fsdp", "blocks"):
        return fully_shard(model, mesh=mesh)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def work(wrapper: str, sync_ranks: bool | None, rank: int) -> tuple[list[str], list[float]]:
    """Three steps; in the second of them a rank's input is 0. With blocks each rank's is.

    Returns:
        What is said, and this rank's gradients in the last step. None for ``sync_ranks``: nobody
        guards the model.
    """
    torch.manual_seed(0)
    model = Blocks() if wrapper == "blocks" else Net()
    net = model.net if wrapper == "blocks" else model
    nn.init.zeros_(net.up.bias)
    nn.init.zeros_(net.down.bias)
    model = wrapped(model, wrapper)
    target = model.module if wrapper == "ddp" else model
    found: list[str] = []
    if sync_ranks is not None:
        fxguard.instrument(
            target, sync_ranks=sync_ranks, on_detect=lambda report: found.append(report.message)
        )
    for scale in (1.0, 0.0, 1.0):
        model.zero_grad()
        torch.manual_seed(rank if wrapper != "tp" else 0)
        is_faulty = rank == FAULTY or wrapper in ("tp", "blocks")  # under tp: one input for all
        x = torch.randn(2, 4) * (scale if is_faulty else 1.0)
        model(x).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    return found, torch.cat([g.flatten() for g in local]).tolist()


def main(folder: Path) -> None:
    """Run every case, on every rank at the same time."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    for wrapper, sync_ranks in itertools.product(WRAPPERS, (None, False, True)):
        torch._dynamo.reset()
        with contextlib.redirect_stderr(io.StringIO()):
            found = work(wrapper, sync_ranks, rank)
        (folder / f"{wrapper}-{sync_ranks}.{rank}.json").write_text(json.dumps(found))
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
