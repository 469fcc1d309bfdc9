"""A batch to its report: what is judged, what is shown, and who else may judge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun
from fxguard.batch.frames import FrameView
from fxguard.guard.guard import GuardedModel
from fxguard.guard.plugins import Plugins
from fxguard.options import Options
from fxguard.records import Frame
from fxguard.verdict.report_of import EarlierFrames, Finished, ReportOf

X = torch.tensor([1.0, 2.0])


class Net(nn.Module):
    """A logarithm that may be discarded, and a product."""

    def forward(self, x: Tensor) -> Tensor:
        safe = torch.where(x > 0, torch.log(x), 0.0)
        return (safe + 1) * x


def batch_on(x: Tensor) -> Batch:
    """A batch that was read and is not closed."""
    graph = torch.fx.symbolic_trace(Net())
    checked, plan = fxguard.insert_checks(graph)
    output, statistics = checked(x)
    batch = Batch(7)
    batch.graph_ran(GraphRun(plan, graph, statistics, (x,), None, ("", ""), (), (x,)), (output,))
    batch.read()
    return batch


def earlier_frames(asked: list[int]) -> EarlierFrames:
    def earlier(wanted: int) -> list[Frame]:
        asked.append(wanted)
        return [Frame("", f"earlier{index}", True, ()) for index in range(wanted)]

    return earlier


def test_a_finite_batch_has_no_report() -> None:
    """Nobody asks for frames of earlier batches."""
    asked: list[int] = []
    found = ReportOf(view=FrameView())(batch_on(X), None, earlier_frames(asked))
    assert found.report is None
    assert found.flow is None
    assert found.absorbed == ()
    assert asked == []


def test_a_report_ends_with_the_frame_that_is_to_blame() -> None:
    """What is missing to the wanted number of frames comes from earlier batches."""
    asked: list[int] = []
    found = ReportOf(view=FrameView(), max_frames=10)(
        batch_on(X * torch.inf), None, earlier_frames(asked)
    )
    assert found.report is not None
    assert len(found.report.frames) == 10
    own = [frame for frame in found.report.frames if not frame.kind.startswith("earlier")]
    assert asked == [10 - len(own)]
    assert all(frame.batch_number == 7 for frame in own)
    assert any(row.is_bad for row in own[-1].rows)
    assert not any(row.is_bad for frame in own[:-1] for row in frame.rows)


def test_a_short_report_asks_for_no_earlier_frames() -> None:
    """One frame is there in any case."""
    asked: list[int] = []
    judge = ReportOf(view=FrameView(), max_frames=1)
    report = judge(batch_on(X * torch.inf), None, earlier_frames(asked)).report
    assert report is not None
    assert len(report.frames) == 1
    assert asked == []


@pytest.mark.parametrize("strict", [False, True])
def test_absorbed_origins_are_notes_unless_asked_for(strict: bool) -> None:
    """The logarithm of zero that a ``where`` discards."""
    judge = ReportOf(view=FrameView(), strict=strict)
    found = judge(batch_on(torch.tensor([0.0, 2.0])), None, earlier_frames([]))
    assert [origin.what for origin in found.absorbed] == ["log"]
    if strict:
        assert found.report is not None
        assert [origin.what for origin in found.report.origins] == ["log"]
    else:
        assert found.report is None


def test_what_is_ignored_is_not_reported() -> None:
    """An operation that the user does not want to hear of is no origin."""
    judge = ReportOf(view=FrameView(), strict=True, is_ignored=lambda step: step.kind == "log")
    found = judge(batch_on(torch.tensor([0.0, 2.0])), None, earlier_frames([]))
    assert found.report is None
    assert found.absorbed == ()


def test_an_error_is_in_the_report_in_one_line() -> None:
    """What the graph returned to Python may be why the forward raised."""
    error = ValueError("too large\nand more")
    found = ReportOf(view=FrameView())(batch_on(X * torch.inf), error, earlier_frames([]))
    assert found.report is not None
    assert found.report.error == "ValueError: too large"


def test_a_plug_in_may_judge() -> None:
    """It is asked about each batch, with what the forward raised, on the model and on a copy."""
    heard: list[tuple[int, str, nn.Module | None]] = []

    def make(options: Options, view: FrameView) -> Any:
        def judge(batch: Batch, error: Exception | None, earlier: EarlierFrames) -> Finished:
            heard.append((batch.number, type(error).__name__, view.model))
            return Finished(batch)

        return judge

    model = Net()
    guard = GuardedModel(model, Options(), Plugins(judge=make))
    guard.install()
    try:
        model(X)
        model(X * torch.nan)  # it finds nothing
        with pytest.raises(TypeError):
            model(None)
    finally:
        guard.uninstall()
    assert heard == [
        (0, "NoneType", model),
        (1, "NoneType", model),
        (2, "TypeError", model),
    ]
