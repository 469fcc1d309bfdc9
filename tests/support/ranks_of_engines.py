"""A decoder as one process runs it, and as two ranks do: by hand, in stages, by torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, linear, pad, scaled_dot_product_attention

import fxguard

WIDTH, HEADS, VOCAB, RANKS = 24, 4, 37, 2
# Of each scheme: the faults, with a part of the line that a person would change.
FAULTS = {
    "by hand": {
        "bias twice": "linear(y, self.wo, self.bo)",
        "not reduced": "linear(y, self.wo) + self.bo",
        "mean": "ReduceOp.MAX",
        "tanh": 'approximate="tanh"',
        "order": "torch.cat(parts, -1)",
    },
    "stages": {"stale": "dist.send(before, 1)"},
    "tensor parallel": {"tanh": 'approximate="tanh"'},
    "sharded": {"tanh": 'approximate="tanh"'},
}


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.fault = ""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(attended(self.qkv(self.n1(x)), HEADS))
        y = self.up(self.n2(x))
        y = gelu(y, approximate="tanh") if self.fault == "tanh" else gelu(y)
        return x + self.down(y)


class Decoder(nn.Module):
    """One process's."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def attended(qkv: Tensor, heads: int) -> Tensor:
    batch, length, _ = qkv.shape
    q, k, v = qkv.view(batch, length, 3, heads, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
    y = scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(batch, length, -1)


class BlockOfRank(nn.Module):
    """Half of the heads, and half of the MLP."""

    def __init__(self, block: Block, rank: int, fault: str) -> None:
        super().__init__()
        self.fault, self.n1, self.n2 = fault, block.n1, block.n2
        mine = slice(rank * WIDTH // RANKS, (rank + 1) * WIDTH // RANKS)
        inner = slice(rank * 4 * WIDTH // RANKS, (rank + 1) * 4 * WIDTH // RANKS)
        self.wqkv = part(block.qkv.weight.view(3, WIDTH, WIDTH)[:, mine].flatten(0, 1))
        self.bqkv = part(block.qkv.bias.view(3, WIDTH)[:, mine].flatten())
        self.wo, self.bo = part(block.o.weight[:, mine]), block.o.bias
        self.wu, self.bu = part(block.up.weight[inner]), part(block.up.bias[inner])
        self.wd, self.bd = part(block.down.weight[:, inner]), block.down.bias

    def forward(self, x: Tensor) -> Tensor:
        y = attended(linear(self.n1(x), self.wqkv, self.bqkv), HEADS // RANKS)
        if self.fault == "bias twice":
            y = linear(y, self.wo, self.bo)
            dist.all_reduce(y)
        elif self.fault == "not reduced":
            y = linear(y, self.wo) + self.bo
        else:
            y = linear(y, self.wo)
            dist.all_reduce(y)
            y = y + self.bo
        x = x + y
        y = linear(self.n2(x), self.wu, self.bu)
        y = gelu(y, approximate="tanh") if self.fault == "tanh" else gelu(y)
        y = linear(y, self.wd)
        if self.fault == "mean":
            dist.all_reduce(y, op=dist.ReduceOp.MAX)
        else:
            work = dist.all_reduce(y, async_op=True)
            work.wait()
        return x + y + self.bd


class DecoderOfRank(nn.Module):
    """Half of a vocabulary that is not divisible, too."""

    def __init__(self, whole: Decoder, rank: int, fault: str) -> None:
        super().__init__()
        self.rank, self.fault, self.pos, self.norm = rank, fault, whole.pos, whole.norm
        self.blocks = nn.ModuleList(BlockOfRank(each, rank, fault) for each in whole.blocks)
        self.size = -(-VOCAB // RANKS)
        rows = slice(rank * self.size, (rank + 1) * self.size)
        more = (0, 0, 0, self.size * RANKS - VOCAB)
        self.emb = part(pad(whole.emb.weight, more)[rows])
        self.head = part(pad(whole.head.weight, more)[rows])

    def forward(self, ids: Tensor) -> Tensor:
        mine = ids - self.rank * self.size
        other = (mine < 0) | (mine >= self.size)
        x = embedding(mine.masked_fill(other, 0), self.emb).masked_fill(other[..., None], 0.0)
        dist.all_reduce(x)
        x = x + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        y = linear(self.norm(x), self.head)
        parts = [torch.empty_like(y) for _ in range(RANKS)]
        dist.all_gather(parts, y)
        if self.fault == "order":
            parts = parts[::-1]
        return torch.cat(parts, -1)[..., :VOCAB]


class Stage(nn.Module):
    """One of two stages: it receives from the one before, in three small batches."""

    def __init__(self, whole: Decoder, rank: int, fault: str) -> None:
        super().__init__()
        self.rank, self.fault, self.whole = rank, fault, whole
        self.block = whole.blocks[rank]

    def forward(self, ids: Tensor) -> Tensor:
        found: list[Tensor] = []
        for some in ids.chunk(3):
            if self.rank:
                x = torch.empty(*some.shape, WIDTH)
                dist.recv(x, 0)
                found.append(self.whole.head(self.whole.norm(self.block(x))))
                continue
            x = self.block(self.whole.emb(some) + self.whole.pos(torch.arange(ids.shape[1])))
            before = found[-1] if found else x
            if self.fault == "stale":
                dist.send(before, 1)
            else:
                dist.send(x, 1)
            found.append(x)
        return torch.cat(found)


def part(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x.detach().clone())


def whole() -> Decoder:
    torch.manual_seed(0)
    model = Decoder().eval()
    for weight in model.parameters():
        weight.data.add_(0.1 * torch.randn_like(weight))
    return model


def ids() -> Tensor:
    return torch.randint(0, VOCAB, (6, 11), generator=torch.Generator().manual_seed(1))


def of_rank(scheme: str, rank: int, fault: str) -> tuple[nn.Module, Tensor]:
    """A rank's model and what it is given."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = whole()
    if scheme == "by hand":
        return DecoderOfRank(model, rank, fault), ids()
    if scheme == "stages":
        return Stage(model, rank, fault), ids()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        block.fault = fault  # type: ignore[assignment] # torch's type of an attribute
        if scheme == "sharded":
            fully_shard(block, mesh=mesh)
        else:
            plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh, plan)
    if scheme == "sharded":
        fully_shard(model, mesh=mesh)
        return model, ids().chunk(RANKS)[rank]
    return model, ids()


def record_all(rank: int, folder: Path, port: int) -> None:
    """What each rank runs: all schemes, each healthy and with each fault."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for scheme, faults in FAULTS.items():
        for fault in ("", *faults):
            model, given = of_rank(scheme, rank, fault)
            with torch.no_grad():
                fxguard.record(model, folder / scheme / (fault or "healthy"), given)
    dist.destroy_process_group()
