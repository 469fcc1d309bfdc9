"""What it costs to guard models that write what they are given: caches, counters, averages.

    python benchmarks/replay.py
    python benchmarks/replay.py --cases static_cache momentum --size small

A second run of a graph needs the inputs that the graph changes as they were before, so some of them
are copied before each run. In each round the plain model, a guarded one and one guarded with
``replay=True`` run, in random order. Given are medians of the ratios to the plain one, with their
quartiles, and likewise the peak memory: what a call takes, and all that is held before it.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fxguard
from harness import machine
from harness.cases import WARM_UP
from harness.memory import peak_bytes, size_of
from harness.quiet import quieten
from harness.tables import table, with_quartiles
from harness.timing import Rounds, cpu_clock, interleaved, spread

__all__ = ["main"]

WIDTH = {"small": 32, "full": 512}
LENGTH = {"small": 64, "full": 4096}  # of caches
BATCH = 4

Step = Callable[[nn.Module], object]
Built = tuple[nn.Module, Callable[[], Step]]


def llama(size: str, **options: Any) -> nn.Module:
    """A decoder of four layers."""
    import transformers

    width = WIDTH[size]
    config = transformers.MistralConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1000,
        max_position_embeddings=2 * LENGTH[size],
        **options,
    )
    model: nn.Module = transformers.MistralModel(config).eval()
    return model


def static_cache(size: str, **options: Any) -> Built:
    """One more token behind a cache of a fixed size, which is written in place."""
    import transformers

    options.setdefault("sliding_window", None)
    model = llama(size, **options)

    def prepare() -> Step:
        config: Any = model.config
        cache = transformers.StaticCache(config=config, max_cache_len=LENGTH[size])
        is_full = options["sliding_window"] is not None
        filled = LENGTH[size] + 8 if is_full else LENGTH[size] // 2
        prompt = torch.randint(0, 1000, (BATCH, filled))
        with torch.no_grad():
            model(prompt, past_key_values=cache, use_cache=True)

        def step(guarded: nn.Module) -> None:
            for layer in cache.layers if not is_full else ():
                layer.cumulative_length.fill_(filled)
            with torch.no_grad():
                guarded(prompt[:, :1], past_key_values=cache, use_cache=True)

        return step

    return model, prepare


def sliding_cache(size: str) -> Built:
    """The same with a window that is full: each token moves all others by a row."""
    return static_cache(size, sliding_window=LENGTH[size])


def dynamic_cache(size: str) -> Built:
    """One more token behind a cache that grows: its tensors are made anew."""
    import transformers

    model = llama(size, sliding_window=None)

    def prepare() -> Step:
        prompt = torch.randint(0, 1000, (BATCH, LENGTH[size] // 2))
        with torch.no_grad():
            past: Any = model(prompt, use_cache=True).past_key_values
        kept = [(layer.keys, layer.values) for layer in past.layers]

        def step(guarded: nn.Module) -> None:
            cache = transformers.DynamicCache()
            for index, (keys, values) in enumerate(kept):
                cache.update(keys, values, index)
            with torch.no_grad():
                guarded(prompt[:, :1], past_key_values=cache, use_cache=True)

        return step

    return model, prepare


class Momentum(nn.Module):
    """Two networks; each batch moves the weights of the second towards those of the first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)]
        self.query = nn.Sequential(nn.Linear(64, width), *layers)
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """From [batch, 64] to a loss."""
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
            target = self.key(x)
        return (self.query(x) - target).square().mean()


class Codebook(nn.Module):
    """A quantizer whose codes are running means of what was assigned to them."""

    def __init__(self, codes: int, width: int) -> None:
        super().__init__()
        self.register_buffer("sums", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))
        self.encoder = nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        """From [batch, 64] to a loss."""
        sums, counts = self.get_buffer("sums"), self.get_buffer("counts")
        encoded = self.encoder(x)
        codes = sums / counts[:, None]
        nearest = torch.cdist(encoded.detach(), codes).argmin(1)
        with torch.no_grad():
            chosen = nn.functional.one_hot(nearest, len(counts)).to(x.dtype)
            counts.mul_(0.99).add_(chosen.sum(0), alpha=0.01)
            sums.mul_(0.99).add_(chosen.T @ encoded, alpha=0.01)
        return (encoded - codes[nearest]).square().mean()


def training(model: nn.Module, rows: int) -> Built:
    """A forward with its backward."""
    x = torch.randn(rows, 64)

    def step(guarded: nn.Module) -> None:
        guarded(x).backward()
        guarded.zero_grad()

    return model, lambda: step


def momentum(size: str) -> Built:
    """Weights that are written in each batch."""
    return training(Momentum(2 * WIDTH[size]), BATCH * 64)


def codebook(size: str) -> Built:
    """Large buffers that are read, and then written."""
    return training(Codebook(2 * LENGTH[size], WIDTH[size] // 2), BATCH * 64)


def batch_norm(size: str) -> Built:
    """Running statistics: many small buffers."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(24)]
    return training(nn.Sequential(*layers, Mean()), BATCH * WIDTH[size])


class Mean(nn.Module):
    """The mean of all elements."""

    def forward(self, x: Tensor) -> Tensor:
        """From any shape to []."""
        return x.mean()


CASES: dict[str, Callable[[str], Built]] = {
    "static_cache": static_cache,
    "sliding_cache": sliding_cache,
    "dynamic_cache": dynamic_cache,
    "momentum": momentum,
    "codebook": codebook,
    "batch_norm": batch_norm,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a line for each case."""
    options = parser().parse_args(arguments)
    quieten()
    torch.set_num_threads(options.threads)
    print(machine.title(machine.describe("cpu")), end="\n\n")
    rows = [
        {"model": name, "backend": backend} | measured(name, options.size, backend, options.budget)
        for backend in options.backends
        for name in options.cases
    ]
    print(table(rows))
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser("replay.py", description=(__doc__ or "").split("\n")[0])
    add = found.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    add("--size", choices=WIDTH, default="full")
    add("--backends", nargs="+", default=["none"], help="of torch.compile; none: eager")
    add("--threads", type=int, default=1, help="of the CPU")
    add("--budget", type=float, default=8.0, help="seconds of rounds for each line")
    return found


def measured(name: str, size: str, backend: str, budget: float) -> dict[str, str]:
    """One line of the table."""
    calls: dict[str, Callable[[], object]] = {}
    peaks: dict[str, int] = {}
    for way in ("plain", "guarded", "replay"):
        gc.collect()
        before = size_of(tensors())
        torch.manual_seed(0)
        model, prepare = CASES[name](size)
        step = prepare()
        if way != "plain":
            model = fxguard.instrument(model, replay=way == "replay")
        called: Any = model if backend == "none" else torch.compile(model, backend=backend)
        calls[way] = call = lambda step=step, called=called: step(called)  # type: ignore[misc]
        for _ in range(WARM_UP):
            call()
        gc.collect()
        peaks[way] = peak_bytes(call, "cpu") + size_of(tensors()) - before
    times = interleaved(calls, cpu_clock, Rounds(budget))
    found = {"ms plain": f"{spread(times['plain']).median * 1e3:.2f}"}
    for way in ("guarded", "replay"):
        ratios = [t / plain for t, plain in zip(times[way], times["plain"], strict=True)]
        found[way] = with_quartiles(spread(ratios), 3)
        found[f"memory {way}"] = f"{peaks[way] / peaks['plain']:.3f}"
    found["MB plain"] = f"{peaks['plain'] / 1e6:.0f}"
    return found


def tensors() -> list[Tensor]:
    """All that Python holds, with what fxguard keeps."""
    found = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
    return [each for each in found if type(each) in (Tensor, nn.Parameter) and not each.is_sparse]


if __name__ == "__main__":
    sys.exit(main())
