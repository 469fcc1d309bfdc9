"""What fxguard costs where calling an operation takes longer than computing it.

    python benchmarks/small_forwards.py
    python benchmarks/small_forwards.py --cases policy cell --work forward --steps 100

A policy of four layers, an LSTM cell that a model calls in a loop, and a narrow Llama. Times are of
the processor, and ratios to the plain model, interleaved as in ``overhead.py``.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import fxguard
from harness import machine
from harness.cases import FORWARD, TRAINING, WARM_UP, call_of, repeated
from harness.models import MODELS, Inputs, Shape, with_own_code
from harness.quiet import quieten
from harness.tables import table, with_quartiles
from harness.timing import FirstCall, Rounds, first_call, interleaved, processor_clock, spread
from harness.tools import FXGUARD, PLAIN, REPLAY, TOOLS

__all__ = ["main"]

COMPARED = (PLAIN, "torch.compile eager", FXGUARD, REPLAY)
SHORT = 0.01  # seconds that calls are timed together, at least

NARROW = Shape(width=128, layers=2, batch=1, length=128)


class Policy(nn.Module):
    """Four layers, from what an agent observes to its actions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()),
            *(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """From [batch, 8] to [batch, 4]."""
        actions: Tensor = self.layers(x)
        return actions


class Recurrent(nn.Module):
    """A cell that Python calls once for each step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """From [steps, batch, 8] to [batch, 4]."""
        state = x.new_zeros(x.shape[1], 32), x.new_zeros(x.shape[1], 32)
        for now in x:
            state = self.cell(now, state)
        output: Tensor = self.head(state[0])
        return output


class OwnCell(nn.Module):
    """An LSTM cell written out: twelve operations a step."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(8 + 32, 4 * 32)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The next state."""
        hidden, carried = state
        enter, keep, new, leave = self.gates(torch.cat([x, hidden], -1)).chunk(4, -1)
        carried = keep.sigmoid() * carried + enter.sigmoid() * new.tanh()
        return leave.sigmoid() * carried.tanh(), carried


def policy(batch: int) -> tuple[nn.Module, Inputs]:
    """A policy, and what some agents observe."""
    return Policy(), {"x": torch.randn(batch, 8)}


def recurrent(cell: nn.Module, steps: int) -> tuple[nn.Module, Inputs]:
    """A cell in a loop, and a sequence."""
    return Recurrent(cell), {"x": torch.randn(steps, 1, 8)}


CASES: dict[str, Callable[[int], tuple[nn.Module, Inputs]]] = {
    "policy": lambda steps: policy(1),
    "policy, batch 64": lambda steps: policy(64),
    "cell": lambda steps: recurrent(nn.LSTMCell(8, 32), steps),
    "own cell": lambda steps: recurrent(OwnCell(), steps),
    "narrow Llama": lambda steps: MODELS["llama"].build(NARROW, torch.float32, "cpu"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table; the exit status is 1 when fxguard detects something."""
    options = parser().parse_args(arguments)
    quieten()
    torch.set_num_threads(options.threads)
    print(machine.title(machine.describe("cpu")), end="\n\n")
    rows = []
    for name in options.cases:
        for work in options.work:
            try:
                rows.append({"model": name, "work": work} | measured(name, work, options))
            except fxguard.NonFiniteError as error:
                print(f"fxguard stopped a healthy run: {error}", file=sys.stderr)
                return 1
    print(table(rows))
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser("small_forwards.py", description=(__doc__ or "").split("\n")[0])
    add = found.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    add("--work", nargs="+", choices=(FORWARD, TRAINING), default=[FORWARD, TRAINING])
    add("--steps", type=int, default=1000, help="of the cells")
    add("--threads", type=int, default=1, help="of the CPU")
    add("--budget", type=float, default=10.0, help="seconds of rounds for each line")
    return found


def measured(name: str, work: str, options: argparse.Namespace) -> dict[str, str]:
    """One line of the table."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = CASES[name](options.steps)
    model.train(work == TRAINING)
    calls: dict[str, Callable[[], None]] = {}
    first: dict[str, FirstCall] = {}
    for tool in COMPARED:
        run = TOOLS[tool].build(with_own_code(copy.deepcopy(model)), "eager")
        calls[tool] = call_of(run, inputs, work)
        first[tool] = first_call(calls[tool], "cpu")
        for _ in range(WARM_UP):
            calls[tool]()
    times = max(1, round(SHORT / processor_clock(calls[PLAIN])))
    together = {tool: repeated(call, times) for tool, call in calls.items()}
    taken = interleaved(together, processor_clock, Rounds(options.budget, most=1000))
    found = {"µs plain": f"{spread(taken[PLAIN]).median / times * 1e6:.0f}"}
    for tool in COMPARED[1:]:
        pairs = zip(taken[tool], taken[PLAIN], strict=True)
        found[tool] = with_quartiles(spread([own / plain for own, plain in pairs]), 3)
    for tool in COMPARED[1:3]:
        found[f"first call s, {tool}"] = f"{first[tool].cpu_s:.1f}"
    found["rounds"] = f"{len(taken[PLAIN])}"
    return found


if __name__ == "__main__":
    sys.exit(main())
