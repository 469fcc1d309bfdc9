"""What ``fxguard run`` costs a script of small tensors.

    python benchmarks/scripts.py
    python benchmarks/scripts.py --cases tiny regression --budget 20

Each case runs in two processes at once, under Python and under ``fxguard run``, which take turns.
Times are of the processor, and ratios to Python. A case whose package is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from harness import machine
from harness.tables import table, with_quartiles
from harness.timing import spread

__all__ = ["main"]

Step = Callable[[], object]
SHORT = 0.02  # seconds that steps are timed together, at least
WARM_UP = 30


def tiny() -> Step:
    """Five operations on 16 numbers."""
    x = torch.linspace(1, 2, 16)

    def step() -> None:
        y = x * 2
        y = y + x
        y = y.sqrt()
        y = y - 1
        y.sum()

    return step


def regression() -> Step:
    """Logistic regression by hand, with SGD."""
    x, y = torch.randn(64, 8), torch.randint(0, 2, (64,)).float()
    w, b = torch.zeros(8, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w, b], 0.1)

    def step() -> None:
        p = torch.sigmoid(x @ w + b)
        loss = -(y * torch.log(p + 1e-7) + (1 - y) * torch.log(1 - p + 1e-7)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def classifier() -> Step:
    """A classifier of three layers on 64 samples, with cross-entropy and Adam."""
    layers = (nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    net, x, y = nn.Sequential(*layers), torch.randn(64, 32), torch.randint(0, 10, (64,))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)

    def step() -> None:
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def small_policy() -> tuple[nn.Module, Tensor]:
    """A network of three layers, and what it observes."""
    layers = (nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    return nn.Sequential(*layers), torch.randn(1, 8)


def policy() -> Step:
    """A small policy, an action that is drawn from it, and a step of REINFORCE."""
    net, observed = small_policy()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)

    def step() -> None:
        drawn = torch.distributions.Categorical(logits=net(observed))
        loss = -(drawn.log_prob(drawn.sample()) * 0.5).sum() - 0.01 * drawn.entropy().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def acting() -> Step:
    """The same policy, which only acts."""
    net, observed = small_policy()

    def step() -> None:
        with torch.no_grad():
            torch.distributions.Categorical(logits=net(observed)).sample().item()

    return step


def recurrent() -> Step:
    """1,000 steps of an LSTM cell that is written out."""
    inputs, weight = torch.randn(1000, 1, 8), torch.randn(40, 128) * 0.1

    def step() -> None:
        hidden, carried = torch.zeros(1, 32), torch.zeros(1, 32)
        for now in inputs:
            enter, keep, new, leave = (torch.cat([now, hidden], 1) @ weight).chunk(4, 1)
            carried = keep.sigmoid() * carried + enter.sigmoid() * new.tanh()
            hidden = leave.sigmoid() * carried.tanh()

    return step


def cell() -> Step:
    """1,000 calls of ``nn.LSTMCell``."""
    inputs, lstm = torch.randn(1000, 1, 8), nn.LSTMCell(8, 32)

    def step() -> None:
        state: tuple[Tensor, Tensor] | None = None
        with torch.no_grad():
            for now in inputs:
                state = lstm(now, state)

    return step


def solver() -> Step:
    """An adaptive solver of torchdiffeq, for an oscillator."""
    from torchdiffeq import odeint

    matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    start, times = torch.tensor([[2.0, 0.0]]), torch.linspace(0, 10, 50)
    return lambda: odeint(lambda t, y: y**3 @ matrix, start, times, method="dopri5")


def ppo() -> Step:
    """An iteration of PPO of stable-baselines3: 64 steps of CartPole, and an epoch."""
    from stable_baselines3 import PPO

    agent = PPO("MlpPolicy", "CartPole-v1", n_steps=64, n_epochs=1, device="cpu", seed=0)
    return lambda: agent.learn(64, reset_num_timesteps=False)


CASES: dict[str, tuple[Callable[[], Step], str]] = {  # and the package that it needs
    "tiny": (tiny, ""),
    "regression": (regression, ""),
    "classifier": (classifier, ""),
    "policy": (policy, ""),
    "acting": (acting, ""),
    "recurrent": (recurrent, ""),
    "cell": (cell, ""),
    "solver": (solver, "torchdiffeq"),
    "ppo": (ppo, "stable_baselines3"),
}


@dataclass
class Side:
    """A process that runs a case when it is told to."""

    words: Sequence[str]
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *self.words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, times: int) -> float:
        """Seconds of the processor that so many steps take."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(times, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{' '.join(self.words)} has ended")
        return float(answer)

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve(name: str, threads: int) -> None:
    """Run so many steps as a line says, and print what they took."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    step = CASES[name][0]()
    for line in sys.stdin:
        start = time.process_time()
        for _ in range(int(line)):
            step()
        print(time.process_time() - start, flush=True)


def measured(name: str, options: argparse.Namespace) -> dict[str, str]:
    """One line of the table."""
    words = [os.path.abspath(__file__), "--serve", name, "--threads", str(options.threads)]
    plain, watched = Side(words), Side(["-m", "fxguard", "run", *words])
    for side in plain, watched:
        side.ask(1)
    few = max(1, min(WARM_UP, round(1 / max(plain.ask(1), 1e-9))))
    for side in plain, watched:
        side.ask(few)
    times = max(1, round(SHORT / (plain.ask(few) / few)))
    alone, pairs, start = [], [], time.perf_counter()
    while len(pairs) < 5 or (time.perf_counter() - start < options.budget and len(pairs) < 300):
        first, second = plain.ask(times), watched.ask(times)
        alone.append(first)
        pairs.append(second / first)
    for side in plain, watched:
        side.close()
    return {
        "script": name,
        "µs plain": f"{spread(alone).median / times * 1e6:.1f}",
        "fxguard run": with_quartiles(spread(pairs), 2),
        "rounds": f"{len(pairs)}",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    options = parser().parse_args(arguments)
    if options.serve:
        serve(options.serve, options.threads)
        return 0
    torch.set_num_threads(options.threads)
    print(machine.title(machine.describe("cpu")), end="\n\n")
    names = [name for name in options.cases if is_there(CASES[name][1])]
    print(table([measured(name, options) for name in names]))
    return 0


def is_there(package: str) -> bool:
    """Whether a package is installed."""
    return not package or importlib.util.find_spec(package) is not None


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser("scripts.py", description=(__doc__ or "").split("\n")[0])
    add = found.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    add("--threads", type=int, default=1, help="of the CPU")
    add("--budget", type=float, default=10.0, help="seconds of rounds for each line")
    add("--serve", choices=CASES, help=argparse.SUPPRESS)
    return found


if __name__ == "__main__":
    sys.exit(main())
