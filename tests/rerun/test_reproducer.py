"""The operation that a report blames becomes a test that fails, without fxguard."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.graph.one_operation import OneOperation
from fxguard.graph.wide_form import NotJudged
from fxguard.report.load import load_report
from fxguard.reproduce import reproducer, reproducible
from support.loading import module_of, the_gallery
from support.needs import needs

needs("transformers")
gallery = the_gallery()
STORIES = gallery.STORIES
BLAMED = [name for name, story in STORIES.items() if story.cause != "weight"]
CAMPAIGN = {
    *("t5_wo", "gemma3_residual", "qk_before_scale", "flux_clip_hides", "where_double"),
    *("mask_min_minus_score", "moe_residual_fp16", "rwkv_exp_half", "weight_norm_zero"),
    *("pool_clamp_eps", "focal_fp16", "mamba_A_exp", "infonce_exp", "std_of_one"),
    *("acos_one", "log1p_saturated", "mask_add_grad"),
}
# Causes that are those of the whole model: alone, on what float16 made of an eps, 0 / 0 is 0 / 0.
OF_THE_MODEL = {"underflow": {"domain", "zero divisor"}, "rounding": {"zero divisor"}}

NOTHING_BUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fxguard", "transformers"):
            raise ImportError(f"{name} is not there")
sys.meta_path.insert(0, Blocked())
import pytest
sys.exit(pytest.main(["-q", "-p", "no:fxguard", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def failure_of(path: Path) -> AssertionError:
    """What a test raises, run in this process."""
    [test] = [value for name, value in vars(module_of(path)).items() if name.startswith("test_")]
    # A report on a backward is made where gradients are off.
    with pytest.raises(AssertionError) as caught, torch.enable_grad():
        test()
    return caught.value


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are run before they are handed over, but start no process for that."""
    monkeypatch.setattr(reproducer, "expect_failure", failure_of)


def report_of(
    model: nn.Module, *inputs: Tensor, backward: bool = False, **options: Any
) -> fxguard.types.Report:
    reports: list[fxguard.types.Report] = []
    guarded = fxguard.instrument(model, on_detect=reports.append, **options)
    made = guarded(*inputs)
    if backward:
        made.backward()
    fxguard.remove(guarded)
    return reports[0]


class Blamed(nn.Module):
    """The operation of a written test, as a model."""

    def __init__(self, written: ModuleType) -> None:
        super().__init__()
        self.operation = written.operation

    def forward(self, **operands: Tensor) -> Tensor:
        return self.operation(**operands)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.campaign if name in CAMPAIGN else ()) for name in BLAMED],
)
@pytest.mark.usefixtures("in_this_process")
def test_each_story_becomes_a_test_that_fails_for_the_same_reason(
    name: str, tmp_path: Path
) -> None:
    """Problem, operation and cause are those of the report, as a fresh guard says."""
    inputs = gallery.part(name, "_inputs")()
    is_backward = STORIES[name].phase == "backward"
    model = gallery.model(name)
    report = report_of(model, *inputs, backward=is_backward, reproduce_to=tmp_path)
    [path] = tmp_path.glob("test_*.py")
    first, failure = report.origins[0], failure_of(path)
    assert path.name.startswith(f"test_{first.what.strip('_')}")

    written = module_of(path)
    operands = torch.load(written.OPERANDS, weights_only=True)
    assert sum(x.numel() for x in operands.values()) < 2000
    if is_backward or name == "mask_min_minus_score":  # alone, its result is a mask like others
        assert first.problem in str(failure)
        return
    reports: list[fxguard.types.Report] = []
    fxguard.instrument(Blamed(written), on_detect=reports.append)(**operands)
    again = reports[0].origins[0]
    assert (again.what, again.problem) == (first.what, first.problem)
    assert again.cause in {first.cause, *OF_THE_MODEL.get(first.cause, set())}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "sqrt_zero" else pytest.mark.campaign)
        for name in BLAMED
    ],
)
def test_it_needs_torch_and_pytest_only(name: str, tmp_path: Path) -> None:
    """It is run in a process of its own before it is handed over, and by pytest without fxguard."""
    report_of(
        gallery.model(name),
        *gallery.part(name, "_inputs")(),
        backward=STORIES[name].phase == "backward",
        reproduce_to=tmp_path,
    )
    [path] = tmp_path.glob("test_*.py")
    command = [sys.executable, "-c", NOTHING_BUT_TORCH, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=without_fxguard())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "AssertionError: it" in done.stdout
    assert "1 failed" in done.stdout


def without_fxguard() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("FXGUARD")}


class Overflow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * x).sum()


BIG = torch.tensor([[1.0, 300.0], [2.0, 1.0]], dtype=torch.float16)


@pytest.mark.usefixtures("in_this_process")
def test_the_method_works_without_the_option(tmp_path: Path) -> None:
    """What a graph has made is kept with its report; two reports write two tests."""
    report = report_of(Overflow(), BIG)
    assert report.reproduce(tmp_path) == tmp_path / "test_mul.py"
    assert report.reproduce(tmp_path).name == "test_mul_2.py"
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "mul.pt",
        "mul_2.pt",
        "test_mul.py",
        "test_mul_2.py",
    ]


@pytest.mark.usefixtures("in_this_process")
def test_the_file_says_what_it_holds(tmp_path: Path) -> None:
    """The story, the operands, the versions."""
    report = report_of(Overflow(), BIG)
    text = report.reproduce(tmp_path).read_text(encoding="utf-8")
    assert text.startswith('"""mul makes inf of these operands.\n')
    assert f"    {report.summary.splitlines()[0]}" in text
    assert "mul.pt holds the operands that the operation had" in text
    assert "    x: float16 [1, 1], 300.0" in text
    assert torch.__version__ in text


@pytest.mark.usefixtures("in_this_process")
def test_ranges_only_holds_no_number_of_the_model(tmp_path: Path) -> None:
    """Numbers are drawn, and fail in the same way; the story names no single one."""
    x = torch.arange(256, 320).half() + 0.25  # what is drawn, and has fewer digits, is none of them
    report = report_of(Overflow(), x)
    held: set[float] = set(x.tolist())
    path = report.reproduce(tmp_path, ranges_only=True)
    text = path.read_text(encoding="utf-8")
    assert "random numbers of the ranges that the operands had, and none of the model's" in text
    assert "at [" not in text
    for tensor in torch.load(tmp_path / "mul.pt", weights_only=True).values():
        assert held.isdisjoint(tensor.reshape(-1).tolist()) or set(tensor.reshape(-1).tolist()) <= {
            300.0
        }
    failure_of(path)


@pytest.mark.usefixtures("in_this_process")
def test_drawn_numbers_that_do_not_fail_are_not_written(tmp_path: Path) -> None:
    """One element in a million that no draw hits: nothing is written, and that is said."""

    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.acos(x)

    x = torch.full((2**10,), 0.5)
    x[7] = 1.5
    report = report_of(Log(), x)
    report.reproduce(tmp_path / "real")
    seldom = Overflow()
    report = report_of(seldom, torch.cat([torch.zeros(2**20), torch.tensor([300.0])]).half())
    with pytest.raises(fxguard.FxguardError, match="random numbers of the same ranges do not fail"):
        report.reproduce(tmp_path / "drawn", ranges_only=True)
    assert not (tmp_path / "drawn").exists()


def test_a_test_that_does_not_fail_is_not_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is run before; what it ended with is said, and nothing is left in the folder."""
    report = report_of(Overflow(), BIG)
    monkeypatch.setattr(reproducer, "text_of", lambda *args, **kwargs: "def test_it():\n    pass\n")
    with pytest.raises(
        fxguard.FxguardError, match="in a process of its own the test does not fail: it ended well"
    ):
        report.reproduce(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    monkeypatch.setattr(reproducer, "text_of", lambda *args, **kwargs: "import nothing_of_that\n")
    with pytest.raises(fxguard.FxguardError, match="No module named 'nothing_of_that'"):
        report.reproduce(tmp_path)


def test_without_an_operation_there_is_no_test(tmp_path: Path) -> None:
    """A weight that is NaN is the model's."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    report = report_of(model, torch.ones(1, 2))
    with pytest.raises(fxguard.FxguardError, match="no operation made it: weight weight holds NaN"):
        report.reproduce(tmp_path)


def test_a_report_travels_without_its_operands(tmp_path: Path) -> None:
    """Pickled, copied or read from a file it says that it holds none."""
    report = report_of(Overflow(), BIG)
    assert "kept" not in json.loads(report.to_json())
    for other in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert other == report
        with pytest.raises(fxguard.FxguardError, match="in the process that made it"):
            other.reproduce(tmp_path)
    file = tmp_path / "report.json"
    file.write_text(report.to_json())
    with pytest.raises(fxguard.FxguardError, match="this report holds no operands"):
        load_report(file).reproduce(tmp_path)


def test_operands_are_kept_as_they_were(tmp_path: Path) -> None:
    """Whoever writes them after the report changes nothing; the model's tensors are not held."""
    x = BIG.clone()
    report = report_of(Overflow(), x)
    x.zero_()
    assert report.kept is not None
    kept: Any = report.kept
    assert torch.equal(kept.operation.tensors[0], BIG)


@pytest.mark.usefixtures("in_this_process")
def test_several_gigabytes_are_cut_before_they_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than the bound is kept, of what still fails."""
    monkeypatch.setattr(reproducer, "MOST_BYTES", 10_000)
    report = report_of(Overflow(), torch.full((512, 512), 300.0, dtype=torch.float16))
    assert report.kept is not None
    kept: Any = report.kept
    assert 0 < reproducer.size_of(kept.operation) <= 10_000
    failure_of(report.reproduce(tmp_path))


@pytest.mark.usefixtures("in_this_process")
def test_what_cannot_be_cut_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that takes all of its elements to overflow."""
    monkeypatch.setattr(reproducer, "MOST_BYTES", 100_000)

    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sum(x)

    report = report_of(Sum(), torch.ones(66_000, dtype=torch.float16))
    with pytest.raises(fxguard.FxguardError, match="sum was not kept: its operands have more than"):
        report.reproduce(tmp_path)


def test_what_fails_on_its_device_alone_stays_there(device: torch.device) -> None:
    """The test runs where the operation fails: on a CPU only if it fails there, too."""

    def reciprocal(x: Tensor) -> Tensor:
        return 1 / x if x.device.type == device.type else x

    operation = OneOperation("reciprocal", reciprocal, (torch.zeros(3, device=device),))
    assert reproducer.kept(operation, reproducible.same_failure, "inf").device == device.type


def test_what_fails_to_keep_leaves_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong there."""

    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("of nobody's")

    monkeypatch.setattr(reproducible, "kept", broken)
    report = report_of(Overflow(), BIG)
    assert report.origins[0].what == "mul"
    with pytest.raises(fxguard.FxguardError, match="mul was not kept: ZeroDivisionError"):
        report.reproduce("nowhere")


def test_operands_of_a_subclass_are_not_kept() -> None:
    """Nobody knows what its elements are."""

    class Ours(Tensor):
        pass

    operation = OneOperation("mul", torch.mul, (BIG.as_subclass(Ours), BIG))
    with pytest.raises(NotJudged, match="an operand is a Ours"):
        reproducer.kept(operation, reproducible.same_failure, "inf")


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("autocast", [False, True])
def test_autocast_is_written(tmp_path: Path, autocast: bool) -> None:
    """An operation that fails under autocast only is run under autocast."""

    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
                return torch.mm(x, y)

    big = torch.full((4, 4), 3e4 if autocast else 3e38)
    report = report_of(Product(), big, big)
    text = report.reproduce(tmp_path).read_text(encoding="utf-8")
    assert ('with torch.autocast("cpu", dtype=torch.float16):' in text) == autocast


@pytest.mark.usefixtures("in_this_process")
def test_an_operation_that_writes_through_a_view(tmp_path: Path) -> None:
    """What it returns is a part of the tensor that turned bad, and is bad itself."""

    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made = x.clone()
            made[0].div_(0)
            return made + 1

    path = report_of(First(), torch.ones(2, 2)).reproduce(tmp_path)
    assert "return x.div_(0)" in path.read_text(encoding="utf-8")
    failure_of(path)


@pytest.mark.usefixtures("in_this_process")
def test_an_operation_between_graphs(tmp_path: Path) -> None:
    """Its operands are kept where that is asked for, as they were when it ran."""

    class Between(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            y = x * 1
            made = torch.ctc_loss(
                y.log_softmax(-1)[:, None],
                torch.ones(1, 9, dtype=torch.long),
                torch.tensor([4]),
                torch.tensor([9]),
            )
            y.zero_()
            return made

    report = report_of(Between(), torch.rand(4, 3), reproduce_to=tmp_path)
    assert report.origins[0].what == "ctc_loss"
    [path] = tmp_path.glob("test_*.py")
    failure_of(path)
    report = report_of(Between(), torch.rand(4, 3))
    with pytest.raises(
        fxguard.FxguardError, match="were not kept: run again with --reproduce-to FOLDER"
    ):
        report.reproduce(tmp_path)


WRONG_UNDER_INDUCTOR = """
import torch
from torch._inductor import lowering

@torch.library.custom_op("wrong_when_compiled::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2

@half.register_fake
def _(x):
    return torch.empty_like(x)

@lowering.register_lowering(torch.ops.wrong_when_compiled.half.default, type_promotion_kind=None)
def _(x):
    return lowering.div(x, lowering.sub(x, x))
"""


def test_what_fails_in_its_compiled_form_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test says that eager mode is well, and compiles: in a process of its own."""
    (tmp_path / "ours_for_inductor.py").write_text(WRONG_UNDER_INDUCTOR)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    import ours_for_inductor

    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ours_for_inductor.half(x + 1) * 3

    model = torch.compile(fxguard.instrument(Halves()))
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(torch.ones(8))
    report = caught.value.report
    assert report.origins[0].what == "wrong_when_compiled.half"
    text = report.reproduce(tmp_path / "made").read_text(encoding="utf-8")
    assert "half makes inf of these operands where it is compiled, and not in eager" in text
    assert "import ours_for_inductor\n" in text
    assert "assert torch.isfinite(in_eager_mode).all()" in text
    assert "compiled = torch.compile(operation)" in text
    with pytest.raises(fxguard.FxguardError, match="numbers are not drawn for what fails in its"):
        report.reproduce(tmp_path / "drawn", ranges_only=True)


@pytest.mark.usefixtures("in_this_process")
def test_each_origin_is_written_once(tmp_path: Path) -> None:
    """A run that goes on writes no second test of the same place."""
    model = fxguard.instrument(Overflow(), on_detect=lambda report: None, reproduce_to=tmp_path)
    for _ in range(3):
        model(BIG)
    assert len(list(tmp_path.glob("test_*.py"))) == 1


@pytest.mark.usefixtures("in_this_process")
def test_it_is_written_before_the_exception(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And said after the report; a folder that cannot be written hides nothing."""
    model = fxguard.instrument(Overflow(), reproduce_to=tmp_path / "made" / "here")
    with pytest.raises(fxguard.NonFiniteError):
        model(BIG)
    path = tmp_path / "made" / "here" / "test_mul.py"
    assert capsys.readouterr().err.endswith(
        f"fxguard: {path} fails as the model did: pytest {path}\n"
    )
    fxguard.remove(model)
    (tmp_path / "later").write_text("")
    model = fxguard.instrument(Overflow(), reproduce_to=tmp_path / "later" / "deeper")
    with pytest.raises(fxguard.NonFiniteError):
        model(BIG)
    assert "fxguard: no test was written: " in capsys.readouterr().err


def test_random_numbers_and_operands_stay(tmp_path: Path) -> None:
    """What is kept of a failing dropout draws nothing of the script's."""

    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.9, training=True)

    x = torch.full((64,), 6e4, dtype=torch.float16)
    torch.manual_seed(5)
    plain = Dropped()(x)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    report = report_of(Dropped(), x)
    assert torch.equal(torch.get_rng_state(), after)
    assert not plain.isfinite().all()
    path = report.reproduce(tmp_path)
    assert torch.equal(torch.get_rng_state(), after)
    assert "torch.manual_seed(0)" in path.read_text(encoding="utf-8")
