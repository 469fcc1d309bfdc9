"""Keeps histories of models that ranks share, under torchrun: each rank writes what it found.

Called with the folder for the findings and the histories.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxguard

STEPS, AT = 90, 80


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """Its last bias has three elements: of four ranks, one has none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def shared(model: Net, how: str) -> nn.Module:
    """The model, as all ranks have it."""
    if how == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@contextmanager
def kept(model: nn.Module, folder: Path | None, by: str) -> Iterator[None]:
    """The body with a history."""
    if by == "watch":
        with fxguard.watch(model, history=folder) if folder else nullcontext():
            yield
        return
    if folder:
        fxguard.instrument(model, history=folder)
    yield
    if folder:
        fxguard.remove(model)


def trained(how: str, fault: str, folder: Path | None, by: str = "instrument") -> dict[str, Any]:
    """Train; return the losses of this rank, and what was said."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = Net()
    whole = shared(model, how)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=3e-3)
    drawn = torch.Generator().manual_seed(rank)
    losses, said = [], StringIO()
    with redirect_stderr(said), kept(model, folder, by):
        for step in range(STEPS):
            x = torch.randn(32, 8, generator=drawn)
            y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
            if step == AT and fault == "shard" and rank == 1:
                x = 100 * x
            for group in optimizer.param_groups:
                group["lr"] = 0.5 if step == AT and fault == "rate" else 3e-3
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(whole(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"losses": losses, "said": said.getvalue().splitlines()}


def main(folder: Path) -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    found: dict[str, Any] = {}
    for how, fault, by in (("ddp", "shard", "instrument"), ("ddp", "rate", "watch")):
        found[f"{how}-{fault}"] = trained(how, fault, folder / f"{how}-{fault}", by)
    found["fsdp-shard"] = trained("fsdp", "shard", folder / "fsdp-shard")
    # If rank 1 waited for rank 0 here, it would wait for ever, or take the numbers of another wait.
    found["fsdp-one"] = trained("fsdp", "shard", folder / "fsdp-one" if rank == 1 else None)
    found["fsdp-none"] = trained("fsdp", "shard", None)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
