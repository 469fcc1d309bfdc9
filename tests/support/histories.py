"""Histories of training runs that nobody has trained, for tests of what is shown of them."""

from __future__ import annotations

import math
import random
from pathlib import Path

from fxguard.history._open_step import ORDER
from fxguard.history._series import Row, Series
from fxguard.history._writer import Writer
from fxguard.report.event import Event

__all__ = ["BLOCKS", "CAUSE", "EVENT", "LOSS", "series_of", "write_history"]

BLOCKS = 3
CAUSE = "blocks.1.norm.weight"  # is written by something else than the optimizer
LOSS = "loss loss train.py:31"
OPERATIONS = ("layer_norm", "linear", "softmax", "matmul", "add")


def series_of(blocks: int = BLOCKS) -> list[Series]:
    """Those of a model of some blocks, in order of execution."""
    found: list[Series] = []

    def add(kind: str, what: str, source: str = "", detail: str = "") -> None:
        name = " ".join(filter(None, (kind, what, source, detail)))
        order = ORDER[kind] + len(found)
        found.append(Series(name, kind, what, source, order, detail))  # type: ignore[arg-type]

    weights = [f"blocks.{i}.{name}.weight" for i in range(blocks) for name in ("norm", "linear")]
    for weight in weights:
        add("drift", weight)
        add("weight", weight)
    for detail in ("largest", "mean", "share of zeros"):
        add("input", "input x", detail=detail)
    for i in range(blocks):
        for line, operation in enumerate(OPERATIONS):
            add("operation", f"blocks.{i} {operation}", f"model.py:{20 + line}")
    add("loss", "loss", "train.py:31")
    for weight in reversed(weights):
        add("gradient", weight)
    add("setting", "learning rate of AdamW's step")
    for weight in weights:
        add("step", weight)
    add("time", "seconds")
    return found


EVENT = Event(
    0,
    "weights",
    CAUSE,
    "train.py:40",
    lead=1,
    evidence=(f"{CAUSE} is 30 times as large as in the step before",),
    tried=("the batch before gives 11.3 with these weights: it is not the batch",),
)


def write_history(
    folder: Path,
    steps: int,
    *,
    jump: int | None = None,
    blocks: int = BLOCKS,
    seed: int = 0,
    rank: int = 0,
    first: int = 0,
) -> Path:
    """A run whose loss falls; at one step a weight is written, and the loss jumps behind it."""
    writer = Writer(folder, rank=rank, about={"script": "train.py"})
    series = series_of(blocks)
    for one in series:
        writer.register(one)
    drawn = random.Random(seed)
    bases = [drawn.gauss(0, 3) for _ in series]
    begin = max(first, writer.next_step)
    for step in range(begin, begin + steps):
        after = -1 if jump is None else step - jump
        low, high = [], []
        for one, base in zip(series, bases, strict=True):
            value = _number(one, base, step, after, drawn)
            high.append(value)
            low.append(value / 2 ** abs(drawn.gauss(8, 1)) if one.kind == "operation" else value)
        writer.add(Row(step, low, high))
    if jump is not None:
        event = Event(jump, *(getattr(EVENT, name) for name in EVENT.__slots__[1:]))
        writer.event(event)
    writer.close()
    return folder


def _number(one: Series, base: float, step: int, after: int, drawn: random.Random) -> float:
    noise = 2 ** drawn.gauss(0, 0.15)
    decay = math.exp(-after / 60) if after >= 0 else 0.0
    if one.kind == "drift":
        return 31.0 if after == 0 and one.what == CAUSE else 0.0
    if one.kind == "weight":
        return 8.0 * (1 + step / 5000) * 2 ** (5 * decay * (one.what == CAUSE))
    if one.kind == "loss":
        decay = decay if after > 0 else 0.0
        return (2 + 8 * math.exp(-step / 200)) * 2 ** (drawn.gauss(0, 0.05) + 2.5 * decay)
    if one.detail == "mean":
        return drawn.gauss(0, 0.05)
    if one.detail == "share of zeros":
        return 0.02 + 0.01 * drawn.random()
    if one.kind == "setting":
        return 3e-4 * min(1.0, (step + 1) / 50)
    is_behind = one.kind in ("gradient", "step") or one.what[:8] in ("blocks.1", "blocks.2")
    return 2.0 ** (base + 3.5 * decay * is_behind) * noise
