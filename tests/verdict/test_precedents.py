"""Batches with intended infinities are judged once for each kind of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.verdict import judge, report_of

INF = float("inf")


class Masked(nn.Module):
    """Scores under a mask that is given, and a logarithm that a ``where`` discards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = torch.where(x > 0, torch.log(x.relu()), x)
        return torch.softmax(self.linear(x) + mask + self.bias, dim=-1)


X = torch.tensor([[1.0, 0.0, 2.0, 3.0]])
MASK = torch.tensor([0.0, 0.0, -INF, -INF])


@pytest.fixture
def judgments(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was judged, in order."""
    made: list[Any] = []

    class Counted(judge.Judgment):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(report_of, "Judgment", Counted)
    return made


def guarded(reports: list[fxguard.types.Report]) -> nn.Module:
    torch.manual_seed(0)
    return fxguard.instrument(Masked(), on_detect=reports.append)


def test_the_same_kind_is_judged_once(judgments: list[Any]) -> None:
    """Other numbers, the same infinities: the second batch costs no judgment; notes stay."""
    reports: list[fxguard.types.Report] = []
    model = guarded(reports)
    for scale in (1.0, 2.0, 3.0):
        model(X * scale, MASK)
    assert len(judgments) == 1
    assert [note.what for note in fxguard.guard_of(model).notes] == ["log"]
    assert not reports


def spoil_weight(model: Masked) -> None:
    with torch.no_grad():
        model.linear.weight[0, 0] = INF


def spoil_buffer(model: Masked) -> None:
    model.bias[2] = INF


def mask_with_positive(model: Masked) -> Tensor:
    return torch.tensor([0.0, 0.0, -INF, INF])


def all_masked(model: Masked) -> Tensor:
    return torch.full((4,), -INF)


@pytest.mark.parametrize("change", [spoil_weight, spoil_buffer, mask_with_positive, all_masked])
@pytest.mark.parametrize("batches", [1, 2, 5])
def test_a_fault_after_healthy_batches_is_found(
    change: Callable[[Any], Tensor | None], batches: int, judgments: list[Any]
) -> None:
    """Whatever makes the next batch bad, the verdict is that of a model without precedents."""
    reports: list[fxguard.types.Report] = []
    model = guarded(reports)
    for _ in range(batches):
        model(X, MASK)
    assert not reports
    mask = change(model)
    model(X, MASK if mask is None else mask)
    alone: list[fxguard.types.Report] = []
    fresh = guarded(alone)
    mask = change(fresh)
    fresh(X, MASK if mask is None else mask)
    (found,), (expected,) = reports, alone
    messages = [o.message for o in found.origins]
    if change is spoil_weight:  # the batches before have seen it finite
        between = f"turned inf between batch {batches - 1} and batch {batches}"
        messages[0] = messages[0].replace(between, "holds inf")
    assert messages == [o.message for o in expected.origins]


class Joined(nn.Module):
    """Scores under a mask, and a buffer beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sink", torch.zeros(1, 1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.cat([x + mask, self.sink], -1)


def test_a_buffer_that_turned_infinite_is_found_where_no_result_shows_it(
    judgments: list[Any],
) -> None:
    """Results are infinite where the mask is, as before. Other finite numbers are the same kind."""
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(Joined(), on_detect=reports.append)
    for number in (3.0, 2.0, 1.0):
        model.sink.fill_(number)
        model(X, MASK)
    assert len(judgments) == 1
    model.sink.fill_(INF)
    model(X, MASK)
    assert [origin.what for report in reports for origin in report.origins] == ["buffer sink"]


class Scaled(nn.Module):
    """A logarithm times a buffer; a ``where`` discards it at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x.relu().log() * self.scale, x)


def test_a_buffer_that_turned_infinite_is_noted_where_it_is_discarded() -> None:
    """It multiplies -inf, which looks as it did before."""
    model = fxguard.instrument(Scaled())
    model(X)
    model.scale[1] = INF
    model(X)
    assert [note.what for note in fxguard.guard_of(model).notes] == ["log", "buffer scale"]


def test_detections_are_no_precedents(judgments: list[Any]) -> None:
    """The same fault is reported in each batch that has it."""
    reports: list[fxguard.types.Report] = []
    model = guarded(reports)
    spoil_weight(model)
    for _ in range(3):
        model(X, MASK)
    assert [report.batch_number for report in reports] == [0, 1, 2]


class Added(nn.Module):
    """Hands on what it was given: +inf and -inf look the same in the numbers."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + mask


@pytest.mark.parametrize("asks", [True, False])
def test_what_the_numbers_do_not_tell_is_asked(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that holds +inf is none; without the question it would pass for the one before."""
    if not asks:
        monkeypatch.setattr("fxguard.verdict.precedents._fits", lambda one, other: True)
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(Added(), on_detect=reports.append)
    model(X, MASK)
    model(X, -MASK)
    assert len(reports) == asks


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_graphs_between_breaks_have_precedents(inner: str, judgments: list[Any]) -> None:
    """A model of several graphs is a kind of batch of its own."""

    class Broken(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            scores = x + mask
            torch._dynamo.graph_break()
            return scores.softmax(dim=-1)

    model = fxguard.instrument(Broken())
    compiled = torch.compile(model, backend=inner)
    for _ in range(3):
        compiled(X, MASK)
    assert len(judgments) == 1
    with pytest.raises(fxguard.NonFiniteError):
        compiled(X, all_masked(model))  # type: ignore[arg-type]


class Uncaptured(nn.Module):
    """The same model, which TorchDynamo leaves to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Masked()

    @torch.compiler.disable
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        output: Tensor = self.inner(x, mask)
        return output


def test_what_runs_between_graphs_has_precedents(judgments: list[Any]) -> None:
    """A batch like an earlier one costs no judgment, and a bad one is found after it."""
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(Uncaptured(), on_detect=reports.append)
    for scale in (1.0, 2.0, 3.0):
        model(X * scale, MASK)
    assert len(judgments) == 1
    assert not reports
    model(X, mask_with_positive(model.inner))
    model(X, all_masked(model.inner))
    assert [report.batch_number for report in reports] == [3, 4]


class Cast(nn.Module):
    """Hands a sum with a mask on in the dtype that it is told."""

    @torch.compiler.disable
    def forward(self, x: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.softmax((x.to(dtype) + mask.to(dtype)).float(), dim=-1)


def test_dtypes_between_graphs_belong_to_the_kind(judgments: list[Any]) -> None:
    """The same operations in another dtype are another kind of batch."""
    model = fxguard.instrument(Cast())
    for dtype in (torch.float16, torch.bfloat16, torch.float16, torch.bfloat16):
        model(X, MASK, dtype)
    assert len(judgments) == 2


class Inverse(nn.Module):
    """Infinite where it is not taken, with the sign of a zero."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x != 0, 1 / x, x)


def test_signs_between_graphs_belong_to_the_kind(judgments: list[Any]) -> None:
    """-inf and +inf are alike in the numbers, and told apart by what was counted."""
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(Inverse(), on_detect=reports.append)
    for zero in (0.0, -0.0, 0.0, -0.0):
        model(torch.tensor([zero, 1.0]))
    assert len(judgments) == 2
    model(torch.tensor([0.0, -0.0]))
    assert len(judgments) == 3
    assert not reports


def test_where_a_loss_ends_belongs_to_the_kind(judgments: list[Any]) -> None:
    """The same operations, and another one of their results is what backward begins with."""
    model = nn.Linear(2, 2)
    reports: list[fxguard.types.Report] = []
    with fxguard.watch(model, on_detect=reports.append):
        for ends_at_log in (False, False, False, True):
            output = model(torch.ones(1, 2))
            fine, bad = output.square().mean(), (output * 0).log().mean()
            (bad if ends_at_log else fine).backward()
    assert [report.batch_number for report in reports] == [3]
    assert len(judgments) == 3  # from the second batch on, `bad` holds the one before as well
