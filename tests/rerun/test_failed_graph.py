"""A forward that raises because of a NaN still ends with the report."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxguard
from support.needs import TORCH


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


@pytest.fixture(autouse=True)
def exceptions_go() -> Iterator[None]:
    """In torch 2.11 a checkpoint that raised leaves its hooks in place until the exception goes."""
    yield
    gc.collect()


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


class Entering(Index):
    """The index enters the body in which it is out of range."""

    def forward(self, x: Tensor) -> Tensor:
        index = torch.sqrt(x).long().clamp(max=3)
        return checkpoint(self.embedding, index, use_reentrant=False)


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
    Entering: "sqrt",
    Python: "sqrt",
}


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("kind", RAISING)
def test_the_error_ends_with_the_report(
    kind: type[nn.Module], backend: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The operation is named, and the original exception is the cause."""
    plain: Exception | None = error_of(kind(), BAD)
    model: Any = fxguard.instrument(kind())
    if backend is not None:
        model = torch.compile(model, backend=backend)
        if TORCH < (2, 12) and kind in (Factor, Checkpointed):
            plain = None  # AOTAutograd's cholesky gave NaN then, and raised nothing
    model(GOOD)
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(BAD)
    cause = caught.value.__cause__
    assert type(cause) is type(plain)
    report = caught.value.report
    assert report.origins[0].what == RAISING[kind]
    assert report.origins[0].frame.source is not None
    assert report.error.startswith("" if cause is None else type(cause).__name__)
    assert str(report) in capsys.readouterr().err
    guard = fxguard.guard_of(model)
    assert guard.batch_number == 2
    assert guard.last_report is report
    model(GOOD)  # and nothing of it stays


@pytest.mark.parametrize("kind", RAISING)
def test_other_ways_to_be_told(kind: type[nn.Module]) -> None:
    """A callable is given the report, then the original exception goes on."""
    plain = error_of(kind(), BAD)
    reports: list[fxguard.types.Report] = []
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


# What raises is the first operation.


def bad_rows(report: fxguard.types.Report) -> list[tuple[str, str]]:
    return [(row.label, row.note) for row in report.frames[-1].rows]


class First(nn.Module):
    """Factors a matrix before anything else."""

    def __init__(self, *, captured: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))
        run = self.factored
        self.run = run if captured else torch.compiler.disable(run)

    def factored(self, x: Tensor, given: Tensor) -> Tensor:
        # The weight is read as it is, or the input is.
        return torch.linalg.cholesky(self.weight if given.shape[0] == 1 else x) + 1

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        result: Tensor = self.run(x, given)
        return result


INPUT, WEIGHT = torch.ones(2), torch.ones(1)  # which one is read


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "in Python"])
def test_an_operation_that_raises_on_a_bad_input_is_reported(captured: bool) -> None:
    """The report ends with the operation that raised and what it had read."""
    model = fxguard.instrument(First(captured=captured))
    bad = torch.eye(3)
    bad[0, 0] = torch.nan
    for _ in range(2):  # also once the batch before was a failure
        with pytest.raises(fxguard.NonFiniteError) as caught:
            model(bad, INPUT)
        assert isinstance(caught.value.__cause__, torch.linalg.LinAlgError)
        assert "`x`" in caught.value.report.origins[0].what
        assert caught.value.report.frames[-1].kind == "linalg_cholesky"
        assert bad_rows(caught.value.report) == [("input[0]", ""), ("output", "raised")]
    assert isinstance(error_of(model, -torch.eye(3), INPUT), torch.linalg.LinAlgError)
    assert torch.equal(model(torch.eye(3), INPUT), torch.eye(3) + 1)


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "in Python"])
def test_an_operation_that_raises_on_a_bad_weight_is_reported(captured: bool) -> None:
    """No graph measures weights: they are looked at where the operation that raised read them."""
    model = fxguard.instrument(First(captured=captured))
    with torch.no_grad():
        model.weight[1, 1] = torch.nan
    with pytest.raises(fxguard.NonFiniteError) as caught:
        model(torch.eye(3), WEIGHT)
    assert isinstance(caught.value.__cause__, torch.linalg.LinAlgError)
    assert caught.value.report.origins[0].what == "weight weight"
    # The weight is bad still, and what raises now does not read it.
    assert isinstance(error_of(model, -torch.eye(3), INPUT), torch.linalg.LinAlgError)


@pytest.mark.parametrize("stance", ["default", "force_eager"], ids=["captured", "in Python"])
def test_a_quantized_module_that_raises_on_nan_is_reported(stance: str) -> None:
    """What it cannot quantize is named; a healthy input gives the plain model's bits."""
    linear = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval()
    plain = torch.ao.quantization.quantize_dynamic(linear, {nn.Linear})
    model = fxguard.instrument(copy.deepcopy(plain))
    x = torch.linspace(-1, 1, 16).view(2, 8)
    with torch.compiler.set_stance(stance):
        assert torch.equal(model(x), plain(x))
        with pytest.raises(fxguard.NonFiniteError) as caught:
            model(x * torch.nan)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert caught.value.report.origins[0].problem == "nan"


def test_an_operation_whose_error_was_handled_is_not_reported() -> None:
    """The model raises something else later on, for another reason."""

    class Later(nn.Module):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            try:
                x = torch.linalg.cholesky(x)
            except torch.linalg.LinAlgError:
                x = torch.eye(3)
            return x @ torch.ones(2, 2)

    error = error_of(fxguard.instrument(Later()), torch.full((3, 3), torch.nan))
    assert not isinstance(error, fxguard.FxguardError)
