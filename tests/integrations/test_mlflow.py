"""Ranges, verdicts and pages in MLflow: read back from its stores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fxguard
from fxguard.integrations.mlflow import log_history, log_ranges, log_report, log_trace
from fxguard.report.display import page_of
from fxguard.types import Frame, Row, Trace, TracedBatch
from support.needs import needs
from support.small_history import EVENT, history_in
from support.split_twice import frames
from support.t5_overflow import BLOCK, REPORT

mlflow = needs("mlflow")


@pytest.fixture(scope="module", params=["file", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mlflow")
    if request.param == "sqlite":
        needs("alembic")  # and SQLAlchemy, with which MLflow makes a database
        return f"sqlite:///{folder / 'store.db'}"
    return (folder / "store").as_uri()


@pytest.fixture
def run(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    artifacts = (tmp_path / "artifacts").as_uri()
    experiment = mlflow.create_experiment(tmp_path.name, artifact_location=artifacts)
    with mlflow.start_run(experiment_id=experiment) as run:
        yield run


def metrics(run: Any) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of each metric."""
    client = mlflow.MlflowClient()
    names = client.get_run(run.info.run_id).data.metrics
    return {
        name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
        for name in names
    }


def artifact(run: Any, name: str) -> str:
    path = mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path=name)
    return Path(path).read_text(encoding="utf-8")


def test_a_training_loop(run: Any) -> None:
    """The numbers of chosen operations at their steps; a database keeps inf as its largest."""
    for step, value in enumerate([1.0, math.inf, math.nan]):
        assert log_ranges(run, frames(value), step, "first:split") == 6
    found = metrics(run)
    assert found.keys() == {
        f"{kind}/first split{end}"
        for kind in ("abs max", "abs min")
        for end in ("", " 2", " output_1")
    }
    assert found["abs min/first split output_1"] == [(0, 0.25), (1, 0.25), (2, 0.25)]
    (_, first), (_, second), (_, third) = found["abs max/first split 2"]
    assert first == 4
    assert second > 1e308
    assert math.isnan(third) or third == 0


def test_names_that_mlflow_does_not_take(run: Any) -> None:
    """Whatever a module or an output is called, and however long; each has its own metric."""
    rows = [Row(f"output[{each!r}]", 0.0, 1.0) for each in ("a/../b", "a b", "a:b", "ü", "<i>")]
    same = [
        Row("output[a]", 0.0, 1.0),
        Row("output['a']", 0.0, 2.0),
        Row("output[\ud800]", 0.0, 3.0),
    ]
    deep = Frame("layer." * 60, "<lambda>", True, (Row("output", 0.0, 1.0),))
    given = (Frame("/x/", "mul", True, (*rows, *same)), deep, deep)
    assert log_ranges(run, given, 0) == 2 * (len(rows) + len(same) + 2)
    found = metrics(run)
    assert len(found) == 2 * (len(rows) + len(same) + 2)
    assert found["abs max/_x_ mul output_a"] == [(0, 1.0)]
    assert found["abs max/_x_ mul output_a b_"] == [(0, 1.0)]


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)  # files take a minute
def test_more_than_mlflow_takes_at_once(run: Any) -> None:
    """A thousand outputs in one step: more than one request may hold, to any store."""
    many = tuple(Frame(f"layers.{i}", "mul", True, (Row("output", 0.0, i),)) for i in range(1001))
    assert log_ranges(run, many, 3) == 2002
    found = metrics(run)
    assert len(found) == 2002
    assert found["abs max/layers.1000 mul"] == [(3, 1000.0)]


def test_a_report(run: Any, tmp_path: Path) -> None:
    """The verdict line by line, the page as ``to_html`` writes it, and a tag to search for."""
    log_report(run, REPORT, 7)
    assert artifact(run, "fxguard/7/verdict.txt").splitlines() == REPORT.verdict
    REPORT.to_html(tmp_path / "page.html")
    assert artifact(run, "fxguard/7/page.html") == (tmp_path / "page.html").read_text("utf-8")
    assert mlflow.MlflowClient().get_run(run.info.run_id).data.tags["fxguard"] == REPORT.one_line


@pytest.mark.parametrize("rank", [None, 3])
def test_a_trace(run: Any, rank: int | None, tmp_path: Path) -> None:
    """Every batch at its number, the verdict of the one that has it, and the page of the trace."""
    batches = (
        TracedBatch(6, REPORT.frames[:1]),
        TracedBatch(7, REPORT.frames, None, (*REPORT.verdict, "half a pair: \ud800")),
    )
    trace = Trace("T5", rank, "2.13.0", batches)
    assert log_trace(run, trace, f"{BLOCK}.*") == 4
    largest = REPORT.frames[0].rows[-1].abs_max
    assert metrics(run)[f"abs max/{BLOCK}.wi_1 Linear"] == [(6, largest), (7, largest)]
    found = artifact(run, "fxguard/7/verdict.txt")
    assert found.splitlines() == [*REPORT.verdict, r"half a pair: \ud800"]
    trace.to_html(tmp_path / "page.html")
    name = "fxguard/trace.html" if rank is None else "fxguard/trace-3.html"
    assert artifact(run, name) == (tmp_path / "page.html").read_text("utf-8")
    listed = [
        each.path for each in mlflow.MlflowClient().list_artifacts(run.info.run_id, "fxguard")
    ]
    assert sorted(listed) == sorted(["fxguard/7", name])


def test_a_history(run: Any, tmp_path: Path) -> None:
    """Its events at their steps, its page, and a tag to search for."""
    needs("pyarrow")
    history = history_in(tmp_path / "history")
    assert log_history(run, history) == 1
    assert artifact(run, "fxguard/12/event.txt").splitlines()[0] == EVENT.headline
    assert artifact(run, "fxguard/history.html") == page_of(history)
    tags = mlflow.MlflowClient().get_run(run.info.run_id).data.tags
    assert tags["fxguard.event"] == EVENT.headline


def test_what_selects_nothing(run: Any) -> None:
    """A warning at the line of the loop, and an error for a trace; nothing is logged."""
    with pytest.warns(RuntimeWarning, match=r"'first:log' selects nothing here") as caught:
        assert log_ranges(run, frames(1.0), 0, "first:log") == 0
    assert caught[0].filename == __file__
    trace = Trace("T5", None, "2.13.0", (TracedBatch(0, frames(1.0)),))
    with pytest.raises(fxguard.FxguardError, match="there is first:split, first:Block"):
        log_trace(run, trace, "decoder.*")
    assert metrics(run) == {}
