"""Weights that are bad in one batch and were good in the one before: since when, and what to do."""

from __future__ import annotations

import contextlib
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import fxguard
from fxguard.source.parameter_loops import writes_of_parameters
from support.programs import run_python


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def report_after(write: str, *, watched: bool = False) -> fxguard.types.Report:
    """On a second batch, after something has written NaN into weights."""
    model, x = net(), torch.ones(2, 4)
    found: list[fxguard.types.Report] = []
    fxguard.instrument(model, on_detect=found.append, backward=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fxguard.watch(model) if watched else contextlib.nullcontext():
        model(x).sum().backward()
        with torch.no_grad():
            if write == "step":
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, torch.inf)
                optimizer.step()
            model[0].weight[0, 0] = torch.nan
        model(x)
    return found[-1]


def test_many_weights_are_one_sentence() -> None:
    """Infinite ones and NaN, in the order of the model; and how to see what did it."""
    report = report_after("step")
    first, fix = report.verdict[:2]
    assert first == (
        "all 4 weights turned NaN or -inf between batch 0 and batch 1: "
        "0.weight, 0.bias, 2.weight and 1 more"
    )
    assert "fxguard.watch(model)" in fix
    assert report.message == f"batch 1: {first}"


def test_a_write_by_hand() -> None:
    """No optimizer has made a step: something else writes weights."""
    report = report_after("by hand")
    assert report.verdict[0] == "weight 0.weight turned NaN between batch 0 and batch 1"
    assert report.fix.startswith("look at what writes weights between these batches: no step of")


def test_a_write_in_a_loop_that_is_watched() -> None:
    """It is not advised to watch it."""
    report = report_after("by hand", watched=True)
    assert report.verdict[0] == "weight 0.weight turned NaN between batch 0 and batch 1"
    assert "fxguard.watch" not in report.fix


def test_a_weight_that_was_bad_from_the_start() -> None:
    """Nothing is said of earlier batches, also where another one has found it."""
    model = net()
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    found: list[fxguard.types.Report] = []
    fxguard.instrument(model, on_detect=found.append)
    for _ in range(2):
        model(torch.ones(2, 4))
    assert [report.message for report in found] == [
        "batch 0: weight 0.weight holds NaN",
        "batch 1: weight 0.weight holds NaN",
    ]


def test_a_weight_that_no_earlier_batch_has_read() -> None:
    """Nobody knows what it held then."""

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, second: bool) -> torch.Tensor:
            return (self.b if second else self.a)(x)  # type: ignore[no-any-return]

    model = fxguard.instrument(Expert(), on_detect="raise")
    model(torch.ones(1, 2), False)
    with torch.no_grad():
        model.b.weight[0, 0] = torch.nan
    with pytest.raises(fxguard.NonFiniteError, match=r"weight b\.weight holds NaN"):
        model(torch.ones(1, 2), True)


def test_a_weight_that_was_bad_and_did_no_harm_before() -> None:
    """It is written again, and nobody may say that it was good."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.where(mask, torch.zeros(2), x * self.weight)

    model = fxguard.instrument(Masked())
    with torch.no_grad():
        model.weight[0] = torch.nan
        model(torch.ones(2), torch.tensor([True, False]))
        model.weight[0] = torch.nan
        with pytest.raises(fxguard.NonFiniteError, match="weight weight holds NaN"):
            model(torch.ones(2), torch.tensor([False, False]))


def verdict_on(source: str, folder: Path) -> list[str]:
    """What `fxguard run` says of a script, from the headline on."""
    (folder / "train.py").write_text(textwrap.dedent(source))
    ended = run_python(folder, "-m", "fxguard", "run", "train.py")
    assert ended.returncode == 3, ended.stderr
    return ended.stderr.splitlines()


AVERAGE = """
    import copy, torch
    student = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    teacher = copy.deepcopy(student)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    for step in range(2):
        x = torch.randn(8, 4)
        with torch.no_grad():
            target = teacher(x)
        loss = (student(x) - target).pow(2).mean()
        loss.backward()
        optimizer.step()
        decay = float("nan")
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters()):
                {update}
"""


@pytest.mark.parametrize(
    ("update", "says"),
    [
        ("torch._foreach_mul_([old], decay)", "look at what writes weights between these batches"),
    ],
)
def test_an_average_of_weights_that_turned_bad(update: str, says: str, tmp_path: Path) -> None:
    """The model is named by its variable, and the line that writes its parameters is quoted."""
    headline, fix, *_ = verdict_on(AVERAGE.format(update=update), tmp_path)
    assert headline == (
        "all 4 weights turned NaN between batch 0 and batch 1: "
        "teacher.0.weight, teacher.0.bias, teacher.1.weight and 1 more"
    )
    assert fix.startswith(f"  fix: {says}")


@pytest.mark.parametrize(
    ("update", "what"),
    [
        ("old.mul_(decay).add_(new, alpha=1 - decay)", "mul_"),
        ("old *= decay", "mul_"),
        ("old.data = old * decay", "mul"),
    ],
)
def test_what_wrote_an_average_is_named(update: str, what: str, tmp_path: Path) -> None:
    """It was seen to write to a weight itself, or to make what that is given."""
    headline, line, *_ = verdict_on(AVERAGE.format(update=update), tmp_path)
    assert headline.startswith(f"{what} made NaN (train.py:16)")
    assert line == f"  train.py:16: {update}"


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("p.requires_grad_(False)", 0),
        ("p.grad.mul_(0.5)", 0),
        ("p.grad = None", 0),
        ("total += p.sum()", 0),
        ("p.sub_(p.grad, alpha=0.1)", 1),
        ("p[0] = 0", 1),
        ("p.data.clamp_(-1, 1).mul_(2)", 1),
    ],
)
def test_only_writes_of_parameters_are_quoted(line: str, count: int, tmp_path: Path) -> None:
    """Not those of gradients or of sums."""
    file = tmp_path / "train.py"
    file.write_text(f"for p in model.parameters():\n    {line}\nfor x in data:\n    x.mul_(2)")
    assert len(writes_of_parameters(str(file))) == count
