"""What a history costs: steps of a guarded model with one, over steps of a guarded model without.

    python benchmarks/history.py
    python benchmarks/history.py --rounds 40 --models gpt

A step is forward, loss, backward and AdamW. Times of the processor, of one thread, the three models
of a round in random order, each in a process of its own; the numbers are medians of the ratios of
single rounds, after rounds in which bands and files fill.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxguard

Step = Callable[[], None]
WARM_UP = 80  # rounds, in which bands fill: from then on batches are kept
HOW = ("watch", "instrument", "compiled", "replay")  # the last two under Inductor


class GPT(nn.Module):
    """Causal blocks of torch's own layers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(x)


def of_gpt(model: nn.Module, batch: int, length: int) -> Step:
    """A step on random text."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mask = nn.Transformer.generate_square_subsequent_mask(length)

    def step() -> None:
        ids = torch.randint(256, (batch, length))
        optimizer.zero_grad()
        logits = model(ids, mask)
        nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        optimizer.step()

    return step


def of_mlp(model: nn.Module, batch: int) -> Step:
    """A step on random rows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        x = torch.randn(batch, 64)
        optimizer.zero_grad()
        (model(x) - x[:, :8].abs()).square().mean().backward()
        optimizer.step()

    return step


def mlp(width: int) -> nn.Module:
    """Four layers."""
    return nn.Sequential(
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 8),
    )


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Step]]] = {
    "gpt 64 wide, 512 tokens": (lambda: GPT(64, 3), lambda model: of_gpt(model, 8, 64)),
    "gpt 256 wide, 512 tokens": (lambda: GPT(256, 3), lambda model: of_gpt(model, 8, 64)),
    "gpt 64 wide, 4096 tokens": (lambda: GPT(64, 3), lambda model: of_gpt(model, 16, 256)),
    "gpt 256 wide, 4096 tokens": (lambda: GPT(256, 3), lambda model: of_gpt(model, 16, 256)),
    "mlp 128 wide, 512 samples": (lambda: mlp(128), lambda model: of_mlp(model, 512)),
    "mlp 512 wide, 4096 samples": (lambda: mlp(512), lambda model: of_mlp(model, 4096)),
}


@contextmanager
def guarded(how: str, model: nn.Module, **options: Any) -> Iterator[nn.Module]:
    """A model that is guarded in one of the ways, as a script calls it."""
    if how == "watch":
        with fxguard.watch(model, **options):
            yield model
        return
    fxguard.instrument(model, replay=how == "replay", **options)
    yield torch.compile(model) if how in ("compiled", "replay") else model
    fxguard.remove(model)


@contextmanager
def plain(how: str, model: nn.Module) -> Iterator[nn.Module]:
    """Likewise without fxguard."""
    yield torch.compile(model) if how in ("compiled", "replay") else model


def serve(name: str, how: str, kind: str, orders: Connection) -> None:
    """Make one step for each order, and answer with its seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, stepping = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        options = {"history": folder} if kind == "history" else {}
        entered = plain(how, make()) if kind == "plain" else guarded(how, make(), **options)
        with entered as model:
            step = stepping(model)
            while orders.recv():
                start = time.process_time()
                step()
                orders.send(time.process_time() - start)


def measured(name: str, how: str, rounds: int) -> tuple[str, str, float, float, float, float]:
    """The row of one case."""
    spawn = multiprocessing.get_context("spawn")  # a mode of one model is none of another's
    pipes: dict[str, Connection] = {}
    for kind in ("plain", "guarded", "history"):
        pipes[kind], theirs = spawn.Pipe()
        spawn.Process(target=serve, args=(name, how, kind, theirs), daemon=True).start()
    took: dict[str, list[float]] = {kind: [] for kind in pipes}
    for at in range(WARM_UP + rounds):
        for kind in random.sample(list(pipes), 3):
            pipes[kind].send(True)
            seconds = pipes[kind].recv()
            if at >= WARM_UP:
                took[kind].append(seconds)
    for pipe in pipes.values():
        pipe.send(False)

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(took[one], took[other], strict=True))

    plain = statistics.median(took["plain"])
    cost = [a - b for a, b in zip(took["history"], took["guarded"], strict=True)]
    return (
        name,
        how,
        1e3 * plain,
        ratio("guarded", "plain"),
        ratio("history", "guarded"),
        1e3 * statistics.median(cost),
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--models", nargs="+", default=[], metavar="MODEL")
    parser.add_argument("--how", nargs="+", choices=HOW, default=["watch"])
    given = parser.parse_args()
    names = [x for x in CASES if not given.models or any(each in x for each in given.models)]
    rows = [measured(name, how, given.rounds) for name in names for how in given.how]
    head = ("model", "how", "step, ms", "guarded, times plain", "history, times guarded", "ms more")
    print(tabulate(rows, head, floatfmt=("", "", ".1f", ".3f", ".3f", ".2f")))


if __name__ == "__main__":
    main()
