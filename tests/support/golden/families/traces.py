"""Traces in files: what stands in them, what is said of them, and where two of them part."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxguard
from support import zoo
from support.planting_differences import FAULTS, copy_with, weights_to_change, with_noise
from support.ways import AOT, EAGER, PYTHON

from ..folders import empty_folder
from ..records import Cases, Record, guarded, raised_by
from .losses import LOSSES, Net

NAMES = ("cnn", "lstm", "encoder", "twice", "in_place", "containers", "t5", "llama", "vit")
SMALL = NAMES[:5]


def cases() -> Cases:
    """Files of the zoo and of losses; differences between models, dtypes and batches."""
    for name in NAMES:
        yield f"file/{name}", functools.partial(file, name)
    for name in SMALL:
        for title, options in {
            AOT: {"way": AOT},
            PYTHON: {"way": PYTHON},
            "replay": {"replay": True},
            "modules": {"granularity": "module"},
        }.items():
            yield f"file/{name}/{title}", functools.partial(file, name, **options)
        for fault in FAULTS:
            yield f"diff/{name}/{fault}", functools.partial(parted, name, by_weight(fault))
        for dtype in ("float16", "bfloat16"):
            yield f"diff/{name}/{dtype}", functools.partial(parted, name, in_dtype(dtype))
        yield f"diff/{name}/same", functools.partial(parted, name, lambda model: model)
        yield (
            f"diff/{name}/tolerance",
            functools.partial(parted, name, in_dtype("bfloat16"), tolerance=0.5),
        )
        yield f"printed/{name}", functools.partial(printed, name)
    for place, loss in enumerate(LOSSES):
        yield f"steps/{loss.__name__}", functools.partial(of_steps, loss, detects=bool(place % 2))
    for name in ("cnn", "encoder"):
        yield f"page/{name}", functools.partial(pages, name)


def by_weight(fault: str) -> Callable[[nn.Module], nn.Module]:
    def change(model: nn.Module) -> nn.Module:
        weights = weights_to_change(model, fault)
        return copy_with(model, weights[len(weights) // 2], fault)

    return change


def in_dtype(dtype: str) -> Callable[[nn.Module], nn.Module]:
    return lambda model: model.to(getattr(torch, dtype))


def traced(model: nn.Module, name: str, folder: Path, way: str = EAGER, **options: Any) -> Record:
    """Write the first batch of a model into a folder."""
    entry = zoo.ZOO[name]
    dtype = next(model.parameters(), torch.zeros(())).dtype
    args, kwargs = entry.inputs(dtype, entry.has_mask)

    def call(called: Any) -> None:
        for _ in range(2):
            called(*args, **kwargs)

    options = {"trace_batch_nums": [1], "trace_to": folder, **options}
    return guarded(model, call, way=way, **options)


def file(name: str, **options: Any) -> Record:
    """The lines of a file, and the trace that is read from it."""
    with empty_folder() as folder:
        record = traced(zoo.ZOO[name].model(), name, folder, **options)
        return {**record, **read(folder)}


def read(folder: Path) -> Record:
    """All that is known from the files in a folder."""
    found: Record = {}
    for path in sorted(folder.glob("*.jsonl")):
        trace = fxguard.load_trace(path)
        found[path.name] = {
            "lines": path.read_text("utf-8").splitlines(),
            "verdict": trace.verdict,
            "frames": [repr(frame) for batch in trace.batches for frame in batch.frames],
        }
    return {"files": found}


def parted(name: str, change: Callable[[nn.Module], nn.Module], **options: Any) -> Record:
    """Where the traces of a model and of a changed one part."""
    with empty_folder() as folder:
        model = with_noise(zoo.ZOO[name].model())
        traced(model, name, folder / "a")
        traced(change(model), name, folder / "b")
        a, b = (*folder.glob("a/*.jsonl"), *folder.glob("b/*.jsonl"))
        found = fxguard.diff(a, b, **options)
        return {"text": str(found), "dict": found.to_dict(), "table": found.to_table()}


def printed(name: str) -> Record:
    """The text of a traced batch on the terminal."""
    entry = zoo.ZOO[name]
    args, kwargs = entry.inputs(torch.float32, entry.has_mask)
    options: dict[str, Any] = {"trace_batch_nums": [0], "abort_after_batch_num": 0}
    return guarded(entry.model(), lambda model: model(*args, **kwargs), **options)


def of_steps(loss: Callable[[Tensor, Tensor], Tensor], detects: bool) -> Record:
    """The files of two steps: with their losses, backward passes and optimizer's steps."""
    torch.manual_seed(0)
    model = Net()
    x, target = torch.randn(5, 4), torch.randn(5, 4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with empty_folder() as folder:
        options: dict[str, Any] = {} if detects else {"trace_batch_nums": [0, 1]}

        def run() -> Record:
            with fxguard.watch(model, trace_to=folder, on_detect="warn", **options):
                for _ in range(2):
                    optimizer.zero_grad()
                    loss(model(x), target).backward()
                    optimizer.step()
            return {}

        return {**raised_by(run), **read(folder)}


def pages(name: str) -> Record:
    """What notebooks show of a trace, a difference and a report."""
    with empty_folder() as folder:
        model = with_noise(zoo.ZOO[name].model())
        traced(model, name, folder / "a")
        traced(model.bfloat16(), name, folder / "b")
        a, b = map(fxguard.load_trace, (*folder.glob("a/*.jsonl"), *folder.glob("b/*.jsonl")))
        found = fxguard.diff(a, b)
        return {"trace": a._repr_html_(), "diff": found._repr_html_()}
