"""Ranges, verdicts and pages in Weights & Biases: read back from the file of an offline run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fxguard
from fxguard.integrations.wandb import log_history, log_ranges, log_report, log_trace
from fxguard.report.display import page_of
from fxguard.types import Trace, TracedBatch
from support import wandb_offline
from support.needs import needs
from support.small_history import history_in
from support.split_twice import frames
from support.t5_overflow import BLOCK, REPORT

wandb = needs("wandb")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = wandb.Settings(console="off", disable_git=True, x_disable_stats=True)
    run = wandb.init(project="fxguard", dir=str(tmp_path), settings=settings)
    yield run
    run.finish()


def test_a_training_loop_with_steps(run: Any, tmp_path: Path) -> None:
    """The numbers stand in the row of the step, beside those of the loop; inf and NaN too."""
    values = [1.0, math.inf, math.nan]
    for step, value in enumerate(values):
        assert log_ranges(run, frames(value), step, "first:split") == 6
        run.log({"loss": step}, step=step)
    run.finish()
    rows = wandb_offline.rows(tmp_path)
    assert [row["_step"] for row in rows] == [0, 1, 2]
    for step, (row, value) in enumerate(zip(rows, values, strict=True)):
        assert row["loss"] == row["fxguard/step"] == step
        assert row["abs min/first:split"] == 0.5
        assert row["abs max/first:split output[1]"] == pytest.approx(2 * value, nan_ok=True)
        assert row["abs max/first:split 2"] == pytest.approx(4 * value, nan_ok=True)
    assert wandb_offline.axes(tmp_path) == {
        "abs max/*": "fxguard/step",
        "abs min/*": "fxguard/step",
    }


@pytest.mark.parametrize("is_before", [True, False])
def test_a_training_loop_that_leaves_the_step_to_wandb(
    run: Any, tmp_path: Path, is_before: bool
) -> None:
    """Whichever logs first, no row of either is lost, and the x axis of ours is the step."""
    for step in range(3):
        if is_before:
            run.log({"loss": step})
        log_ranges(run, frames(step), step, "first:split")
        if not is_before:
            run.log({"loss": step})
    run.finish()
    rows = wandb_offline.rows(tmp_path)
    assert [row["loss"] for row in rows if "loss" in row] == [0, 1, 2]
    ours = [row for row in rows if "fxguard/step" in row]
    assert [row["fxguard/step"] for row in ours] == [0, 1, 2]
    assert [row["abs max/first:split"] for row in ours] == [0, 1, 2]


def test_a_report(run: Any, tmp_path: Path) -> None:
    """The verdict line by line, and the page as ``to_html`` writes it."""
    log_report(run, REPORT, 7)
    run.finish()
    found = wandb_offline.summary(tmp_path)
    assert found["_step"] == found["fxguard/step"] == 7
    assert found["fxguard/verdict"].splitlines() == REPORT.verdict
    assert found["fxguard/page._type"] == "html-file"
    REPORT.to_html(tmp_path / "page.html")
    assert wandb_offline.pages(tmp_path) == [(tmp_path / "page.html").read_text(encoding="utf-8")]


def test_a_trace_after_the_training(run: Any, tmp_path: Path) -> None:
    """Every batch has its row, though W&B's own step is further; the page is that of the trace."""
    run.log({"loss": 0.0}, step=200)
    batches = (
        TracedBatch(6, REPORT.frames[:1]),
        TracedBatch(7, REPORT.frames, None, (*REPORT.verdict, "half a pair: \ud800")),
    )
    trace = Trace("T5", None, "2.13.0", batches)
    assert log_trace(run, trace, f"{BLOCK}.*") == 4
    run.finish()
    rows = [row for row in wandb_offline.rows(tmp_path) if "fxguard/step" in row]
    name = f"abs max/{BLOCK}.wi_1:Linear"
    assert [(row["fxguard/step"], row[name]) for row in rows if name in row] == [
        (6, REPORT.frames[0].rows[-1].abs_max),
        (7, REPORT.frames[0].rows[-1].abs_max),
    ]
    verdicts = [row for row in rows if "fxguard/verdict" in row]
    assert [row["fxguard/step"] for row in verdicts] == [7]
    assert verdicts[0]["fxguard/verdict"].splitlines() == [*REPORT.verdict, r"half a pair: \ud800"]
    trace.to_html(tmp_path / "page.html")
    assert wandb_offline.pages(tmp_path) == [(tmp_path / "page.html").read_text(encoding="utf-8")]
    assert log_trace_of_nothing() == 0


def test_a_history(run: Any, tmp_path: Path) -> None:
    """Its events at their steps, and its page."""
    needs("pyarrow")
    history = history_in(tmp_path / "history")
    run.log({"loss": 0.0}, step=200)
    assert log_history(run, history) == 1
    run.finish()
    (row,) = [row for row in wandb_offline.rows(tmp_path) if "fxguard/event" in row]
    assert row["fxguard/step"] == 12
    assert row["fxguard/event"].splitlines() == [
        "step 12: head.weight (train.py:9) was written by something else than the optimizer; the "
        "loss moved 1 step later",
        "  head.weight is 8 times as large",
        r"  a \ud800",
    ]
    assert wandb_offline.pages(tmp_path) == [page_of(history)]


def log_trace_of_nothing() -> int:
    """A trace without batches asks nothing of a run."""
    return log_trace(None, Trace("T5", None, "2.13.0", ()))  # type: ignore[arg-type]


def test_a_run_without_a_step() -> None:
    """Several processes may share a run: then a step cannot be given."""

    class Shared:
        def __init__(self) -> None:
            self.rows: list[dict[str, Any]] = []

        @property
        def step(self) -> int:
            raise RuntimeError("not in mode='shared'")

        def log(self, data: dict[str, Any], step: int | None = None) -> None:
            assert step is None
            self.rows.append(data)

        def define_metric(self, *names: str, **options: Any) -> None:
            pass

    run = Shared()
    for step in range(2):
        log_ranges(run, frames(1.0), step, "first:split")
    assert [row["fxguard/step"] for row in run.rows] == [0, 1]


def test_what_selects_nothing(run: Any, tmp_path: Path) -> None:
    """A warning at the line of the loop, and an error for a trace; nothing is logged."""
    with pytest.warns(RuntimeWarning, match=r"'first:log' selects nothing here") as caught:
        assert log_ranges(run, frames(1.0), 0, "first:log") == 0
    assert caught[0].filename == __file__
    trace = Trace("T5", None, "2.13.0", (TracedBatch(0, frames(1.0)),))
    with pytest.raises(fxguard.FxguardError, match="there is first:split, first:Block"):
        log_trace(run, trace, "decoder.*")
    with pytest.raises(fxguard.FxguardError, match="a glob or a list of globs, got 3"):
        log_ranges(run, frames(1.0), 0, 3)  # type: ignore[arg-type]
    run.finish()
    assert wandb_offline.rows(tmp_path) == []
