"""Gradients that do not exist: of equal eigenvalues, of a lost rank, of an exponent."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.graph.evidence import Evidence
from fxguard.measure.details import describe
from fxguard.rerun.backward_evidence import BackwardEvidence
from fxguard.verdict.backward import cause_of_backward

Function = Callable[[Tensor], Tensor]


class Of(nn.Module):
    """A function of a matrix that is a weight."""

    def __init__(self, function: Function, matrix: Tensor) -> None:
        super().__init__()
        self.function, self.matrix = function, nn.Parameter(matrix)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.matrix * x)


def report_of(function: Function, matrix: Tensor) -> fxguard.types.Report | None:
    """The report on a backward; None if its gradient is finite."""
    model = fxguard.instrument(Of(function, matrix))
    out = model(torch.ones(()))
    try:
        out.abs().sum().backward()
    except fxguard.NonFiniteError as error:
        return error.report
    assert bool(model.matrix.grad.isfinite().all())
    return None


def eigenvectors(x: Tensor) -> Tensor:
    return torch.linalg.eigh(x).eigenvectors


def left(x: Tensor) -> Tensor:
    return torch.linalg.svd(x)[0]


ONE_TWO_TWO = torch.diag(torch.tensor([1.0, 2.0, 2.0]))
DISTINCT = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
BATCH = torch.stack([DISTINCT, torch.diag(torch.tensor([5.0, 1.0, 5.0]))])


@pytest.mark.parametrize(
    ("function", "matrix", "words", "numbers"),
    [
        (eigenvectors, torch.eye(3), "equal eigenvalues", "eigenvalues 0 and 1 are equal, 1"),
        (eigenvectors, ONE_TWO_TWO, "equal eigenvalues", "eigenvalues 1 and 2 are equal, 2"),
        (eigenvectors, BATCH, "equal eigenvalues", "eigenvalues 1 and 2 are equal, 5"),
        (lambda x: torch.linalg.eig(x)[1].real, ONE_TWO_TWO, "equal eigenvalues", "are equal, 2"),
        (left, ONE_TWO_TWO, "equal singular values", "singular values 0 and 1 are equal, 2"),
        (lambda x: torch.svd(x)[2], torch.eye(2), "equal singular values", "0 and 1 are equal, 1"),
        (lambda x: torch.linalg.qr(x)[0], torch.tensor([[1.0, 2.0], [0.0, 0.0]]),
         "a matrix without full rank", "column 1 is a combination of the columns before it"),
        (lambda x: torch.linalg.qr(x)[0], torch.zeros(2, 2), "a matrix without full rank",
         "column 0 is 0"),
    ],
)  # fmt: skip
def test_the_two_that_are_equal_are_named(
    function: Function, matrix: Tensor, words: str, numbers: str
) -> None:
    """With their indices and their value, in the matrix of the batch that has them."""
    report = report_of(function, matrix)
    assert report is not None
    origin = report.origins[0]
    assert (origin.cause, origin.cause_in_words) == ("singular gradient", words)
    assert numbers in origin.operands
    assert "diagonal" in report.fix


def q(x: Tensor) -> Tensor:
    return torch.linalg.qr(x)[0]


CYCLE = torch.tensor([[2.0, -1, 0, -1], [-1, 2, -1, 0], [0, -1, 2, -1], [-1, 0, -1, 2]])


@pytest.mark.parametrize(
    ("function", "words", "matrices"),
    [
        (eigenvectors, "equal eigenvalues",
         [CYCLE, *(torch.ones(n, n) + a * torch.eye(n) for n in range(3, 9) for a in (0, 1))]),
        (left, "equal singular values",
         [CYCLE @ CYCLE, *(torch.ones(n, n) + torch.eye(n) for n in range(3, 9)),
          *(torch.ones(n, n) for n in range(3, 9))]),
        (q, "a matrix without full rank",
         [torch.ones(3, 5), *(torch.ones(n, n) for n in range(2, 9))]),
    ],
)  # fmt: skip
def test_it_is_singular_whatever_the_roundings_are(
    function: Function, words: str, matrices: list[Tensor]
) -> None:
    """Integer matrices that are singular in exact arithmetic.

    Which of them has a bad gradient depends on how this CPU rounds. The one in float64 is finite at
    some of those, where its own numbers come out a rounding apart.
    """
    found = [report_of(function, matrix) for matrix in matrices]
    reports = [report for report in found if report is not None]
    assert reports
    for report in reports:
        [origin] = report.origins
        assert (origin.cause, origin.cause_in_words) == ("singular gradient", words)
        assert report.why == ("it does not exist in float64 either: not precision",)


@pytest.mark.parametrize(
    ("same", "wide", "cause"),
    [
        (math.nan, math.nan, "singular gradient"),
        (1e9, math.nan, "singular gradient"),  # float32 rounded the columns that depend
        (math.nan, 1e9, "rounding"),  # ... and made these depend
        (1e9, 1e9, "rounding"),
        (math.nan, None, "singular gradient"),
    ],
)
def test_the_matrix_without_roundings_decides(same: float, wide: float | None, cause: str) -> None:
    """Where it has no gradient either, more digits do not help."""
    gradient = Evidence(
        kind="linalg_qr",
        dtype="float32",
        index=(0, 0),
        number=math.nan,
        operands=(),
        same=same,
        wide=wide,
        degeneracy="column 1 is a combination of the columns before it",
    )
    seen = BackwardEvidence(gradient, describe(torch.tensor([math.nan])), "float32")
    assert cause_of_backward(seen) == cause


@pytest.mark.parametrize(
    ("function", "matrix"),
    [
        (eigenvectors, DISTINCT),
        (left, DISTINCT),
        (torch.linalg.eigvalsh, torch.eye(3)),
        (torch.linalg.svdvals, torch.eye(3)),
        (lambda x: torch.linalg.qr(x)[0], DISTINCT),
    ],
)
def test_what_the_fix_says_has_a_gradient(function: Function, matrix: Tensor) -> None:
    """Distinct ones, and the values alone: nothing is reported."""
    assert report_of(function, matrix) is None


def test_eigenvalues_that_rounding_made_equal_say_so() -> None:
    """In float64 they differ: the cause is the rounding."""
    shift = torch.tensor([1e-9, 2e-9, 3e-9])
    report = report_of(lambda x: eigenvectors(x + torch.diag(shift)), torch.eye(3))
    assert report is not None
    origin = report.origins[0]
    assert (origin.cause, origin.cause_in_words) == (
        "rounding",
        "equal eigenvalues, after rounding",
    )


class Power(nn.Module):
    """A power with a learned exponent."""

    def __init__(self, exponent: float, *, clamped: bool = False) -> None:
        super().__init__()
        self.p, self.clamped = nn.Parameter(torch.tensor(exponent)), clamped
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        return ((x.clamp(min=1e-12) if self.clamped else x) ** self.p).sum()


def backward_of(model: nn.Module, *numbers: float) -> fxguard.types.Report | None:
    """The report on the backward of a model of these numbers; None if it is healthy."""
    out = fxguard.instrument(model)(torch.tensor(numbers))
    try:
        out.backward()
    except fxguard.NonFiniteError as error:
        return error.report
    return None


def test_the_gradient_of_an_exponent_is_told_as_what_it_is() -> None:
    """(-0.5) ** 3 is a number, and its derivative by the exponent needs log(-0.5)."""
    report = backward_of(Power(3.0), 2.0, -0.5)
    assert report is not None
    [origin] = report.origins
    assert origin.cause == "domain"
    assert origin.cause_in_words == "the exponent's gradient needs the log of a negative number"
    assert report.fix.startswith("clamp the base, ")
    assert backward_of(Power(3.0, clamped=True), 2.0, -0.5) is None
    assert math.isfinite((-0.5) ** 3.0)


@pytest.mark.parametrize("numbers", [(2.0, 0.5), (2.0, 0.0)])
def test_exponents_of_what_is_not_negative_are_healthy(numbers: tuple[float, ...]) -> None:
    """torch takes 0 as the gradient where the base is 0."""
    assert backward_of(Power(3.0), *numbers) is None


def test_the_gradient_of_a_base_stays_that_of_the_base() -> None:
    """The square root of 0 has an infinite derivative by its base, and is told so."""
    report = backward_of(Power(0.5), 1.0, 0.0)
    assert report is not None
    assert (report.origins[0].cause, report.origins[0].cause_in_words) == ("singular gradient", "")
    assert report.fix.startswith("(u + 1e-12) ** self.p")


def test_a_number_to_a_learned_power_has_its_base_first() -> None:
    """The only tensor of pow(-2, p) is the exponent."""

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.tensor([2.0]))

        def forward(self, x: Tensor) -> Tensor:
            return (torch.pow(-2.0, self.p) * x).sum()

    report = backward_of(Base(), 1.0)
    assert report is not None
    assert "exponent" in report.origins[0].cause_in_words
