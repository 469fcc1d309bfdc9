"""What a history costs: steps of a guarded model with one, over steps of a guarded model without.

    python benchmarks/history.py
    python benchmarks/history.py --rounds 40 --models gpt

A step is forward, loss, backward and AdamW. Times of the processor, of one thread, the three models
of a round in random order; the numbers are medians of the ratios of single rounds, after rounds in
which bands and files fill.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxguard

Step = Callable[[], None]


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


def measured(name: str, rounds: int) -> tuple[str, float, float, float, float]:
    """The row of one case."""
    make, stepping = CASES[name]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        models = {"plain": make(), "guarded": make(), "history": make()}
        fxguard.instrument(models["guarded"])
        fxguard.instrument(models["history"], history=folder)
        steps = {kind: stepping(model) for kind, model in models.items()}
        took: dict[str, list[float]] = {kind: [] for kind in models}
        for at in range(rounds + 10):
            for kind in random.sample(list(models), 3):
                start = time.process_time()
                steps[kind]()
                if at >= 10:
                    took[kind].append(time.process_time() - start)
        for model in list(models.values())[1:]:
            fxguard.remove(model)

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(took[one], took[other], strict=True))

    plain = statistics.median(took["plain"])
    cost = [a - b for a, b in zip(took["history"], took["guarded"], strict=True)]
    return (
        name,
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
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = [x for x in CASES if not given.models or any(each in x for each in given.models)]
    rows = [measured(name, given.rounds) for name in names]
    head = ("model", "step, ms", "guarded, times plain", "history, times guarded", "ms more")
    print(tabulate(rows, head, floatfmt=("", ".1f", ".3f", ".3f", ".2f")))


if __name__ == "__main__":
    main()
