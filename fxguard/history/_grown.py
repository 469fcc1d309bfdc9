"""What has grown for long before a jump: no step of it is out of its band."""

from __future__ import annotations

from torch import Tensor

from fxguard.history._first import RATE as LEARNING_RATE
from fxguard.history._lines import number
from fxguard.history._series import Series
from fxguard.history._watch import HUGE, TINY

__all__ = ["grown", "rate_that_grew"]

BLOCK = 16  # steps of which the mean is taken
LEAST = 6  # blocks
OCTAVES = 3.0  # that it has grown by, at least
RATE = 1 / 64  # octaves in a step, at least
QUICKLY = 64  # steps in which a learning rate ...
TIMES = 16.0  # ... has become so many times as large
STEADY = 0.3  # of the mean rise from block to block: the least


def rate_that_grew(
    series: list[Series], steps: list[int], table: Tensor, line: int
) -> tuple[str, str] | None:
    """A learning rate that has become 16 times as large in 64 steps, or more, and a sentence.

    Args:
        series: the columns.
        steps: of the lines.
        table: the numbers.
        line: in which something left its band.
    """
    for place, known in enumerate(series if line >= QUICKLY else ()):
        if known.kind == "setting" and known.what.startswith(LEARNING_RATE):
            numbers = table[line - QUICKLY : line + 1, place]
            before, now = float(numbers[0]), float(numbers[-1])
            if now >= TIMES * before > 0 and bool((numbers.diff() >= 0).all()):
                return known.what, (
                    f"{known.what} has grown from {number(before)} to {number(now)} in the "
                    f"{QUICKLY} steps up to step {steps[line]}"
                )
    return None


def grown(series: list[Series], steps: list[int], table: Tensor, line: int) -> list[str]:
    """The operation or setting that has grown most, and steadily, up to a line, as a sentence.

    Args:
        series: the columns.
        steps: of the lines.
        table: the numbers.
        line: in which something left its band.
    """
    count = line // BLOCK
    places = [at for at, known in enumerate(series) if known.kind in ("operation", "setting")]
    if count < LEAST or not places:
        return []
    begin = line - BLOCK * count
    octaves = table[begin:line, places].abs().log2().clamp(TINY, HUGE)
    blocks = octaves.reshape(count, BLOCK, len(places)).mean(dim=1)
    rise, rises = blocks[-1] - blocks[0], blocks.diff(dim=0)
    least = max(OCTAVES, RATE * BLOCK * (count - 1))
    is_steady = rises.amin(dim=0) >= STEADY * rise / (count - 1)
    found = (is_steady & (rise >= least)).nonzero().flatten().tolist()
    if not found:
        return []
    most = max(found, key=lambda at: float(rise[at]))
    known = series[places[most]]
    before, now = float(table[begin, places[most]]), float(table[line - 1, places[most]])
    what = " ".join(filter(None, (known.what + known.where, known.detail)))
    return [
        f"{what} has grown steadily, from {number(before)} in step {steps[begin]} to {number(now)} "
        f"in step {steps[line - 1]}"
    ]
