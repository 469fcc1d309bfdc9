"""A million steps: how much room they take, and how long it is to write and to open them."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import pytest

from fxguard.history._series import Row, Series
from fxguard.history._writer import Writer
from fxguard.history.history import load_history
from support.needs import needs

needs("pyarrow")

MEGABYTE = 1e6
KINDS = 4_099  # different rows, so that what compresses them finds no step again


def size_of(folder: Path) -> float:
    """In megabytes."""
    return sum(file.stat().st_size for file in folder.iterdir()) / MEGABYTE


@pytest.mark.parametrize(
    ("steps", "count", "most"),
    [(20_000, 20, 3.0), pytest.param(1_000_000, 300, 100.0, marks=pytest.mark.campaign)],
)
def test_a_long_run_stays_small_and_opens_at_once(
    tmp_path: Path, steps: int, count: int, most: float
) -> None:
    """The spec allows 200 MB for a million steps of 300 series."""
    draw = Random(0).lognormvariate
    rows = [
        ([draw(-10, 0.3) for _ in range(count)], [draw(3, 0.1) for _ in range(count)])
        for _ in range(KINDS)
    ]
    writer = Writer(tmp_path, about={})
    for position in range(count):
        name = f"operation blocks.{position} matmul gpt.py:{position} #2"
        writer.register(Series(name, "operation", f"blocks.{position} matmul"))
    taken, longest, largest = 0.0, 0.0, 0.0
    for step in range(steps):
        row = Row(step, *rows[step * 7 % KINDS])
        begun = time.process_time()
        writer.add(row)
        just_taken = time.process_time() - begun
        taken, longest = taken + just_taken, max(longest, just_taken)
        if step % 4_096 == 4_090:
            largest = max(largest, size_of(tmp_path))
    writer.close()
    begun = time.process_time()
    history = load_history(tmp_path)
    opened = time.process_time() - begun
    tracks = [history.get(name) for name in history.series]
    read = time.process_time() - begun
    print(
        f"{steps} steps of {count} series: {size_of(tmp_path):.1f} MB, at most {largest:.1f} MB;"
        f" {taken / steps * 1e6:.0f} microseconds of CPU a row, {longest:.2f} s the longest;"
        f" opened in {opened * 1e3:.0f} ms, all read in {read:.1f} s"
    )
    assert largest < most
    assert history.steps == range(steps)
    for track in tracks:
        rows_of_it = zip(track.steps, track.last_steps, strict=True)
        assert sum(last + 1 - step for step, last in rows_of_it) == steps
    assert len(list(tmp_path.iterdir())) < 100
    assert opened < 1
