"""A model that calls every collective, on two ranks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

import fxguard

RANKS = 2


class AllCollectives(nn.Module):
    """Returns what each of them brings, by name."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        rank, other, group = dist.get_rank(), 1 - dist.get_rank(), dist.group.WORLD
        assert group is not None
        found: dict[str, Tensor] = {}
        for how in ("SUM", "MAX", "MIN", "PRODUCT"):
            y = x.clone()
            dist.all_reduce(y, op=getattr(dist.ReduceOp, how))
            found[f"all_reduce {how}"] = y
        y = x.clone()
        dist.broadcast(y, 1)
        found["broadcast"] = y
        y = x.clone()
        dist.reduce(y, 0)
        if rank == 0:
            found["reduce"] = y
        parts = [torch.empty_like(x) for _ in range(RANKS)]
        dist.all_gather(parts, x)
        found["all_gather"] = torch.stack(parts)
        found["all_gather one"] = torch.empty(RANKS * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(found["all_gather one"], x)
        into = [torch.empty_like(x) for _ in range(RANKS)] if rank == 0 else None
        dist.gather(x, into)
        if into is not None:
            found["gather"] = torch.stack(into)
        found["scatter"] = torch.empty_like(x)
        dist.scatter(found["scatter"], [x * 2, x * 3] if rank == 0 else None)
        found["reduce_scatter"] = torch.empty(x.shape[0] // RANKS, x.shape[1])
        dist.reduce_scatter_tensor(found["reduce_scatter"], x)
        found["all_to_all"] = torch.empty_like(x)
        dist.all_to_all_single(found["all_to_all"], x)
        sizes = ([1, 3], [2, 2])  # rows that ranks 0 and 1 send to each
        rows = [each[rank] for each in sizes]
        found["all_to_all rows"] = torch.empty(sum(rows), x.shape[1])
        dist.all_to_all_single(found["all_to_all rows"], x, rows, list(sizes[rank]))
        found["received"] = torch.empty_like(x)
        work = dist.irecv(found["received"], other)  # both receive before they send
        assert work is not None
        dist.send(x * 5, other)
        work.wait()
        found["functional sum"] = functional.all_reduce(x, "sum", group) + 0
        found["functional mean"] = functional.all_reduce(x, "avg", group) + 0
        found["functional gather"] = functional.all_gather_tensor(x, 1, group) + 0
        found["functional scatter"] = functional.reduce_scatter_tensor(x, "sum", 0, group) + 0
        return found


def record_it(rank: int, folder: Path, port: int) -> None:
    """What each rank runs."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch calls some names of these old
        fxguard.record(AllCollectives(), folder, x)
    dist.destroy_process_group()
