"""fxguard in other people's trainers, and the numbers that are handed to what draws them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

import fxguard
from fxguard.integrations import tensorboard

from ..folders import empty_folder
from ..records import Cases, Record, raised_by
from .forecasts import of_the_zoo
from .losses import LOSSES, Net

OPTIONS: dict[str, dict[str, Any]] = {
    "raise": {},
    "warn": {"on_detect": "warn"},
    "replay": {"replay": True},
    "modules": {"granularity": "module"},
}
NAMES = ("cnn", "lstm", "encoder", "twice", "in_place", "containers")


def cases() -> Cases:
    """The Trainer, Lightning, and a writer that keeps what it is told."""
    for title, options in OPTIONS.items():
        for step in (0, 1):
            yield f"trainer/{title}/{step}", functools.partial(trainer, step, options)
            yield f"lightning/{title}/{step}", functools.partial(lightning, step, options)
    for name in NAMES:
        yield f"ranges/{name}", functools.partial(ranges, name)
    for loss in LOSSES[::4]:
        yield f"verdict/{loss.__name__}", functools.partial(verdict, loss)


def trainer(step: int, options: dict[str, Any]) -> Record:
    """A Trainer whose model overflows in one step."""
    from transformers import PrinterCallback

    from fxguard.integrations.transformers import FxguardCallback
    from support import in_trainer

    with empty_folder() as folder:
        callback = FxguardCallback(**options)
        made = in_trainer.trainer(
            folder, in_trainer.pieces(), *in_trainer.overflowing(step), callback, max_steps=2
        )
        made.remove_callback(PrinterCallback)  # it prints how long it took

        def run() -> Record:
            made.train()
            return {}

        return raised_by(run)


def lightning(step: int, options: dict[str, Any]) -> Record:
    """A LightningModule whose loss goes wrong in one step."""
    from fxguard.integrations.lightning import FxguardCallback
    from support import in_lightning

    made = in_lightning.trainer(FxguardCallback(**options), limit_train_batches=2)

    def run() -> Record:
        made.fit(in_lightning.Model(fault=step, logs=False), in_lightning.data())
        return {}

    return raised_by(run)


class Writer:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def add_scalar(self, tag: str, number: float, step: int) -> None:
        self.told.append(f"{step} {tag} {number!r}")

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.told += [f"{step} {tag}", *text.splitlines()]


def ranges(name: str) -> Record:
    """The numbers of a batch, and of a trace."""
    model, args, kwargs = of_the_zoo(name)
    writer = Writer()
    with empty_folder() as folder:
        fxguard.instrument(model, trace_to=folder, trace_batch_nums=[0])
        model(*args, **kwargs)
        guard: Any = fxguard.guard_of(model)
        tensorboard.log_ranges(writer, guard.frames(), 3)
        fxguard.remove(model)
        for file in sorted(Path(folder).glob("*.jsonl")):
            tensorboard.log_trace(writer, fxguard.load_trace(file))
    return {"told": writer.told}


def verdict(loss: Any) -> Record:
    """What is written of a report."""
    torch.manual_seed(0)
    model, writer = Net(), Writer()
    x, target = torch.randn(5, 4), torch.randn(5, 4)

    def write(report: Any) -> None:
        tensorboard.log_report(writer, report, 7)

    with fxguard.watch(model, on_detect=write):
        loss(model(x), target).backward()
    return {"told": writer.told}
