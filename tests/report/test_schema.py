"""``report/schema.json`` describes every record that is written: real ones are held to it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import fxguard
from fxguard import testing, types
from fxguard.errors import UsageError
from fxguard.report import load
from support.needs import needs
from support.schema import FILE, SCHEMA, told


def test_it_is_a_schema() -> None:
    """Of JSON Schema's version 2020-12; each definition is used, or is a record of its own."""
    needs("jsonschema").Draft202012Validator.check_schema(SCHEMA)
    used = set(re.findall(r'"#/\$defs/(\w+)"', FILE.read_text(encoding="utf-8")))
    assert used == set(SCHEMA["$defs"])


@pytest.mark.parametrize(
    ("record", "left_out"),
    [
        (types.Source, set()),
        (types.Row, set()),
        (types.Fingerprint, set()),
        (types.Frame, set()),
        (types.Climb, set()),
        (types.Fix, set()),
        (types.Growth, set()),
        (types.Origin, set()),
        (types.Report, {"kept", "patcher"}),
        (types.ForecastRow, set()),
        (types.Forecast, {"frames", "planner"}),
        (types.PrecisionPlan, set()),
        (types.ErrorBudget, set()),
        (types.ErrorShare, set()),
        (types.Choice, set()),
        (types.SelfTest, set()),
        (types.Trace, set()),
        (types.TracedBatch, set()),
        (testing.Stability, set()),
        (testing.Deviation, set()),
        (testing.Overflow, set()),
        (types.Apart, set()),
    ],
)
def test_every_field_is_described(record: Any, left_out: set[str]) -> None:
    """A new field of a record fails here until the schema has it."""
    fields = {field.name for field in dataclasses.fields(record)}
    listed = set(SCHEMA["$defs"][record.__name__]["properties"])
    assert fields - left_out <= listed
    assert not left_out & listed


# Real records.


@functools.cache
def gallery() -> ModuleType:
    """docs/famous_nans.py."""
    path = Path(fxguard.__file__).parents[1] / "docs" / "famous_nans.py"
    spec = importlib.util.spec_from_file_location("famous_nans_of_the_schema", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def famous(name: str) -> types.Report:
    report: types.Report = gallery().report(name)
    return report


def of_a_step() -> types.Report:
    """An optimizer whose learning rate is infinite."""
    model, found = nn.Linear(2, 2), list[types.Report]()
    optimizer = torch.optim.SGD(model.parameters(), lr=float("inf"))
    with fxguard.watch(model, on_detect=found.append):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        model(torch.ones(1, 2))
    return found[0]


def of_an_underflow() -> types.Report:
    found = list[types.Report]()
    model = fxguard.instrument(Squares(), on_detect=found.append, underflow=0.5)
    model(torch.full((4,), 1e-30))
    return found[0]


class Squares(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def of_data() -> types.Report:
    found = list[types.Report]()
    fxguard.instrument(nn.Linear(2, 2), on_detect=found.append)(torch.full((1, 2), torch.nan))
    return found[0]


FAMOUS = (
    *("qk_before_scale", "distilbert_mask_row", "ce_all_ignored", "uninit_head", "ctc_short"),
    *("where_double", "fp16_grad_overflow"),
)


@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(functools.partial(famous, name), id=name) for name in FAMOUS),
        *(of_a_step, of_an_underflow, of_data),
    ],
)
def test_reports(make: Callable[[], types.Report]) -> None:
    """Of forward, backward, an optimizer, the data; with and without numbers."""
    record = json.loads(make().to_json())
    assert told("Report", record) == []
    assert told("", record) == []
    assert next(iter(record.items())) == ("fxguard_report", 1)


def half(x: float) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 2)), torch.full((3, 4), x)


def test_forecasts_and_plans() -> None:
    """With rows of forward and backward, and without any; the plan of each."""
    for size in (1.0, 1e6):
        model, x = half(size)
        forecast = fxguard.forecast(model, x, loss=lambda y: y.square().sum())
        assert bool(forecast.rows) == (size > 1)
        assert told("Forecast", forecast.to_dict() | json.loads(forecast.to_json())) == []
        plan = forecast.plan()
        assert told("PrecisionPlan", json.loads(plan.to_json())) == []
        assert told("", json.loads(plan.to_json())) == []


def test_error_budgets() -> None:
    """Of a dtype that holds the output, and of one that does not."""
    for size in (1.0, 1e6):
        model, x = half(size)
        budget = fxguard.error_budget(model, x, dtype="fp16", gradients=True)
        assert math.isinf(budget.error) == (size > 1)
        assert told("ErrorBudget", json.loads(budget.to_json())) == []
        assert told("", json.loads(budget.to_json())) == []


def test_comparisons_and_diffs() -> None:
    """Of models that agree, that differ, that return a NaN."""
    model, x = half(1.0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight[0, 0] += 1
    bad = copy.deepcopy(model)
    with torch.no_grad():
        bad[0].bias[0] = torch.nan
    for b in (model, other, bad, copy.deepcopy(model).half(), nn.Sequential(model, nn.ReLU())):
        found = fxguard.compare(model, b, x)
        assert told("Comparison", json.loads(found.to_json())) == []
        assert told("Diff", json.loads(found.ranges.to_json())) == []
        assert told("", json.loads(found.to_json())) == []


def test_self_tests() -> None:
    """Of graphs with and without operations between them."""
    torch.manual_seed(0)
    for model in (nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), Breaks()):
        fxguard.instrument(model)
        model(torch.ones(2, 4))
        found = fxguard.guard_of(model).selftest()
        record = json.loads(found.to_json())
        assert told("SelfTest", record) == []
        assert told("", record) == []
        assert record["passed"] is bool(found) is True
        assert bool(record["left_out"]) == isinstance(model, Breaks)


class Breaks(nn.Module):
    """A model that TorchDynamo cuts in two, with an operation between the graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return between_graphs(x.exp()).sqrt()


@torch.compiler.disable
def between_graphs(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_stabilities() -> None:
    """Stable, not stable by digits, and not stable by an infinity."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))

    def variance(x: torch.Tensor) -> torch.Tensor:
        return x.square().mean(-1) - x.mean(-1).square()

    found = [
        testing.numerically_stable(torch.sigmoid, x, gradients=True),
        testing.numerically_stable(variance, x + 100, dtype=torch.float32),
        testing.numerically_stable(torch.square, x + 1000),
    ]
    records = [json.loads(each.to_json()) for each in found]
    for record in records:
        assert told("Stability", record) == []
        assert told("", record) == []
    assert [record["stable"] for record in records] == [True, False, False]
    assert records[0]["first"] is None
    assert records[1]["first"]["title"] == "sub"
    assert records[2]["first"]["error"] == "inf"
    assert {each["phase"] for each in records[0]["deviations"]} == {"forward", "backward"}


def test_overflows() -> None:
    """The input as text, and the report of it."""
    strategy = testing.tensors(torch.float16, (4,), max_value=1e4)
    found = testing.find_overflow(torch.square, strategy, seed=0)
    assert found is not None
    record = json.loads(found.to_json())
    assert told("Overflow", record) == []
    assert told("", record) == []
    [line] = record["inputs"]
    assert line.startswith("inputs = torch.full((4,), ")
    assert record["report"]["origins"][0]["what"] == found.report.origins[0].what == "square"


def test_lines_of_traces(tmp_path: Path) -> None:
    """Of whole steps, healthy and not, with masks and fingerprints."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {"trace_batch_nums": [0, 1], "trace_to": tmp_path}
    with fxguard.watch(model, **options):
        for scale in (1.0, torch.inf):
            attention = model(torch.ones(2, 4) * scale)
            mask = torch.tensor([False, True, False, False])
            attention.masked_fill(mask, -torch.inf).softmax(-1).square().sum().backward()
            optimizer.step()
    [file] = tmp_path.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        assert told("", line) == []
    assert "fxguard_trace" in lines[0]
    names = {key for line in lines for key in line}
    assert {"plan", "batch", "later", "fingerprints", "masks"} <= names


def test_traces(tmp_path: Path) -> None:
    """The record of a trace holds what its file does, and is no trace file itself."""
    model = fxguard.instrument(Squares(), trace_batch_nums=[0, 1], trace_to=tmp_path)
    for scale in (1.0, 1e30):
        model(torch.full((4,), scale))
    [file] = tmp_path.iterdir()
    trace = fxguard.load_trace(file)
    record = json.loads(trace.to_json())
    assert told("Trace", record) == []
    assert told("", record) == []
    assert (record["healthy"], record["verdict"]) == (False, trace.verdict)
    [mul] = [frame for frame in record["batches"][1]["frames"] if frame["kind"] == "mul"]
    assert [row["abs_max"] for row in mul["rows"]] == [pytest.approx(1e30)] * 2 + ["inf"]
    assert mul["rows"][0]["fingerprint"]["count"] == 4
    (tmp_path / "record.jsonl").write_text(trace.to_json() + "\n")
    with pytest.raises(UsageError, match="the first line does not say that it is one"):
        fxguard.load_trace(tmp_path / "record.jsonl")


def test_a_field_too_many_or_too_few_is_refused() -> None:
    """The clean twin: the validator above would see one."""
    record = json.loads(of_data().to_json())
    record["origins"][0]["colour"] = "red"
    assert told("Report", record)
    del record["origins"][0]["colour"]
    assert told("Report", record) == []
    del record["origins"][0]["cause"]
    assert told("Report", record)
    record["origins"][0]["cause"] = "magic"
    assert told("Report", record)


def test_a_report_of_a_later_version_is_refused(tmp_path: Path) -> None:
    """Its fields may mean something else; one without a version is of a checkout before it."""
    record = json.loads(of_data().to_json())
    path = tmp_path / "report.json"
    path.write_text(json.dumps(record))
    assert json.loads(load.load_report(path).to_json()) == record
    path.write_text(json.dumps({**record, "fxguard_report": 2}))
    with pytest.raises(UsageError, match="schema 2, and this version reads 1"):
        load.load_report(path)
    path.write_text(json.dumps({k: v for k, v in record.items() if k != "fxguard_report"}))
    assert load.load_report(path).batch_number == 0
