"""Fixes are run with the rest of the graph behind them: what then happens is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.findings import Fix
from fxguard.graph.evidence import Evidence, Operand
from fxguard.patch.fix_trials import in_words, tried_first
from fxguard.report.load import load_report
from fxguard.rerun.rest import Next, Rest

ALL = "with it the model's output, its gradients and a step are finite"
FORWARD = "with it the model's output is finite"
X = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.5, 0.0]])


class Net(nn.Module):
    """A layer of ones, and what a test computes of its result."""

    def __init__(self, forward: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.of = forward

    def forward(self, x: Tensor) -> Any:
        return self.of(x * self.weight)


def report_of(
    forward: Callable[[Tensor], Any], *, backward: bool = False, backend: str = ""
) -> fxguard.types.Report:
    reports: list[fxguard.types.Report] = []
    model = Net(forward)
    fxguard.instrument(model, on_detect=reports.append)
    try:
        made = (torch.compile(model, backend=backend) if backend else model)(X.clone())
        if backward:
            made.sum().backward()
    finally:
        fxguard.remove(model)
    assert reports
    return reports[0]


def thens(report: fxguard.types.Report) -> list[str]:
    return [fix.then for fix in report.origins[0].fixes]


def test_a_bound_makes_the_output_finite() -> None:
    report = report_of(lambda h: h.log().sum())
    assert report.origins[0].fixes[0].then == ALL
    assert ALL in str(report)
    assert ALL not in report.message


def test_what_fails_next_is_named_with_its_line() -> None:
    def forward(h: Tensor) -> Tensor:
        a = h.log()
        return (a - 5).sqrt().sum()

    (then,) = {each for each in thens(report_of(forward)) if each}
    assert then.startswith("with it sqrt (test_rest_of_graph.py:")
    assert then.endswith(") makes NaN next")


def test_what_raises_next_is_named() -> None:
    """The clamped logarithm leaves a matrix that has no Cholesky factor."""

    def forward(h: Tensor) -> Tensor:
        a = h.log()
        finite = torch.where(a.isinf().any(), torch.eye(3), -torch.eye(3))
        return torch.linalg.cholesky(finite + 0 * a.sum().nan_to_num(0, 0, 0)).sum() + a.sum()

    assert any(
        "cholesky" in each and each.endswith("raises next") for each in thens(report_of(forward))
    )


def test_a_gradient_that_is_still_bad_is_said() -> None:
    """The root of a second input has no derivative at 0, whatever the logarithm is."""
    report = report_of(lambda h: h.log().sum() + (h * 0).sqrt().sum())
    assert f"{FORWARD}, and its gradients are not" in thens(report)


def test_another_origin_keeps_the_output_bad() -> None:
    """The reciprocal of the same zero is not repaired by the logarithm's fix."""
    report = report_of(lambda h: h.log().sum() + h.reciprocal().sum())
    assert all(ALL not in each and FORWARD not in each for each in thens(report))


def test_a_mask_behind_it_is_no_failure() -> None:
    def forward(h: Tensor) -> Tensor:
        scores = 1 / (h - 0.5)
        return scores.masked_fill(h > 1, float("-inf")).softmax(-1).square().sum()

    assert ALL in thens(report_of(forward))


def test_without_gradients_the_forward_is_said() -> None:
    with torch.no_grad():
        report = report_of(lambda h: h.log().sum())
    assert FORWARD in thens(report)


def test_a_whole_expression_is_replaced() -> None:
    """log(sum(exp)) is one expression of three operations, the first of which fails."""
    report = report_of(lambda h: (h * 100).exp().sum(-1).log().sum())
    first = report.origins[0].fixes[0]
    assert "logsumexp" in first.text
    assert first.then == ALL


def test_a_relu_is_replaced_where_it_stands() -> None:
    report = report_of(lambda h: (h * 0.7 - 1).relu().log().sum())
    first = report.origins[0].fixes[0]
    assert "softplus" in first.text
    assert first.then == ALL


def test_the_rest_behind_a_graph_break_is_run() -> None:
    def forward(h: Tensor) -> Tensor:
        a = h.log() * 2
        torch._dynamo.graph_break()
        return a.sum()

    assert FORWARD in thens(report_of(forward))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_under_a_compiler(backend: str) -> None:
    assert ALL in thens(report_of(lambda h: h.log().sum(), backend=backend))


def test_a_backward_is_run_with_the_fix() -> None:
    report = report_of(lambda h: h.sqrt(), backward=True)
    assert report.origins[0].what == "sqrt"
    assert "with it the gradients and a step are finite" in thens(report)


@pytest.mark.parametrize("name", ["eigh", "svd"])
def test_equal_eigenvalues_want_distinct_numbers(name: str) -> None:
    """Values come first; distinct numbers on the diagonal are run, and the same eps is not said."""

    def forward(h: Tensor) -> Tensor:
        found = getattr(torch.linalg, name)(torch.diag(h[0] * 0 + 2))
        return found[1 if name == "eigh" else 0].pow(3)

    fixes = report_of(forward, backward=True).origins[0].fixes
    assert f"{'eigvalsh' if name == 'eigh' else 'svdvals'}'s values" in fixes[0].text
    assert "distinct numbers" in fixes[1].text
    assert fixes[1].then == "with it the gradients and a step are finite"


def test_nothing_of_the_program_changes() -> None:
    """Parameters, gradients, random numbers, and the exception itself."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    model = Net(lambda h: nn.functional.dropout(h.log(), 0.0).sum())
    fxguard.instrument(model, on_detect=lambda report: None)
    model(X.clone())
    assert model.weight.grad is None
    assert model.weight.tolist() == [1.0, 1.0, 1.0]
    assert torch.equal(torch.get_rng_state(), state)


def test_json_has_it(tmp_path: Any) -> None:
    report = report_of(lambda h: h.log().sum())
    path = tmp_path / "report.json"
    path.write_text(report.to_json())
    assert load_report(path).origins[0].fixes[0].then == ALL


FIXES = tuple(Fix("advice", text) for text in "abc")


def ordered(*rests: Rest | None) -> list[str]:
    report = report_of(lambda h: h.log().sum())
    origin = report.origins[0]
    report = dataclasses.replace(report, origins=(dataclasses.replace(origin, fixes=FIXES),))
    zero = Operand(0.0, 0.0, dtype="float32")
    evidence = Evidence("log", "float32", (0,), float("-inf"), (zero,))
    given = dict(zip(FIXES, rests, strict=True))
    return [fix.text for fix in tried_first(report, evidence, None, given.get).origins[0].fixes]


def test_the_order_is_that_of_the_rest() -> None:
    """What was not run keeps its place; where all fail next, the order is as it was."""
    well, bad = Rest(True, None, True), Rest(False, Next("sqrt", "NaN", None))
    assert ordered(bad, None, well) == ["c", "b", "a"]
    assert ordered(bad, bad, None) == ["a", "b", "c"]
    assert ordered(Rest(True, None, False), well, None) == ["b", "a", "c"]


def test_nothing_is_said_of_what_is_not_known() -> None:
    assert in_words(Rest(False)) == ""


def test_what_returned_it_is_named() -> None:
    """A criterion is no model, and one graph of several is not all of them."""
    well = Rest(True, None, True)
    assert in_words(well, "criterion").startswith("with it the output of criterion, its gradients")
    backward = Rest(True, None, True, is_backward=True, is_whole=False)
    assert in_words(backward) == "with it the gradients of its graph and a step are finite"
    still = Rest(True, None, False, is_backward=True)
    assert in_words(still) == "with it the gradients are still not finite"


def test_after_one_that_ends_well_no_other_is_run() -> None:
    ran = list[str]()

    def run(fix: Fix) -> Rest:
        ran.append(fix.text)
        return Rest(fix.text == "b", None, True)

    report = report_of(lambda h: h.log().sum())
    origin = dataclasses.replace(report.origins[0], fixes=FIXES)
    zero = Operand(0.0, 0.0, dtype="float32")
    evidence = Evidence("log", "float32", (0,), float("-inf"), (zero,))
    report = dataclasses.replace(report, origins=(origin,))
    found = tried_first(report, evidence, None, run).origins[0].fixes
    assert [fix.text for fix in found] == ["b", "a", "c"]
    assert ran == ["a", "b"]


def test_a_forward_that_raised_has_no_output() -> None:
    """Nothing is said of it."""

    def forward(h: Tensor) -> Tensor:
        a = h.log()
        if a.isinf().any():
            raise ValueError("an infinity")
        return a.sum()

    reports: list[fxguard.types.Report] = []
    model = Net(forward)
    fxguard.instrument(model, on_detect=reports.append)
    with pytest.raises(ValueError, match="an infinity"):
        model(X.clone())
    assert all(not each for report in reports for each in thens(report))
