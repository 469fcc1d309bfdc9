"""Backends, graphs of one's own, the class of transformers, self-tests, pages, helpers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fxguard
from support import zoo
from support.ways import AOT

from ..folders import empty_folder
from ..records import Cases, Record, of_reports, raised_by
from .forecasts import gated
from .options import Two

SMALL = ("cnn", "lstm", "encoder", "twice", "in_place", "containers")
EXPORTED = ("cnn", "lstm", "twice", "in_place", "t5", "vit", "resnet")
TRACED = ("cnn", "lstm", "twice", "containers")


def cases() -> Cases:
    """Models of the zoo, and tensors of every kind."""
    for name in zoo.ZOO:
        yield f"selftest/{name}", functools.partial(selftest, name)
        yield f"debug/{name}", functools.partial(drop_in, name)
    for name in SMALL:
        yield f"selftest/{name}/aot", functools.partial(selftest, name, AOT)
        yield f"selftest/{name}/train", functools.partial(selftest, name, train=True)
        yield f"debug/{name}/trace", functools.partial(drop_in, name, trace_batch_nums=[0])
        yield f"debug/{name}/abort", functools.partial(drop_in, name, abort_after_batch_num=0)
        for where in ("weight", "input"):
            yield f"backend/{name}/{where}", functools.partial(by_backend, name, where)
        yield f"page/{name}", functools.partial(page, name)
    for name in EXPORTED:
        yield f"exported/{name}", functools.partial(inserted, name, exported)
    for name in TRACED:
        yield f"traced/{name}", functools.partial(inserted, name, symbolically_traced)
    for kind in TENSORS:
        yield f"tensor/{kind}", functools.partial(helpers, kind)
    for act in (twice, of_nothing, removed, labelled, copied, forecast_page, reused, a_function):
        yield f"act/{act.__name__}", act


def called(name: str, dtype: torch.dtype = torch.float32) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a model of the zoo."""
    return zoo.ZOO[name].inputs(dtype, False)


def spoilt(name: str) -> nn.Module:
    """A model of the zoo with an infinite weight."""
    model = zoo.ZOO[name].model()
    with torch.no_grad():
        for weight in list(model.parameters())[-1:]:
            weight.view(-1)[0] = torch.inf
    return model


def selftest(name: str, way: str | None = None, train: bool = False) -> Record:
    """Faults in every measured value of a model."""
    args, kwargs = called(name)
    model = fxguard.instrument(zoo.ZOO[name].model(train=train))
    run = model if way is None else torch.compile(model, backend=way)
    run(*args, **kwargs)
    guard: Any = fxguard.guard_of(model)
    try:
        return {"text": str(guard.selftest()), "coverage": guard.coverage(), "guard": repr(guard)}
    finally:
        fxguard.remove(model)


def drop_in(name: str, **options: Any) -> Record:
    """The class of transformers, on a model with an infinite weight."""
    args, kwargs = called(name)
    model = spoilt(name)
    fxguard.DebugUnderflowOverflow(model, max_frames_to_save=8, **options)

    def run() -> Record:
        model(*args, **kwargs)
        return {}

    try:
        return raised_by(run)
    finally:
        fxguard.remove(model)


def exported(name: str) -> Any:
    args, kwargs = called(name)
    return torch.export.export(zoo.ZOO[name].model(), args, kwargs).module()


def symbolically_traced(name: str) -> Any:
    return torch.fx.symbolic_trace(zoo.ZOO[name].model())


def inserted(name: str, make: Callable[[str], Any]) -> Record:
    """A graph of the user's own with checks, and its frames."""
    args, kwargs = called(name)
    checked, plan = fxguard.insert_checks(make(name))
    _, statistics = checked(*args, **kwargs)
    found = fxguard.frames_of(plan, statistics)
    return {"code": checked.code, "plan": repr(plan), "frames": [repr(each) for each in found]}


def by_backend(name: str, where: str) -> Record:
    """``torch.compile(backend=fxguard.backend(...))``, with a bad weight or a bad input."""
    args, kwargs = called(name)
    reports: list[fxguard.types.Report] = []
    model = spoilt(name) if where == "weight" else zoo.ZOO[name].model()
    if where == "input":
        args[0].view(-1)[0] = torch.nan
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=fxguard.backend("eager", on_detect=reports.append))
    compiled(*args, **kwargs)
    return of_reports(reports)


def page(name: str) -> Record:
    """What tables, notebooks and files show of a report."""
    args, kwargs = called(name)
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(spoilt(name), on_detect=reports.append)
    model(*args, **kwargs)
    fxguard.remove(model)
    if not reports:
        return {}
    with empty_folder() as folder:
        reports[0].to_html(folder / "report.html")
        written = (folder / "report.html").read_text("utf-8").splitlines()
    return {
        "table": reports[0].to_table(),
        "html": reports[0]._repr_html_(),
        "page": [line for line in written if len(line) < 100_000],
        "advice": reports[0].advice,
    }


TENSORS: dict[str, Callable[[], Tensor]] = {
    "float32": lambda: torch.tensor([1.0, -2.0, 0.0]),
    "nan": lambda: torch.tensor([1.0, torch.nan]),
    "inf": lambda: torch.tensor([1.0, -torch.inf]),
    "both": lambda: torch.tensor([torch.nan, torch.inf]),
    "float16": lambda: torch.tensor([6e4, 1e-7]).half(),
    "bfloat16": lambda: torch.tensor([3e38, 1e-30]).bfloat16(),
    "float8": lambda: torch.tensor([448.0, 1.0]).to(torch.float8_e4m3fn),
    "integers": lambda: torch.tensor([3, -4]),
    "booleans": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.tensor([3 + 4j, 1j]),
    "empty": lambda: torch.zeros(0),
    "scalar": lambda: torch.tensor(2.0),
    "meta": lambda: torch.zeros(2, device="meta"),
    "sparse": lambda: torch.tensor([[0.0, 5.0]]).to_sparse(),
    "strided": lambda: torch.arange(12.0).view(3, 4).t()[::2],
}


def helpers(kind: str) -> Record:
    """The two manual helpers, and the row of a model that is given such a tensor."""
    tensor = TENSORS[kind]()
    found = raised_by(lambda: {"overflow": fxguard.detect_overflow(tensor, kind)})
    text = raised_by(lambda: {"text": fxguard.get_abs_min_max(tensor, kind)})
    return {"found": found, "row": text}


# Single acts.


def twice() -> Record:
    model = fxguard.instrument(Two())
    return raised_by(lambda: {"returned": str(fxguard.instrument(model))})


def of_nothing() -> Record:
    model = Two()
    found = raised_by(lambda: {"returned": str(fxguard.remove(model))})
    return {"guard": str(fxguard.guard_of(model)), "removed": found}


def removed() -> Record:
    model = fxguard.instrument(Two())
    guard: Any = fxguard.guard_of(model)
    fxguard.remove(model)
    return {"guard": repr(guard), "coverage": raised_by(lambda: {"text": guard.coverage()})}


class Labels(nn.Module):
    """Names a value in the middle of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 1e30
        fxguard.detect_overflow(hidden, "after the scale")
        return hidden * hidden


def labelled() -> Record:
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(Labels(), on_detect=reports.append)
    model(torch.ones(2))
    return of_reports(reports, model)


def copied() -> Record:
    reports: list[fxguard.types.Report] = []
    torch.manual_seed(0)
    model = fxguard.instrument(Two(), on_detect=reports.append)
    other = copy.deepcopy(model)
    other(torch.zeros(2, 4))
    return of_reports(reports, other)


def forecast_page() -> Record:
    model, args, _ = gated(3e4)
    found = fxguard.forecast(model, *args)
    return {"html": found._repr_html_(), "table": found.to_table("plain", most=1)}


def reused() -> Record:
    """Instrumented, removed, instrumented again, with another batch in between."""
    reports: list[fxguard.types.Report] = []
    torch.manual_seed(0)
    model = Two()
    for _ in range(2):
        fxguard.instrument(model, on_detect=reports.append)
        model(torch.zeros(2, 4))
        fxguard.remove(model)
        model(torch.zeros(2, 4))
    return of_reports(reports)


def a_function() -> Record:
    reports: list[fxguard.types.Report] = []

    @functools.partial(fxguard.instrument, on_detect=reports.append)
    def logarithm(x: Tensor) -> Tensor:
        return (x - x).log()

    logarithm(torch.ones(2))
    return of_reports(reports)
