"""What it costs to check operations that TorchDynamo leaves to Python, one by one.

    python benchmarks/between_graphs.py
    python benchmarks/between_graphs.py --cases t5 llama --size quick --work forward

Nothing of these models is captured, except for the last two, which once were left to Python in
part. In each round a plain model and a guarded one run, in random order; given are the median of
the ratios of such pairs with their quartiles, and how much longer the guarded one takes for each
operation that was checked between graphs.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fxguard
from harness import machine
from harness.cases import FORWARD, TRAINING, WARM_UP, call_of
from harness.models import MODELS, SHAPES, Inputs
from harness.quiet import quieten
from harness.tables import table, with_quartiles
from harness.timing import Rounds, cpu_clock, interleaved, spread

__all__ = ["main"]


class Uncaptured(nn.Module):
    """A model that TorchDynamo leaves to Python."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @torch.compiler.disable
    def forward(self, **inputs: Tensor) -> Any:
        return self.model(**inputs)


class Chain(nn.Module):
    """Small operations and nothing else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / math.sqrt(width))

    def forward(self, x: Tensor) -> Tensor:
        """From [batch, width] to [batch, width]."""
        for _ in range(50):
            x = torch.tanh(x @ self.weight) + 0.5
        return x


class CausalTransformer(nn.Module):
    """Encoder and decoder of torch, which may take fused kernels in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """From two texts of shape [batch, length, 64] to the shape of the second."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        output: Tensor = self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True)
        return output


class Gcn(nn.Module):
    """Graph convolutions: they index, scatter, and write what was infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 7)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """From [nodes, 16] and [2, edges] to [nodes, 7]."""
        x = torch.relu(self.convolve(self.first(x), edges))
        return torch.log_softmax(self.convolve(self.second(x), edges), dim=-1)

    def convolve(self, x: Tensor, edges: Tensor) -> Tensor:
        """The weighted sum of what is at the other end of each edge."""
        source, target = edges
        degree = torch.zeros(len(x)).scatter_add_(0, target, torch.ones(len(target)))
        norm = degree.pow(-0.5)
        norm[torch.isinf(norm)] = 0
        messages = x[source] * (norm[source] * norm[target])[:, None]
        return torch.zeros_like(x).index_add_(0, target, messages)


def chain() -> tuple[nn.Module, Inputs]:
    """The chain, and its input."""
    return Uncaptured(Chain(64)), {"x": torch.randn(16, 64)}


def causal() -> tuple[nn.Module, Inputs]:
    """The transformer, and two short texts."""
    return CausalTransformer(), {name: torch.randn(2, 16, 64) for name in ("source", "target")}


def gcn() -> tuple[nn.Module, Inputs]:
    """The graph convolutions, and a graph."""
    return Gcn(), {"x": torch.randn(100, 16), "edges": torch.randint(0, 100, (2, 400))}


OWN: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "chain": chain,
    "causal": causal,
    "gcn": gcn,
}
OF_TRANSFORMERS = ("t5", "llama", "gpt2", "vit", "resnet50")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a line for each case."""
    options = parser().parse_args(arguments)
    quieten()
    torch.set_num_threads(options.threads)
    print(machine.title(machine.describe("cpu")), end="\n\n")
    rows = [
        {"model": name, "work": work} | measured(*built(name, options.size), work, options.budget)
        for name in options.cases
        for work in options.work
    ]
    print(table(rows))
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser("between_graphs.py", description=(__doc__ or "").split("\n")[0])
    names = ("chain", *OF_TRANSFORMERS, "causal", "gcn")
    add = found.add_argument
    add("--cases", nargs="+", choices=names, default=list(names), metavar="CASE")
    add("--size", choices=SHAPES, default="quick", help="of the models of transformers")
    add("--work", nargs="+", choices=(FORWARD, TRAINING), default=[FORWARD, TRAINING])
    add("--threads", type=int, default=1, help="of the CPU")
    add("--budget", type=float, default=8.0, help="seconds of rounds for each line")
    return found


def built(name: str, size: str) -> tuple[nn.Module, Inputs]:
    """A model and its inputs."""
    torch.manual_seed(0)
    if name in OWN:
        return OWN[name]()
    model, inputs = MODELS[name].build(SHAPES[size][name], torch.float32, "cpu")
    return Uncaptured(model), inputs


def measured(model: nn.Module, inputs: Inputs, work: str, budget: float) -> dict[str, str]:
    """One line of the table."""
    model.train(work == TRAINING)
    guarded = fxguard.instrument(copy.deepcopy(model))
    calls = {"plain": call_of(model, inputs, work), "guarded": call_of(guarded, inputs, work)}
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    times = interleaved(calls, cpu_clock, Rounds(budget))
    pairs = list(zip(times["guarded"], times["plain"], strict=True))
    more = spread([guarded - plain for guarded, plain in pairs]).median
    count = fxguard.guard_of(guarded).counted().between
    return {
        "ms plain": f"{spread(times['plain']).median * 1e3:.2f}",
        "times plain": with_quartiles(spread([guarded / plain for guarded, plain in pairs]), 3),
        "between graphs": f"{count}",
        "µs for each": f"{more / count * 1e6:.0f}" if count else "",
        "rounds": f"{len(pairs)}",
    }


if __name__ == "__main__":
    sys.exit(main())
