"""What the first call of a model takes: capturing it, and putting checks into what was captured.

    python benchmarks/first_call.py
    python benchmarks/first_call.py --models t5 nbeats --rounds 5 --size full

Each first call is one of a fresh process, and the ways take turns. What is given are medians of CPU
seconds on one thread, of a forward without gradients:

- ``torch.compile``: TorchDynamo alone, ``torch.compile(model, backend="eager")``.
- ``fxguard``: the model instrumented. It may be captured on another path, that of plain Python.
- ``in TorchDynamo`` and ``own part``: the same call taken apart, in another process in which a
  signal looks at the stack in each ms of CPU time. Its own are those moments in which the innermost
  function of fxguard or TorchDynamo is fxguard's, and all in which a mark is traced.

cs3darknet and Flux are measured where timm and diffusers are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import fxguard
from harness import machine
from harness.models import MLP, MODELS, SHAPES
from harness.quiet import quieten

COMPILE, FXGUARD, APART = "torch.compile", "fxguard", "apart"
PACKAGES = {"cs3darknet": "timm", "flux": "diffusers"}
OTHERS = ("nbeats", *PACKAGES)
OWN, TORCHDYNAMO = "own part", "in TorchDynamo"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parser().parse_args(arguments)
    if options.child:
        print(json.dumps(first_call(options.models[0], options.size, options.child)))
        return 0
    print(machine.title(machine.describe("cpu")), end="\n\n")
    print("| | torch.compile | fxguard | times | in TorchDynamo | own part | times |")
    print("|---|---|---|---|---|---|---|")
    for model in options.models:
        package = PACKAGES.get(model)
        if package and importlib.util.find_spec(package) is None:
            print(f"left out: {model}: {package} is not installed")
            continue
        rounds = [
            {way: in_child(model, options.size, way) for way in (COMPILE, FXGUARD, APART)}
            for _ in range(options.rounds)
        ]
        print(row(model, rounds), flush=True)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser("first_call.py", description=(__doc__ or "").partition("\n")[0])
    names = [name for name in MODELS if name != MLP] + list(OTHERS)
    found.add_argument("--models", nargs="+", choices=names, default=names, metavar="MODEL")
    found.add_argument("--size", choices=SHAPES, default="full", help="of the first five")
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--child", choices=(COMPILE, FXGUARD, APART), help=argparse.SUPPRESS)
    return found


def in_child(model: str, size: str, way: str) -> dict[str, float]:
    """CPU seconds of a first call in a process of its own, by name."""
    command = [sys.executable, __file__, "--models", model, "--size", size, "--child", way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{model}, {way}: {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(model: str, rounds: Sequence[dict[str, dict[str, float]]]) -> str:
    """The medians of a model, as a row of a table."""

    def median(way: str, name: str) -> float:
        return statistics.median(found[way][name] for found in rounds)

    plain, guarded = median(COMPILE, "seconds"), median(FXGUARD, "seconds")
    traced, own = median(APART, TORCHDYNAMO), median(APART, OWN)
    cells = (f"{plain:.2f} s", f"{guarded:.2f} s", f"{guarded / plain:.2f}")
    parts = (f"{traced:.2f} s", f"{own:.2f} s", f"{own / traced:.2f}")
    return " | ".join((f"| {model}", *cells, *parts)) + " |"


def first_call(model: str, size: str, way: str) -> dict[str, float]:
    """CPU seconds of the first call, and where they were spent if they are taken apart."""
    quieten()
    torch.set_num_threads(1)
    prepare = captured if way == COMPILE else fxguard.instrument
    prepare(Warm())(torch.ones(3))  # what is loaded and set up once
    module, arguments = build(model, size)
    guarded = prepare(module.eval())
    counts: Counter[str] = Counter()
    if way == APART:
        signal.signal(signal.SIGPROF, lambda _, frame: counts.update([place_of(frame)]))
        signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    start = time.process_time()
    with torch.no_grad():
        guarded(**arguments)
    seconds = time.process_time() - start
    signal.setitimer(signal.ITIMER_PROF, 0)
    share = seconds / max(counts.total(), 1)
    return {"seconds": seconds, **{name: counts[name] * share for name in (OWN, TORCHDYNAMO)}}


def captured(module: nn.Module) -> Any:
    """A module that TorchDynamo captures, and nothing else."""
    return torch.compile(module, backend="eager")


def place_of(frame: FrameType | None) -> str:
    """Who computes: fxguard, TorchDynamo, or the model itself."""
    innermost = ""
    while frame is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        if "/fxguard/" in file and "/benchmarks/" not in file:
            if frame.f_code.co_name == "_leave_mark":
                return OWN
            innermost = innermost or OWN
        elif "/torch/_dynamo/" in file:
            innermost = innermost or TORCHDYNAMO
        frame = frame.f_back
    return innermost


class Warm(nn.Module):
    """Two operations."""

    def forward(self, values: Tensor) -> Tensor:
        return values.sin() + 1


class Block(nn.Module):
    """A block of N-BEATS (Oreshkin et al., 2020), generic basis."""

    def __init__(self, width: int, past: int, future: int) -> None:
        super().__init__()
        sizes = [past, *[width] * 4]
        layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
        self.layers = nn.Sequential(*(layer for pair in layers for layer in pair))
        self.backcast = nn.Linear(width, past)
        self.forecast = nn.Linear(width, future)

    def forward(self, past: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layers(past)
        return self.backcast(hidden), self.forecast(hidden)


class NBeats(nn.Module):
    """N-BEATS: each block explains a part of a series, and hands on the rest."""

    def __init__(
        self, blocks: int = 30, width: int = 256, past: int = 60, future: int = 12
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, past, future) for _ in range(blocks))
        self.future = future

    def forward(self, past: Tensor) -> Tensor:
        forecast = past.new_zeros(past.shape[0], self.future)
        for block in self.blocks:
            explained, found = block(past)
            past = past - explained
            forecast = forecast + found
        return forecast


def build(model: str, size: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model and its inputs."""
    build_other: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
        "nbeats": lambda: (NBeats(), {"past": torch.randn(8, 60)}),
        "cs3darknet": cs3darknet,
        "flux": flux,
    }
    torch.manual_seed(0)
    if model in build_other:
        return build_other[model]()
    module, inputs = MODELS[model].build(SHAPES[size][model], torch.float32, "cpu")
    return module, dict(inputs)


def cs3darknet() -> tuple[nn.Module, dict[str, Any]]:
    """A convolutional network of timm."""
    import timm

    return timm.create_model("cs3darknet_m"), {"x": torch.randn(1, 3, 64, 64)}


def flux() -> tuple[nn.Module, dict[str, Any]]:
    """The transformer of Flux, small: 2 double and 4 single blocks."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    inputs = {
        "hidden_states": torch.randn(1, 16, 16),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.ones(1),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
        "guidance": None,
    }
    return model, inputs


if __name__ == "__main__":
    sys.exit(main())
