"""What the options of ``instrument`` change, and what a guard answers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import fxguard
from support import zoo
from support.models import Checkpointed
from support.ways import AOT, PYTHON

from ..records import Cases, Record, guarded, of_reports, raised_by
from .forecasts import gated


class Two(nn.Module):
    """Two operations go wrong, others read their results, and one is read by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        unread = (x * 0).log()
        left = (self.first(x) * 1e3).exp()
        right = self.second(x) / (x - x)
        return left * 2, right + torch.where(unread < 0, 0.0, unread)


class Raises(Two):
    """The forward itself raises after something went wrong."""

    def forward(self, x: Tensor) -> Any:
        left, _ = super().forward(x)
        if not bool(left.isfinite().all()):
            raise RuntimeError("the loss is not finite")
        return left


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "raise": {"on_detect": "raise"},
    "warn": {"on_detect": "warn"},
    "3 frames": {"max_frames_to_save": 3},
    "1 frame, raise": {"max_frames_to_save": 1, "on_detect": "raise"},
    "modules": {"granularity": "module"},
    "modules, raise": {"granularity": "module", "on_detect": "raise"},
    "strict": {"strict": True},
    "strict, raise": {"strict": True, "on_detect": "raise"},
    "replay": {"replay": True},
    "replay, raise": {"replay": True, "on_detect": "raise"},
    "no backward": {"backward": False},
    "ignore log": {"ignore": ["*:log"]},
    "ignore first": {"ignore": ["first"]},
    "ignore exp and div": {"ignore": ["*:exp", "*:div"]},
    "ignore nothing": {"ignore": ["third.*"]},
    "trace": {"trace_batch_nums": [0]},
    "trace and abort": {"trace_batch_nums": [1], "abort_after_batch_num": 1},
    "abort": {"abort_after_batch_num": 0},
    "loss scale": {"loss_scale": 1024.0},
    "a wrong option": {"max_frames_to_save": 0},
    "a wrong glob": {"ignore": "first"},
    "strict and replay": {"strict": True, "replay": True},
}
MODELS = {"two": Two, "raises": Raises, "checkpointed": Checkpointed}


def cases() -> Cases:
    """Each option with models that go wrong; self-tests; the class of transformers."""
    for title, options in OPTIONS.items():
        for name, make in MODELS.items():
            yield f"{name}/{title}", functools.partial(called, make, **options)
    for way in (AOT, PYTHON):
        for name, make in MODELS.items():
            yield f"{name}/{way}", functools.partial(called, make, way=way)
    for name in zoo.ZOO:
        yield f"selftest/{name}", functools.partial(selftest, name)
        yield f"debug/{name}", functools.partial(drop_in, name)
    for name in ("cnn", "twice", "encoder", "in_place"):
        yield f"selftest/{name}/aot", functools.partial(selftest, name, AOT)
        yield f"inserted/{name}", functools.partial(inserted, name)
        yield f"backend/{name}", functools.partial(by_backend, name)
    for name in ("cnn", "lstm", "t5"):
        yield f"shown/{name}", functools.partial(shown, name)


def called(make: Any, **options: Any) -> Record:
    """Four batches, the second and the third of them with zeros, and a backward each."""
    torch.manual_seed(0)
    model = make()

    def call(called: Any) -> None:
        for scale in (1.0, 0.0, 0.0, 100.0):
            output = called(torch.ones(2, 4) * scale)
            torch.as_tensor(sum(x.sum() for x in zoo.tensors_in(output))).backward()

    return guarded(model, call, **options)


def selftest(name: str, way: str | None = None) -> Record:
    """Faults in every measured value of a model."""
    entry = zoo.ZOO[name]
    args, kwargs = entry.inputs(torch.float32, entry.has_mask)
    model = fxguard.instrument(entry.model())
    called = model if way is None else torch.compile(model, backend=way)
    called(*args, **kwargs)
    guard = fxguard.guard_of(model)
    assert guard is not None
    try:
        return {"text": str(guard.selftest()), "coverage": guard.coverage(), "guard": repr(guard)}
    finally:
        fxguard.remove(model)


def drop_in(name: str) -> Record:
    """The class of transformers, on a model with an infinite weight."""
    entry = zoo.ZOO[name]
    args, kwargs = entry.inputs(torch.float32, False)
    model = entry.model()
    weights = list(model.parameters())
    with torch.no_grad():
        for weight in weights[-1:]:
            weight.view(-1)[0] = torch.inf
    fxguard.DebugUnderflowOverflow(model, max_frames_to_save=8)

    def run() -> Record:
        model(*args, **kwargs)
        return {}

    try:
        return raised_by(run)
    finally:
        fxguard.remove(model)


def inserted(name: str) -> Record:
    """A graph of the user's own with checks, and its frames."""
    entry = zoo.ZOO[name]
    args, kwargs = entry.inputs(torch.float32, False)
    graph = torch.export.export(entry.model(), args, kwargs).module()
    checked, plan = fxguard.insert_checks(graph)
    _, statistics = checked(*args, **kwargs)
    found = fxguard.frames_of(plan, statistics)
    return {"code": checked.code, "frames": [repr(frame) for frame in found]}


def by_backend(name: str) -> Record:
    """``torch.compile(backend=fxguard.backend(...))``."""
    entry = zoo.ZOO[name]
    args, kwargs = entry.inputs(torch.float32, False)
    reports: list[fxguard.types.Report] = []
    model = entry.model()
    with torch.no_grad():
        next(iter(model.parameters())).view(-1)[0] = torch.nan
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=fxguard.backend("eager", on_detect=reports.append))
    compiled(*args, **kwargs)
    return of_reports(reports)


def shown(name: str) -> Record:
    """What notebooks and tables show of a report and of a forecast."""
    entry = zoo.ZOO[name]
    args, kwargs = entry.inputs(torch.float32, False)
    reports: list[fxguard.types.Report] = []
    model = entry.model()
    with torch.no_grad():
        list(model.parameters())[-1].view(-1)[0] = torch.inf
    fxguard.instrument(model, on_detect=reports.append)
    model(*args, **kwargs)
    fxguard.remove(model)
    forecast = fxguard.forecast(gated(3e4)[0], gated(3e4)[1][0])
    return {
        "table": reports[0].to_table(),
        "html": reports[0]._repr_html_(),
        "forecast": forecast._repr_html_(),
    }
