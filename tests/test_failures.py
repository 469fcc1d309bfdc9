"""A forward that raises because of a NaN still ends with the report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxguard


class Sampler(nn.Module):
    """The probabilities of a distribution that is drawn from: NaN is an error there."""

    def forward(self, x: Tensor) -> Tensor:
        probabilities = torch.softmax(torch.log(x), dim=-1)
        return torch.multinomial(probabilities, 1)


class Index(nn.Module):
    """A NaN that was cast to an index is out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(torch.sqrt(x).long().clamp(max=3) + 0)


class Factor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.cholesky(torch.diag(torch.sqrt(x[0])))


class Checkpointed(nn.Module):
    """What raises stands in the body of a higher-order operation."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = Factor()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.factor, x * 1, use_reentrant=False)


class Python(nn.Module):
    """Python raises, between two graphs."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sqrt(x)
        if y.isnan().any():
            raise ValueError("that cannot be")
        return y * 2


class Caught(nn.Module):
    """The model handles the error itself, and goes on."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            y = torch.diag(torch.sqrt(x[0]))
            torch._dynamo.graph_break()  # in one graph torch.compile would not catch it
            return torch.linalg.cholesky(y)
        except torch.linalg.LinAlgError:
            return x


def error_of(model: nn.Module, *args: Tensor) -> Exception:
    """What a call raises."""
    try:
        model(*args)
    except Exception as error:
        return error
    pytest.fail("nothing was raised")


GOOD = torch.full((2, 3), 0.5)
BAD = torch.full((2, 3), -0.5)

RAISING: dict[type[nn.Module], str] = {
    Sampler: "log",
    Index: "sqrt",
    Factor: "sqrt",
    Checkpointed: "sqrt",
    Python: "sqrt",
}


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("kind", RAISING)
def test_the_error_ends_with_the_report(
    kind: type[nn.Module], backend: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The operation is named, and the original exception is the cause."""
    plain = error_of(kind(), BAD)
    model: Any = fxguard.instrument(kind())
    if backend is not None:
        model = torch.compile(model, backend=backend)
    model(GOOD)
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(BAD)
    cause = caught.value.__cause__
    assert type(cause) is type(plain)
    report = caught.value.report
    assert report.origins[0].what == RAISING[kind]
    assert report.origins[0].frame.source is not None
    assert report.error.startswith(type(cause).__name__)
    assert str(report) in capsys.readouterr().err
    guard = fxguard.guard_of(model)
    assert guard.batch_number == 2
    assert guard.last_report is report
    model(GOOD)  # and nothing of it stays


@pytest.mark.parametrize("kind", RAISING)
def test_other_ways_to_be_told(kind: type[nn.Module]) -> None:
    """A callable is given the report, then the original exception goes on."""
    plain = error_of(kind(), BAD)
    reports: list[fxguard.Report] = []
    model = fxguard.instrument(kind(), on_detect=reports.append)
    with pytest.raises(type(plain)) as caught:
        model(BAD)
    assert not isinstance(caught.value, fxguard.FxguardError)
    assert reports[0].origins[0].what == RAISING[kind]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_an_error_that_no_bad_value_caused_passes_through(backend: str | None) -> None:
    """A wrong shape is no report, though the model holds an inf that a `where` discards."""

    class Wrong(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = torch.where(x > 0, torch.log(x), 0.0)
            torch._dynamo.graph_break()
            return x @ y

    model: Any = fxguard.instrument(Wrong())
    if backend is not None:
        model = torch.compile(model, backend=backend)
    error = error_of(model, torch.zeros(2, 3), torch.ones(2, 3))
    assert not isinstance(error, fxguard.NonFiniteError)
    assert fxguard.guard_of(model).batch_number == 1


def test_an_error_that_the_model_handles_is_none() -> None:
    model = fxguard.instrument(Caught())
    assert torch.equal(model(BAD), BAD)


def test_the_named_backend_reports_too() -> None:
    backend = fxguard.backend("eager")
    model = torch.compile(Factor(), backend=backend)
    model(GOOD)
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(BAD)
    assert isinstance(caught.value.__cause__, torch.linalg.LinAlgError)
    assert backend.last_report is caught.value.report
