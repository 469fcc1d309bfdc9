"""Detection, tracing, early stop, and what happens on a detection."""

from __future__ import annotations

import pydoc
import warnings

import pytest
import torch
from torch import Tensor, nn

import fxguard


class Model(nn.Module):
    """Seven frames: two modules of one operation, three operations, a block, the root."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.block(x)
        return (hidden * x).exp() + 1


GOOD, BAD = torch.ones(2, 4), torch.full((2, 4), 1e4)
FRAMES = ["block.0 Linear", "block.1 Tanh", "block Sequential", "mul", "exp", "add", "Model"]


def make(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return fxguard.instrument(Model(), **options)


def test_the_report_ends_with_the_first_bad_frame(capsys: pytest.CaptureFixture[str]) -> None:
    """Detection prints the frames up to and including the operation to blame, then raises."""
    model = make()
    model(GOOD)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(BAD)
    report = caught.value.report
    assert capsys.readouterr() == ("", f"{report}\n")
    assert report.batch_number == 1
    assert report.frames[-1].kind == "exp"
    assert [origin.what for origin in report.origins] == ["exp"]
    assert str(caught.value) == report.summary
    assert report.message.startswith("batch 1: exp made inf (test_modes.py:")


@pytest.mark.parametrize("count", [1, 3, 5, 10, 30])
def test_exactly_so_many_frames_are_kept(count: int) -> None:
    """After many batches too: frames of earlier batches fill up, and no more are kept."""
    model = make(max_frames_to_save=count)
    for _ in range(10):
        model(GOOD)
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(BAD)
    frames = caught.value.report.frames
    expected = [*(FRAMES * 10), *FRAMES[:5]][-count:]
    assert [frame.title for frame in frames] == expected
    assert [frame.batch_number for frame in frames[-5:]] == [10] * min(count, 5)
    assert len(fxguard.guard_of(model).recorder.earlier) <= 1 + count // len(FRAMES)


@pytest.mark.parametrize("granularity", ["op", "module"])
def test_exactly_so_many_frames_are_kept_between_graphs(granularity: str) -> None:
    """The same where TorchDynamo stands aside, and where modules alone are shown."""
    model = make(max_frames_to_save=50, granularity=granularity)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(20):
            model(GOOD)
        with pytest.raises(fxguard.NonFiniteError) as caught:
            model(BAD)
    assert len(caught.value.report.frames) == 50


def test_after_a_detection_the_next_clean_batch_is_clean() -> None:
    """A caught detection leaves nothing triggered, and a second one is reported again."""
    model = make()
    for _ in range(2):
        with pytest.raises(fxguard.NonFiniteError):
            model(BAD)
        model(GOOD)
    guard = fxguard.guard_of(model)
    assert guard.batch_number == 4
    assert guard.last_report is not None
    assert guard.last_report.batch_number == 2


def test_training_goes_on_after_a_caught_detection() -> None:
    """The usual recovery, skipping the batch, works and leaves gradients finite."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in (GOOD, BAD, GOOD):
        optimizer.zero_grad()
        try:
            model(x).sum().backward()
        except fxguard.NonFiniteError:
            continue
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_warn_prints_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """`on_detect="warn"` gives the bad output back; a clean batch warns of nothing."""
    model = make(on_detect="warn")
    with pytest.warns(RuntimeWarning, match="batch 0: exp made inf"):
        assert model(BAD).isinf().any()
    assert "Detected inf/nan during batch_number=0" in capsys.readouterr().err
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(BAD)  # the same origin is no news
        model(GOOD)
    assert capsys.readouterr() == ("", "")
    report = fxguard.guard_of(model).last_report
    assert report is not None
    assert report.batch_number == 1


def test_a_callable_gets_the_report_and_nothing_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the callable raises reaches the caller."""
    reports: list[fxguard.types.Report] = []
    model = make(on_detect=reports.append)
    model(BAD)
    assert [report.batch_number for report in reports] == [0]
    assert capsys.readouterr() == ("", "")

    def refuse(report: fxguard.types.Report) -> None:
        raise KeyError(report.batch_number)

    with pytest.raises(KeyError):
        make(on_detect=refuse)(BAD)


def test_tracing_prints_every_frame_of_the_chosen_batches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Detection is off, other batches are silent."""
    model = make(trace_batch_nums=[1, 3])
    for x in (GOOD, BAD, BAD, GOOD, GOOD):
        model(x)
    printed = capsys.readouterr().out
    blocks = printed.split("*** Starting batch number=")[1:]
    assert [block[0] for block in blocks] == ["1", "3"]
    for block in blocks:
        assert block.splitlines()[1] == "abs min  abs max  metadata"
        assert f"*** Finished batch number={block[0]} ***" in block
        titles = [
            line.split("  #")[0].strip() for line in block.splitlines() if line[:18].isspace()
        ]
        assert [t for t in titles if t and "***" not in t] == FRAMES
    assert " inf output" in blocks[0]
    assert " inf output" not in blocks[1]
    assert fxguard.guard_of(model).last_report is None


@pytest.mark.parametrize("trace", [[], [0]])
def test_early_stop_comes_when_the_batch_has_finished(
    trace: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """`abort_after_batch_num` works in detection and in tracing."""
    model = make(abort_after_batch_num=2, trace_batch_nums=trace)
    model(GOOD)
    model(GOOD)
    with pytest.raises(fxguard.BatchLimitReached, match="batch 2 has finished"):
        model(GOOD)
    assert ("Starting batch number=0" in capsys.readouterr().out) == bool(trace)


def test_early_stop_of_a_backend_comes_when_the_next_batch_begins() -> None:
    """A backend alone does not see where a model returns."""
    backend = fxguard.backend("eager", abort_after_batch_num=1)
    model = torch.compile(lambda x: x * 2, backend=backend)
    for _ in range(2):
        model(torch.ones(2))
    with pytest.raises(fxguard.BatchLimitReached, match="batch 1 has finished"):
        model(torch.ones(2))


def test_a_backend_knows_no_model() -> None:
    """So its report counts neither weights nor buffers."""
    reports: list[fxguard.types.Report] = []
    backend = fxguard.backend("eager", on_detect=reports.append)
    torch.compile(nn.BatchNorm1d(2).eval(), backend=backend)(torch.full((2, 2), torch.nan))
    assert (reports[0].weights, reports[0].buffers) == (0, 0)


def test_module_granularity_shows_modules_only() -> None:
    """The frame that shows the bad value first is the last one, as in the hook debugger."""
    model = make(granularity="module")
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(BAD)
    report = caught.value.report
    assert [frame.title for frame in report.frames] == [*FRAMES[:3], "Model"]
    assert report.origins[0].what == "exp"


def test_frames_are_those_of_the_last_batch() -> None:
    """`Guard.frames()` is empty before the first batch and complete after each."""
    model = make()
    guard = fxguard.guard_of(model)
    assert guard.frames() == []
    model(GOOD)
    assert [frame.title for frame in guard.frames()] == FRAMES
    assert [frame.index for frame in guard.frames()] == list(range(len(FRAMES)))
    model(GOOD * 2)
    assert guard.frames()[0].rows[2].abs_max == 2
    assert {frame.batch_number for frame in guard.frames()} == {1}


def test_a_forward_that_raises_leaves_the_guard_ready() -> None:
    """The model's own exception passes through, and the next batch is checked."""
    model = make()
    with pytest.raises(RuntimeError, match=r"fake tensor call|cannot be multiplied"):
        model(torch.ones(2, 5))
    model(GOOD)
    with pytest.raises(fxguard.NonFiniteError):
        model(BAD)


def test_a_guard_shows_itself() -> None:
    """Its repr says of what it is and what it has found; completion offers what users ask for."""
    model = make(on_detect=lambda report: None)
    guard = fxguard.guard_of(model)
    model(GOOD)
    assert repr(guard) == "<fxguard.types.Guard of Model, batch 1: nothing found>"
    model(BAD)
    assert repr(guard).startswith(
        "<fxguard.types.Guard of Model, batch 2: batch 1: exp made inf (test_"
    )
    public = [name for name in dir(guard) if not name.startswith("_")]
    assert all(hasattr(guard, name) for name in public)
    assert {"frames", "coverage", "selftest", "last_report", "batch_number"} <= set(public)
    assert not {"install", "uninstall", "put_away"} & set(public)
    assert set(public) == {name for name in vars(fxguard.types.Guard) if not name.startswith("_")}
    shown = pydoc.render_doc(fxguard.types.Guard)
    assert len(shown.splitlines()) < 120
    assert "put_away" not in shown
