"""A history of a run with one event, for tests of what shows it."""

from __future__ import annotations

from pathlib import Path

import fxguard
from fxguard.history._series import Row, Series
from fxguard.history._writer import Writer
from fxguard.report.event import Event
from fxguard.types import History

EVENT = Event(
    12, "weights", "head.weight", "train.py:9", 1, ("head.weight is 8 times as large", "a \ud800")
)


def history_in(folder: Path) -> History:
    """Twenty steps of a loss."""
    writer = Writer(folder, about={})
    writer.register(Series("loss train.py:9", "loss", "loss", "train.py:9"))
    for step in range(20):
        writer.add(Row(step, [1.0], [1.0]))
    writer.event(EVENT)
    writer.close()
    return fxguard.load_history(folder)
