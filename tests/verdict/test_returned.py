"""Who returned a bad value: the model, or another module, by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.api.outermost import OutermostModules
from fxguard.options import Options

X = torch.rand(4, 3)
Y = torch.rand(4, 3).round()
RETURNED = "returned it"


@dataclass
class Output:
    """What a module returns, in a record."""

    value: Tensor


class Model(nn.Module):
    """Returns infinities out of a container."""

    def __init__(self, wrap: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap((self.head(x) * 0).log() + 1)


class Fine(Model):
    """Returns finite numbers."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


class Weighted(nn.Module):
    """A criterion of the script's own, with weights that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return ((out - y) ** 2).mean() / self.scale + 1


class Plain(nn.Module):
    """A criterion of the script's own, without weights."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return ((out - y) ** 2 * 0).mean().log() + 1


def lines_of(script: Callable[[], Any]) -> list[str]:
    """The lines of each report that say who returned something, in the order of the reports."""
    found: list[fxguard.types.Report] = []
    torch.manual_seed(0)
    with OutermostModules(Options(on_detect=found.append), follow_losses=True):
        script()
    assert found
    return [
        line.rpartition("; ")[2] for report in found for line in report.verdict if RETURNED in line
    ]


def weights_of_criterion() -> None:
    model, criterion = Fine(), Weighted()
    criterion(model(X), Y).backward()


def test_a_criterion_is_not_the_model() -> None:
    """It has the name that the script has for it."""
    assert lines_of(weights_of_criterion) == ["criterion returned it"]


def test_a_criterion_without_a_name_has_that_of_its_class() -> None:
    """It was instrumented by itself."""
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, torch.inf]))
    found: list[fxguard.types.Report] = []
    fxguard.instrument(criterion, on_detect=found.append)(X, Y)
    assert "; BCEWithLogitsLoss returned it" in str(found[0])


def test_a_part_that_a_script_calls_is_not_the_model() -> None:
    """The script calls a module inside of it, as methods other than forward do."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Model(), Fine()

        def encode(self, x: Tensor) -> Tensor:
            out: Tensor = self.encoder(x)
            return out

    def script() -> None:
        vae = Whole()
        vae.encode(X)

    assert lines_of(script) == ["vae.encoder returned it"]


def test_a_teacher_is_not_the_model() -> None:
    """Of two models, the one that returned it is named."""

    def script() -> None:
        student, teacher = Fine(), Model()
        with torch.no_grad():
            targets = teacher(X)
        (student(X) - targets.nan_to_num()).mean().backward()

    assert lines_of(script) == ["teacher returned it"]


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"out": x}, lambda x: (x, 1), Output])
def test_the_model_returned_it(wrap: Callable[[Tensor], Any]) -> None:
    """The clean twin: in whatever it was returned."""

    def script() -> None:
        Model(wrap)(X)

    assert lines_of(script) == ["the model returned it"]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_loss_of_the_script_is_returned_by_nobody(is_compiled: bool) -> None:
    """The script computes it, perhaps in a compiled function. The model's output was finite."""

    def loss_of(out: Tensor) -> Tensor:
        return (out * 0).log().mean()

    called = torch.compile(loss_of, backend="aot_eager") if is_compiled else loss_of

    def script() -> None:
        called(Fine()(X)).backward()

    assert lines_of(script) == []


def test_a_function_is_not_the_model() -> None:
    """It is called by its name, also if it reads a model."""
    model, found = Fine(), list[fxguard.types.Report]()

    def loss_of(x: Tensor) -> Tensor:
        return (model(x) * 0).log() + 1

    fxguard.instrument(loss_of, on_detect=found.append)(X)
    assert "; loss_of returned it" in str(found[0])


def test_a_metric_that_reads_outputs_is_not_the_model() -> None:
    """It has no weights."""
    found: list[fxguard.types.Report] = []
    fxguard.instrument(Plain(), on_detect=found.append)(X, Y)
    assert "; Plain returned it" in str(found[0])
