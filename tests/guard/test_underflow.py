"""``underflow=``: when it is looked for, who hears of it, and what stays as it was."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxguard
from fxguard.report.load import load_report
from fxguard.rerun import start
from fxguard.underflow import underflows
from support import zoo
from support.needs import OF_PYTHON_3_13_0, needs
from support.same_results import assert_same, results


class Gate(nn.Module):
    """Two layers; what the first one makes is multiplied by `scale`, and by it again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        hidden = self.up(x) * scale
        return hidden * scale


class Net(nn.Module):
    def __init__(self, scale: float = 1e-4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = Gate()
        self.head = nn.Linear(16, 4)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gate(x, self.scale))  # type: ignore[no-any-return]


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(8, 16).half()


def share_lost(net: Net) -> float:
    """Of what `gate` returns: against float64 on the same operands."""
    with torch.no_grad():
        hidden = net.gate.up(inputs()) * net.scale
        low, wide = hidden * net.scale, hidden.double() * net.scale
    return int((low == 0).sum()) / int((wide != 0).sum())


MESSAGE = r"mul in gate made [\d.]+% of its nonzero elements 0 \(test_underflow.py:\d+\)"


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("replay", [False, True])
def test_it_raises_and_says_what(backend: str | None, replay: bool, capsys: Any) -> None:
    """In eager mode, compiled, and with replay: the operation, its share, and its line."""
    net = Net().half()
    expected = share_lost(net)
    assert expected > 0.9
    model = fxguard.instrument(net, underflow=0.5, replay=replay)
    called = model if backend is None else torch.compile(model, backend=backend)
    with pytest.raises(fxguard.NonFiniteError, match=f"^batch 0: {MESSAGE}: underflow\n") as raised:
        called(inputs())
    report = raised.value.report
    [origin] = report.origins
    assert (origin.problem, origin.cause, origin.phase) == ("underflow", "underflow", "forward")
    assert origin.lost_share == pytest.approx(expected)
    assert origin.frame == report.frames[-1]
    assert origin.frame.title == "gate mul"
    assert origin.frame.rows[-1].abs_min == 0
    assert report.phase == "forward"
    printed = capsys.readouterr().err
    assert "\nDetected underflow during batch_number=0\n" in printed
    assert "inf/nan" not in printed
    assert report.fix.startswith("keep `gate` in bfloat16 or float32")


@pytest.mark.parametrize("net", [Net(1e-2).half(), Net().bfloat16(), Net(), Net(1.0).half()])
@pytest.mark.filterwarnings("error")
@pytest.mark.filterwarnings(f"ignore:{OF_PYTHON_3_13_0}")
def test_nothing_is_said_where_nothing_is_lost(net: nn.Module, capsys: Any) -> None:
    """The clean twins: larger numbers, or a dtype that holds them."""
    model = fxguard.instrument(net, underflow=0.5)
    model(inputs().to(next(net.parameters()).dtype)).sum().backward()
    assert fxguard.guard_of(model).coverage() == "checked 4 of 4 operations in 1 graph"
    assert capsys.readouterr().err == ""


def test_without_the_option_nothing_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a batch in which no element is 0 does not, either."""
    runs: list[Any] = []
    walk = start.Start.walk

    def counted(*args: Any) -> Any:
        runs.append(args)
        return walk(*args)

    monkeypatch.setattr(start.Start, "walk", counted)
    fxguard.instrument(Net().half())(inputs())
    fxguard.instrument(Net(1.0).half(), underflow=0.5)(inputs())
    assert not runs
    fxguard.instrument(Net().half(), underflow=0.5, on_detect="warn", ignore=["gate"])(inputs())
    assert len(runs) == 1


def test_the_first_batch_and_every_100th(monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins in between is found in the next of them."""
    assert underflows.EVERY == 100
    monkeypatch.setattr(underflows, "EVERY", 3)
    found: list[fxguard.types.Report] = []
    net = Net(1.0).half()
    model = fxguard.instrument(net, underflow=0.5, on_detect=found.append)
    for number in range(8):
        net.scale = 1e-4 if number else 1.0
        model(inputs())
    assert [report.batch_number for report in found] == [3, 6]


def test_a_warning_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """``on_detect="warn"`` goes on."""
    monkeypatch.setattr(underflows, "EVERY", 1)
    model = fxguard.instrument(Net().half(), underflow=0.5, on_detect="warn")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", OF_PYTHON_3_13_0)
        for _ in range(3):
            model(inputs())
    [warning] = said
    assert "underflow; fix: keep `gate`" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("glob", ["gate", "gate:mul", "*:mul"])
def test_globs_leave_it_out(glob: str) -> None:
    """Of a module, of an operation in it, of an operation anywhere."""
    fxguard.instrument(Net().half(), underflow=0.5, ignore=[glob])(inputs())


@pytest.mark.parametrize("glob", ["head", "gate:linear"])
def test_other_globs_do_not(glob: str) -> None:
    model = fxguard.instrument(Net().half(), underflow=0.5, ignore=[glob])
    with pytest.raises(fxguard.NonFiniteError, match="mul in gate"):
        model(inputs())


def test_an_inf_is_said_first() -> None:
    """In a batch that holds one, underflows are not looked for."""
    net = Net().half()
    nn.init.constant_(net.head.weight, torch.inf)
    with pytest.raises(fxguard.NonFiniteError) as raised:
        fxguard.instrument(net, underflow=0.5)(inputs())
    assert "underflow" not in {origin.problem for origin in raised.value.report.origins}


def test_a_backend_alone() -> None:
    """``torch.compile(model, backend=fxguard.backend(underflow=0.5))``."""
    compiled = torch.compile(Net().half(), backend=fxguard.backend(underflow=0.5))
    with pytest.raises(fxguard.NonFiniteError, match="mul in gate made"):
        compiled(inputs())


def test_a_watched_loop() -> None:
    """``watch`` takes the option, as ``instrument`` does."""
    with (
        pytest.raises(fxguard.NonFiniteError, match="mul in gate made"),
        fxguard.watch(Net().half(), underflow=0.5) as guard,
    ):
        guard.model(inputs())


@pytest.mark.parametrize("share", [0, 0.0, -0.5, 1.5, True, "0.5", float("nan")])
def test_a_share_is_above_0_and_at_most_1(share: Any) -> None:
    with pytest.raises(fxguard.FxguardError, match="underflow has to be a share above 0"):
        fxguard.instrument(nn.Linear(2, 2), underflow=share)


# Reports and traces.


def reported() -> fxguard.types.Report:
    found: list[fxguard.types.Report] = []
    fxguard.instrument(Net().half(), underflow=0.5, on_detect=found.append)(inputs())
    [report] = found
    return report


def test_a_report_goes_through_json(tmp_path: Path) -> None:
    """Problem, share and the largest number that is lost are in it, and can be read again."""
    report = reported()
    [written] = json.loads(report.to_json())["origins"]
    assert written["problem"] == "underflow"
    assert written["lost_share"] == report.origins[0].lost_share
    assert written["largest_lost"] == report.origins[0].largest_lost
    tmp_path.joinpath("report.json").write_text(report.to_json())
    assert load_report(tmp_path / "report.json") == report


def test_a_report_as_table_and_page(tmp_path: Path) -> None:
    """The last row of the table is what became 0; the page marks its frame and says why."""
    report = reported()
    assert report.to_table().splitlines()[-1].startswith("| gate")
    assert "mul in gate made" in report._repr_html_()
    report.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Detected underflow in batch 0" in page
    assert '"marked":[' in page.replace(" ", "")
    assert "underflow; at [" in page
    assert "look at " in report.advice
    assert report.one_line.count("fix: ") == 1


def test_a_traced_batch_says_it_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Detection is off: the trace has the verdict above its frames, and `notes` has it."""
    model = fxguard.instrument(Net().half(), underflow=0.5, trace_batch_nums=[1])
    for _ in range(3):
        model(inputs())
    out = capsys.readouterr().out
    assert out.count(" made ") == 1
    first, second, *_ = out.splitlines()
    assert first.endswith("*** Starting batch number=1 ***")
    assert second.startswith("mul in gate made")
    guard = fxguard.guard_of(model)
    assert [(note.problem, note.what) for note in guard.notes] == [("underflow", "mul")]
    assert guard.last_report is None


def test_a_traced_batch_in_a_file(tmp_path: Path) -> None:
    """The verdict and the frame to look at stand with the batch."""
    model = fxguard.instrument(
        Net().half(), underflow=0.5, trace_batch_nums=[0, 1], trace_to=tmp_path
    )
    model(inputs()), model(inputs().float().mul(1e4).half())
    path = fxguard.guard_of(model).trace_path
    assert path is not None
    batches = fxguard.load_trace(path).batches
    assert batches[0].verdict[0].startswith("mul in gate made")
    [blamed] = batches[0].blamed
    assert batches[0].frames[blamed].title == "gate mul"
    assert not batches[1].verdict


def test_a_detection_in_a_file(tmp_path: Path) -> None:
    """With ``trace_to`` alone the batch of a detection is written, as others are."""
    model = fxguard.instrument(Net().half(), underflow=0.5, on_detect="warn", trace_to=tmp_path)
    with pytest.warns(RuntimeWarning, match="underflow"):
        model(inputs())
    path = fxguard.guard_of(model).trace_path
    assert path is not None
    [batch] = fxguard.load_trace(path).batches
    assert batch.frames[batch.blamed[0]].title == "gate mul"


# Gradients.


def lossy() -> nn.Module:
    """Its forward is healthy in float16, and gradients of its first layer are 1e-9."""

    class Lossy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).tanh() * 1e-4) * 1e-4  # type: ignore[no-any-return]

    return Lossy().half()


GRADIENTS = "all gradients of b.weight and of 2 more are 0 in float16: the largest would be"


def test_a_gradient_that_is_0_throughout_is_a_detection() -> None:
    """It raises from backward, with the operation whose backward lost it."""
    model = fxguard.instrument(lossy(), underflow=0.5)
    loss = model(inputs()).float().mean()
    with pytest.raises(fxguard.NonFiniteError, match=f"^batch 0: {GRADIENTS}") as raised:
        loss.backward()
    report = raised.value.report
    [origin] = report.origins
    assert (origin.problem, report.phase) == ("underflow", "backward")
    assert report.frames[-1].title == "b linear (backward)"
    assert report.one_line == report.message
    assert "Detected underflow during" in str(report)
    exact = copy.deepcopy(fxguard.remove(model)).float()
    exact(inputs().float()).mean().backward()
    assert exact.b.weight.grad is not None
    largest = float(exact.b.weight.grad.abs().max())
    assert 0 < largest < 2**-25  # what rounds to 0


def test_without_the_option_it_is_a_warning() -> None:
    """As it was before."""
    model = fxguard.instrument(lossy())
    with pytest.warns(RuntimeWarning, match=GRADIENTS):
        model(inputs()).float().mean().backward()
    assert fxguard.guard_of(model).last_report is None


def test_a_traced_gradient_is_a_warning() -> None:
    """Detection is off."""
    model = fxguard.instrument(lossy(), underflow=0.5, trace_batch_nums=[0])
    with pytest.warns(RuntimeWarning, match=GRADIENTS):
        model(inputs()).float().mean().backward()
    assert fxguard.guard_of(model).last_report is None


@pytest.mark.parametrize("on_detect", ["warn", "callable"])
def test_a_training_that_goes_on_hears_of_it(on_detect: str) -> None:
    """By a warning, once, or by a report."""
    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(
        lossy(), underflow=0.5, on_detect="warn" if on_detect == "warn" else found.append
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", OF_PYTHON_3_13_0)
        for _ in range(5):
            model(inputs()).float().mean().backward()
    if on_detect == "warn":
        assert len(said) == 1
        assert GRADIENTS in str(said[0].message)
    else:
        assert not said
        assert [report.batch_number for report in found] == [0, 3]  # the first step, the fourth


@pytest.mark.parametrize("glob", ["b", "*:linear"])
def test_globs_leave_lost_gradients_out(glob: str) -> None:
    """By the operation that lost them."""
    model = fxguard.instrument(lossy(), underflow=0.5, ignore=[glob])
    model(inputs()).float().mean().backward()
    assert fxguard.guard_of(model).last_report is None


class NoGradient(nn.Module):
    """A product whose first factor has no gradient, in front of one that loses it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        return hidden * (torch.ones_like(hidden) * 1e-4)


def test_the_operation_that_lost_it_is_one_with_a_gradient() -> None:
    """``ones_like`` reads the same value, and hands nothing back."""
    model = fxguard.instrument(NoGradient().half(), underflow=1.0)
    loss = model(inputs()).float().mean().mul(1e-2)
    with pytest.raises(fxguard.NonFiniteError) as raised:
        loss.backward()
    assert raised.value.report.frames[-1].title == "mul (backward)"


def test_gradients_that_are_0_by_right() -> None:
    """The clean twin: the second weight is 0."""
    model = lossy()
    nn.init.zeros_(model.b.weight)  # type: ignore[arg-type, union-attr]
    fxguard.instrument(model, underflow=0.5)(inputs().float().mul(100).half()).sum().backward()


# What stays as it was.


class Random(nn.Module):
    """Dropout, other random numbers, a buffer that it writes, batch norm, and zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        hidden = F.dropout(F.relu(self.norm(self.a(x))), 0.3, self.training)
        hidden = hidden * (torch.rand_like(hidden) > 0.2)
        return self.b(hidden)  # type: ignore[no-any-return]


def step(compile_with: str | None, **options: Any) -> list[Tensor]:
    """All that two calls in one autocast region leave behind."""
    torch._dynamo.reset()
    net = Random()
    model = fxguard.instrument(net, **options)
    called: Any = model
    if compile_with == "between graphs":
        called = torch.compiler.set_stance("force_eager")(model)
    elif compile_with is not None:
        called = torch.compile(model, backend=compile_with)
    torch.manual_seed(3)
    x = torch.randn(8, 16).requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        made = [called(x), called(x * 2), F.linear(x, net.a.weight)]
        loss = sum((each.float().square().mean() for each in made), torch.zeros(()))
    loss.backward()
    gradients = [each.grad for each in (x, *net.parameters())]
    assert all(gradient is not None for gradient in gradients)
    left = [*made, loss, *gradients, *net.buffers(), torch.get_rng_state()]
    return [each.detach().clone() for each in left if each is not None]


@pytest.mark.parametrize("compile_with", [None, "aot_eager", "between graphs"])
@pytest.mark.parametrize("options", [{}, {"replay": True}])
def test_bits_stay(compile_with: str | None, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, gradients, buffers and the random state, where every batch is looked at."""
    monkeypatch.setattr(underflows, "EVERY", 1)
    without = step(compile_with, **options)
    looked_at = step(compile_with, underflow=0.99, **options)
    for one, other in zip(without, looked_at, strict=True):
        assert torch.equal(one, other)


LONG = ("t5", "llama", "bert", "mixtral", "vit")
HEALTHY = ["resnet", *(pytest.param(name, marks=pytest.mark.campaign) for name in LONG)]


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_healthy_models_underflow_nowhere(name: str, dtype: torch.dtype) -> None:
    """Models of transformers in training, with dropout and masks; results stay the same bits."""
    needs("transformers")
    entry = zoo.ZOO[name]
    given = entry.inputs(dtype, entry.has_mask)
    expected = results(fxguard.instrument(entry.model(dtype, True)), given, train=True)
    torch._dynamo.reset()
    model = fxguard.instrument(entry.model(dtype, True), underflow=0.5)
    assert_same(expected, results(model, given, train=True))
    assert "underflow" not in fxguard.guard_of(model).coverage()


class InPlace(nn.Module):
    """What it writes is gone when somebody could look at it."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1).mul_(1e-9)


def test_what_ran_between_graphs() -> None:
    """It is looked at when it runs; what writes its operands is counted."""
    with torch.compiler.set_stance("force_eager"):
        model = fxguard.instrument(Net().half(), underflow=0.5)
        with pytest.raises(fxguard.NonFiniteError, match=MESSAGE) as raised:
            model(inputs())
        [origin] = raised.value.report.origins
        assert origin.lost_share == pytest.approx(share_lost(Net().half()))
        assert " is " in origin.operands
        healthy = fxguard.instrument(Net(1.0).half(), underflow=0.5)
        healthy(inputs())
        assert "underflow" not in fxguard.guard_of(healthy).coverage()
        model = fxguard.instrument(InPlace(), underflow=0.5)
        model(inputs())
    end = "; underflow not judged: 1 (written in place between graphs)"
    assert fxguard.guard_of(model).coverage().endswith(end)


def test_one_zero_among_others_is_enough_for_a_doubt() -> None:
    """An operation that wrote its operand between graphs may have lost what is 0 now."""
    with torch.compiler.set_stance("force_eager"):
        for numbers, doubts in (([1.0, 1.0], False), ([1.0, 0.0], True)):
            model = fxguard.instrument(InPlace(), underflow=0.5)
            model(torch.tensor(numbers))
            assert ("underflow not judged" in fxguard.guard_of(model).coverage()) == doubts


def test_a_run_that_cannot_be_repeated_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a second run raises ends no batch."""

    def out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(start, "copies_of", out_of_memory)
    model = fxguard.instrument(Net().half(), underflow=0.5)
    model(inputs())
    assert fxguard.guard_of(model).coverage().endswith("; underflow not judged: 1 (out of memory)")
