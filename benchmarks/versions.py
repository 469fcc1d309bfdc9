"""Whether this checkout of fxguard is as fast as another one: before a change, and after it.

    git worktree add ../before main~5
    python benchmarks/versions.py ../before

Two processes, one for each checkout, hold the same guarded models. In each round both run the same
model some slices of calls, in turns who is first, while the other process waits. The fastest slice
counts. A ratio is one of two such times of the same round: this checkout over the other. What is
given is the median of the ratios with their quartiles.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxguard
from harness.models import MLP, MODELS, SHAPES, with_own_code
from harness.quiet import quieten
from harness.timing import spread

HERE = Path(__file__).resolve()
SECONDS = 0.002  # of one slice, roughly: less than a scheduler leaves a process alone
SLICES = 100  # of one process in one round: the fastest counts, because other programs only add


class Broken(nn.Module):
    """Small operations, and a break of the graph at each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = torch.tanh(layer(x)) + 0.5
        return x


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and its inputs, the same in both processes."""
    torch.manual_seed(0)
    if name == "graph breaks":
        return Broken(), {"x": torch.rand(16, 64)}
    return MODELS[name].build(SHAPES["small"][name], torch.float32, "cpu")


def forward(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """A forward without gradients."""
    with torch.no_grad():
        model(**inputs)


def training(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """A forward and its backward."""
    output: Any = model(**inputs)
    loss: Tensor = output.sum() if isinstance(output, Tensor) else output.loss
    loss.backward()
    model.zero_grad(set_to_none=True)


Work = Callable[[nn.Module, dict[str, Tensor]], None]

# Name to model, work, options of `instrument`, and the backend that compiles it.
CASES: dict[str, tuple[str, Work, dict[str, Any], str]] = {
    "t5 forward": ("t5", forward, {}, ""),
    "t5 training": ("t5", training, {}, ""),
    "vit forward": ("vit", forward, {}, ""),
    "vit forward, replay": ("vit", forward, {"replay": True}, ""),
    "mlp forward": (MLP, forward, {}, ""),
    "graph breaks forward": ("graph breaks", forward, {}, ""),
    "vit forward, inductor": ("vit", forward, {}, "inductor"),
}


def worker() -> int:
    """Run what is asked for on standard input, and say how long it took."""
    quieten()
    torch.set_num_threads(1)
    calls: dict[str, Callable[[], None]] = {}
    print(fxguard.__file__, flush=True)
    for line in sys.stdin:
        name, _, count = line.strip().partition("\t")
        if name not in calls:
            kind, work, options, backend = CASES[name]
            model, inputs = built(kind)
            model = with_own_code(model)
            model.train(work is training)
            fxguard.instrument(model, **options)
            run = torch.compile(model, backend=backend) if backend else model
            calls[name] = lambda run=run, work=work, inputs=inputs: work(run, inputs)  # type: ignore[misc]
            for _ in range(5):
                calls[name]()
        print(min(timed(calls[name], int(count)) for _ in range(SLICES)), flush=True)
    return 0


def timed(call: Callable[[], None], count: int) -> float:
    """Seconds that a number of calls take."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start


class Checkout:
    """A process that holds guarded models of one checkout."""

    def __init__(self, root: Path) -> None:
        env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(root), str(HERE.parent)]))
        self.process = subprocess.Popen(
            [sys.executable, str(HERE), "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=root,
        )
        found = Path(self._line()).resolve()
        if root.resolve() not in found.parents:
            raise SystemExit(f"{root} is no checkout of fxguard: {found} was imported")

    def run(self, case: str, count: int) -> float:
        """Seconds that a number of calls took, in the fastest slice."""
        assert self.process.stdin is not None
        print(case, count, sep="\t", file=self.process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a process has ended: see above")
        return line.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and print a line for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("other", nargs="?", type=Path, help="the checkout to compare this one with")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return worker()
    if options.other is None:
        parser.error("which checkout is this one to be compared with?")
    this, other = Checkout(HERE.parents[1]), Checkout(options.other)
    print(f"{'case':24} {'ms before':>10} {'ms now':>10} {'ratio':>7}  quartiles")
    for case in options.cases:
        once = max(this.run(case, 1), other.run(case, 1))
        count = max(1, round(SECONDS / once))
        times = []
        for number in range(options.rounds):
            pair = [this, other] if number % 2 else [other, this]
            taken = {id(each): each.run(case, count) / count for each in pair}
            times.append((taken[id(this)], taken[id(other)]))
        ratio = spread([now / before for now, before in times])
        now, before = (spread([pair[i] for pair in times]).median * 1000 for i in (0, 1))
        quartiles = f"{ratio.q1:.3f} to {ratio.q3:.3f}"
        print(f"{case:24} {before:10.3f} {now:10.3f} {ratio.median:7.3f}  {quartiles}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
