"""``Report.patch()``: a diff of the user's file that repairs it, or why there is none."""

from __future__ import annotations

import json
import pickle
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.errors import FxguardError
from fxguard.report.load import load_report
from support.loading import module_of

LOG = """
import torch
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        p = torch.sigmoid(x)
        return torch.log(1 - p)  # of the others
"""
DEGREE = """
from torch import nn


class Net(nn.Module):
    def forward(self, adj):
        deg = adj.sum(1)
        return deg.pow(-0.5)
"""
ROOT = """
import torch
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        return torch.sqrt((x * x).sum(-1))
"""
ONE_ELEMENT = """
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        return (x - x.mean()) / (x.std() + 1e-8)
"""
SQUARES = """
import torch
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean_square + 1e-6)
"""

names = iter(range(10**6))


def loaded(folder: Path, code: str) -> ModuleType:
    file = folder / "train.py"
    file.write_text(code, encoding="utf-8")
    return module_of(file, f"train_{next(names)}")


def report_on(module: ModuleType, *inputs: Tensor) -> fxguard.types.Report:
    """The report on one batch, and its backward."""
    found: list[fxguard.types.Report] = []
    model = fxguard.instrument(module.Net(), on_detect=found.append)
    made = model(*inputs)
    if not found and made.requires_grad:
        made.sum().backward()
    assert found, "no report"
    return found[0]


def applied(folder: Path, diff: str) -> ModuleType:
    """The file after ``git apply``."""
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn"], cwd=folder, input=diff.encode(), check=False
    )
    assert done.returncode == 0
    return module_of(folder / "train.py", f"train_{next(names)}")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_exact_fix_becomes_a_patch(here: Path) -> None:
    """It repairs: the value is that of float64."""
    x = torch.tensor([40.0, 1.0])
    module = loaded(here, LOG)
    diff = report_on(module, x).patch()
    assert (
        diff
        == """fix: take logsigmoid(-x) instead of log(1 - sigmoid(x)) (exact)
the same function and gradient in exact arithmetic; it was not run
--- a/train.py
+++ b/train.py
@@ -6,4 +6,4 @@
 class Net(nn.Module):
     def forward(self, x):
         p = torch.sigmoid(x)
-        return torch.log(1 - p)  # of the others
+        return nn.functional.logsigmoid(-x)  # of the others
"""
    )
    assert (here / "train.py").read_text() == LOG
    fixed = applied(here, diff).Net()(x)
    assert torch.allclose(fixed.double(), nn.functional.logsigmoid(-x.double()))


@pytest.mark.parametrize(
    ("code", "inputs", "line"),
    [
        (DEGREE, torch.tensor([[0.0, 0.0], [1.0, 1.0]]), "deg.clamp(min=1).pow(-0.5)"),
        (ROOT, torch.zeros(2, 3, requires_grad=True), "torch.sqrt((x * x).sum(-1) + 1e-12)"),
        (ONE_ELEMENT, torch.ones(1), "/ (x.std(correction=0) + 1e-8)"),
        (SQUARES, torch.full((1, 4), 400.0).half(), "mean_square = x.float().pow(2).mean("),
    ],
)
def test_a_tried_fix_becomes_a_patch(here: Path, code: str, inputs: Tensor, line: str) -> None:
    """It says on what it was tried. Value and gradient are finite after it."""
    diff = report_on(loaded(here, code), inputs).patch()
    assert "\ntried on " in diff
    assert line in diff
    inputs.grad = None
    made = applied(here, diff).Net()(inputs)
    assert made.isfinite().all()
    assert made.dtype == inputs.dtype
    if inputs.requires_grad:
        made.sum().backward()
        assert inputs.grad is not None
        assert inputs.grad.isfinite().all()


COUNTS = """
import torch
from torch import nn

torch.manual_seed(0)
counts = torch.poisson(torch.full((16, 4), 2.0))
features = torch.log(counts)
model = nn.Linear(4, 2)
with fxguard.watch(model):
    model(features)
"""
RATIO = """
import torch
from torch import nn


class Lars(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            ratio = p.norm() / p.grad.norm()
            p.add_(p.grad * ratio, alpha=-0.1)


model = nn.Linear(2, 2, bias=False)
nn.init.zeros_(model.weight)
optimizer = Lars(model.parameters(), {})
with fxguard.watch(model):
    model(torch.zeros(1, 2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (COUNTS, "+features = torch.log1p(counts)\n"),
        (
            RATIO,
            "+            ratio = torch.where((p.norm() > 0) & (p.grad.norm() > 0), "
            "p.norm() / p.grad.norm(), 1.0)\n",
        ),
    ],
)
def test_what_a_script_computed_itself_becomes_a_patch(here: Path, code: str, line: str) -> None:
    """Numbers that it gave to a model, and the step of its own optimizer."""
    file = here / "train.py"
    file.write_text("import fxguard\n" + code, encoding="utf-8")
    with pytest.raises(fxguard.NonFiniteError) as caught:
        module_of(file, f"train_{next(names)}")
    diff = caught.value.report.patch()
    assert "\ntried on 0" in diff
    assert line in diff
    applied(here, diff)


def test_logarithms_of_other_numbers_are_not_taken_for_counts(here: Path) -> None:
    code = COUNTS.replace("torch.poisson(", "2.3 * torch.poisson(")
    (here / "train.py").write_text("import fxguard\n" + code, encoding="utf-8")
    with pytest.raises(fxguard.NonFiniteError) as caught:
        module_of(here / "train.py", f"train_{next(names)}")
    with pytest.raises(FxguardError, match="does not rewrite one expression"):
        caught.value.report.patch()


def test_a_fix_in_words_only_is_refused(here: Path) -> None:
    code = LOG.replace("torch.log(1 - p)", "torch.softmax(x + torch.log(x * 0), 0)")
    with pytest.raises(FxguardError, match="no patch: "):
        report_on(loaded(here, code), torch.ones(2)).patch()


def test_a_file_that_was_changed_since_is_refused(here: Path) -> None:
    """In the line, or above it."""
    module = loaded(here, LOG)
    for changed in (
        LOG.replace("1 - p", "1 - 2 * p"),
        "\n" + LOG,
        LOG.replace("(x)\n", "(2 * x)\n"),
    ):
        report = report_on(module, torch.tensor([40.0]))
        (here / "train.py").write_text(changed, encoding="utf-8")
        with pytest.raises(FxguardError, match="was changed since it was run"):
            report.patch()
        (here / "train.py").write_text(LOG, encoding="utf-8")
        report.patch()


def test_a_report_is_pickled_with_what_it_needs(here: Path) -> None:
    """A process hands it to another one."""
    report = report_on(loaded(here, LOG), torch.tensor([40.0]))
    again = pickle.loads(pickle.dumps(report))
    assert again.patch() == report.patch()


def test_a_file_that_is_gone_is_refused(here: Path) -> None:
    report = report_on(loaded(here, LOG), torch.tensor([40.0]))
    (here / "train.py").unlink()
    with pytest.raises(FxguardError, match="is no file that could be changed"):
        report.patch()


def test_a_line_of_a_library_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxguard.patch.made.is_of_library", lambda file: True)
    with pytest.raises(FxguardError, match=r"train.py:\d+ is the code of a library"):
        report_on(loaded(here, LOG), torch.tensor([40.0])).patch()


def test_two_equal_operations_of_a_line_are_refused(here: Path) -> None:
    """On every version of Python."""
    code = ROOT.replace("torch.sqrt((x * x).sum(-1))", "torch.sqrt(x[0]) + torch.sqrt(x[1])")
    with pytest.raises(FxguardError, match="2 expressions there are sqrt"):
        report_on(loaded(here, code), torch.zeros(2, 2, requires_grad=True)).patch()


def test_blown_up_weights_are_refused(here: Path) -> None:
    """The fix of weights that have grown is a smaller learning rate."""
    import dataclasses

    report = report_on(loaded(here, LOG), torch.tensor([40.0]))
    grown = fxguard.types.Growth("fc.weight", 1e30, 0.1, 3)
    with pytest.raises(FxguardError, match="not in an expression"):
        dataclasses.replace(report, grown=(grown,)).patch()


def test_a_report_from_a_file_is_refused(here: Path) -> None:
    """The rewrites are in it, and it is read as it was written."""
    report = report_on(loaded(here, LOG), torch.tensor([40.0]))
    (here / "report.json").write_text(report.to_json())
    data = json.loads((here / "report.json").read_text())
    again = load_report(here / "report.json")
    assert data["origins"][0]["fixes"][0]["rewrites"] == list(report.origins[0].fixes[0].rewrites)
    assert again.origins == report.origins
    assert again.origins[0].fixes[0].rewrites == report.origins[0].fixes[0].rewrites
    with pytest.raises(FxguardError, match="does not know the program"):
        again.patch()
