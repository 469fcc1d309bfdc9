"""Time: rounds in which everything runs once, and what can be said of their ratios."""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "FirstCall",
    "Rounds",
    "Spread",
    "clock_of",
    "first_call",
    "geometric_mean",
    "interleaved",
    "processor_clock",
    "spread",
]

Call = Callable[[], object]
Clock = Callable[[Call], float]


@dataclass(frozen=True, slots=True)
class Spread:
    """Quartiles of repeated measurements."""

    q1: float
    median: float
    q3: float

    def scaled(self, factor: float) -> Spread:
        """The same in another unit."""
        return Spread(self.q1 * factor, self.median * factor, self.q3 * factor)


def spread(values: Sequence[float]) -> Spread:
    """The quartiles of one value or more."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def geometric_mean(values: Iterable[float]) -> float:
    """The mean of ratios."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def cpu_clock(call: Call) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def processor_clock(call: Call) -> float:
    """Seconds of all cores that a call takes, which other programs disturb less."""
    start = time.process_time()
    call()
    return time.process_time() - start


def cuda_clock(call: Call) -> float:
    """Seconds between the call's first and last work on the device, waiting in between included."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def clock_of(device: str) -> Clock:
    """The clock for a device."""
    return cuda_clock if device == "cuda" else cpu_clock


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often a case is measured.

    Attributes:
        seconds: rounds go on for so long.
        least: fewest rounds.
        most: most rounds.
    """

    seconds: float = 20.0
    least: int = 5
    most: int = 300


def interleaved(calls: Mapping[str, Call], clock: Clock, rounds: Rounds) -> dict[str, list[float]]:
    """Time calls side by side: each round runs every call once, in a new random order.

    What else the machine does, its temperature and its clock rate then weigh on all of them
    alike, and the ratio of two times of one round is a fair one.

    Returns:
        For each call its seconds, one for each round.
    """
    shuffle = random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    start = time.perf_counter()
    for done in range(rounds.most):
        if done >= rounds.least and time.perf_counter() - start > rounds.seconds:
            break
        shuffle(order)
        for name in order:
            times[name].append(clock(calls[name]))
    return times


@dataclass(frozen=True, slots=True)
class FirstCall:
    """What a first call took, capturing and compiling included.

    Attributes:
        wall_s: seconds that the user waits.
        cpu_s: seconds of all cores, compilers that were started included.
    """

    wall_s: float
    cpu_s: float


def cpu_seconds() -> float:
    usage = os.times()
    return usage.user + usage.system + usage.children_user + usage.children_system


def first_call(call: Call, device: str) -> FirstCall:
    """Time a call once."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return FirstCall(time.perf_counter() - wall, cpu_seconds() - cpu)
