"""Absorbed values: harmful or not; causes and fixes that a second run has found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fxguard
from fxguard import forgiving
from fxguard.findings import Origin
from fxguard.report.report import Report
from fxguard.rerun.walk import Walk
from fxguard.testing.watch import as_module
from fxguard.verdict import description, second_opinion

HALF = torch.float16
LARGE = torch.tensor([400.0, 300.0], dtype=HALF)  # their squares are infinite


def reports_of(function: Callable[..., Any], *args: Any) -> list[Report]:
    """What is reported of one call."""
    reports: list[Report] = []
    model = fxguard.instrument(as_module(function), on_detect=reports.append)
    model(*args)
    return reports


def norm(x: Tensor) -> Tensor:
    """1 for every number; 0 where the square overflows."""
    return x * torch.rsqrt(x * x)


def cached(x: Tensor, cache: Tensor) -> Tensor:
    cache.copy_(norm(x))
    return x


def cached_in_a_view(x: Tensor, cache: Tensor) -> Tensor:
    cache[0].copy_(norm(x))
    return x + cache[1]


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(x).add_(1)
    return x * y.rsqrt_()


def through_a_view(x: Tensor) -> Tensor:
    y = torch.zeros(2, 2, dtype=x.dtype)
    y[0] = x * x
    return x * y[0].rsqrt()


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(norm, x, use_reentrant=False)


def before_a_break(x: Tensor) -> Tensor:
    y = norm(x)
    torch._dynamo.graph_break()
    return y + 1


def across_a_break(x: Tensor) -> Tensor:
    y = x * x
    torch._dynamo.graph_break()
    return x * torch.rsqrt(y)


def with_dropout(x: Tensor) -> Tensor:
    return functional.dropout(norm(x.repeat(32)), 0.5)


def clipped(x: Tensor) -> Tensor:
    return (x * x).clamp(-65504, 65504)


def nearly_clipped(x: Tensor) -> Tensor:
    return (x * x).clamp(-65000, 65000)


def hidden(x: Tensor) -> Tensor:
    return torch.nan_to_num(x * x)


def in_a_mask(x: Tensor) -> Tensor:
    """A condition turns out otherwise: what left the model is boolean."""
    return 1 / (x * x) == 0


HARMFUL = [
    (norm, (LARGE,)),
    (cached, (LARGE, torch.zeros(2, dtype=HALF))),
    (cached_in_a_view, (LARGE, torch.zeros(2, 2, dtype=HALF))),
    (in_place, (LARGE,)),
    (through_a_view, (LARGE,)),
    (checkpointed, (LARGE,)),
    (before_a_break, (LARGE,)),
    (across_a_break, (LARGE,)),
    (with_dropout, (LARGE,)),
    (clipped, (LARGE,)),
    (nearly_clipped, (LARGE,)),
    (hidden, (LARGE,)),
    (in_a_mask, (LARGE,)),
]


@pytest.mark.parametrize(("function", "args"), HARMFUL, ids=lambda x: getattr(x, "__name__", ""))
def test_an_absorbed_overflow_that_does_harm_is_reported(
    function: Callable[..., Any], args: tuple[Tensor, ...]
) -> None:
    reports = reports_of(function, *(arg.clone() for arg in args))
    assert [report.origins[0].what.rstrip("_") for report in reports] == ["mul"]
    origin = reports[0].origins[0]
    assert origin.cause == "overflow"
    assert origin.harm.startswith("what left the model is")
    assert f"  {origin.harm}" in str(reports[0])


def test_what_is_wrong_is_said() -> None:
    origin = reports_of(norm, LARGE)[0].origins[0]
    assert origin.harm == "what left the model is finite and wrong: 0 at [0], in float64 1"


def tanh(x: Tensor) -> Tensor:
    return (x * x).tanh()


def not_selected(x: Tensor) -> Tensor:
    return torch.where(x < 100, x * x, x)


def logistic(x: Tensor) -> Tensor:
    return 1 / (1 + (x / 400 * 12).exp())


def bounded(x: Tensor) -> Tensor:
    return (x * x).clamp(max=10)


def of_no_use(x: Tensor) -> Tensor:
    return torch.stack([x * x, x])[1]


HARMLESS = [(tanh, 0), (not_selected, 2), (logistic, 2), (bounded, 0), (of_no_use, 2)]


@pytest.fixture
def second_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each second run of a graph."""
    runs: list[int] = []
    run_both = Walk.run_both

    def counted(self: Walk, *args: Any, **kwargs: Any) -> Any:
        if not self.inside:
            runs.append(1)
        return run_both(self, *args, **kwargs)

    monkeypatch.setattr(Walk, "run_both", counted)
    return runs


@pytest.mark.parametrize(("function", "runs"), HARMLESS, ids=lambda x: getattr(x, "__name__", ""))
def test_one_that_does_none_is_a_note(
    function: Callable[..., Any], runs: int, second_runs: list[int]
) -> None:
    """What saturates is judged once; the others in every batch, because numbers decide."""
    model = fxguard.instrument(as_module(function))
    model(LARGE)
    (note,) = fxguard.guard_of(model).notes
    assert (note.cause, note.not_judged) == ("overflow", "")
    second_runs.clear()
    model(LARGE + 1)
    assert len(second_runs) == runs


def test_a_harmless_batch_vouches_for_no_harmful_one() -> None:
    """The same values are bad: what is selected is not the same."""
    model = fxguard.instrument(as_module(lambda x, m: torch.where(m, norm(x), x / 400)))
    model(LARGE, torch.tensor([False, False]))
    with pytest.raises(fxguard.NonFiniteError, match="mul made inf"):
        model(LARGE, torch.tensor([True, False]))


ROOTS = torch.tensor([-1.0, 4.0])


def positions(x: Tensor) -> Tensor:
    return x.sqrt().argmax()


def comparison(x: Tensor) -> Tensor:
    return x.sqrt() > 1


def count(x: Tensor) -> Tensor:
    return (x.sqrt() > 0).sum()


@pytest.mark.parametrize("function", [positions, comparison, count], ids=lambda f: f.__name__)
def test_a_nan_on_which_integers_depend_is_reported(function: Callable[..., Any]) -> None:
    origin = reports_of(function, ROOTS)[0].origins[0]
    assert (origin.what, origin.cause) == ("sqrt", "domain")
    assert origin.harm == "what left the model depends on it"


def test_what_raises_on_another_number_depends_on_it() -> None:
    """An index that is in range by chance."""
    table = torch.arange(3)

    def function(x: Tensor) -> Tensor:
        return table[(x.sqrt() > 3).long() + (x.sqrt() > 1e9).long() * 5]

    assert reports_of(function, ROOTS)[0].origins[0].what == "sqrt"


def nan_to_num(x: Tensor) -> Tensor:
    return torch.nan_to_num(x.sqrt())


def replaced(x: Tensor) -> Tensor:
    y = x.sqrt()
    return torch.where(torch.isnan(y), 0, y)


def compared_with_itself(x: Tensor) -> Tensor:
    y = x.sqrt()
    return torch.where(y != y, torch.zeros_like(y), y)


def nanmean(x: Tensor) -> Tensor:
    return x.sqrt().nanmean()


def selected_away(x: Tensor) -> Tensor:
    return x.sqrt()[1:] + 1


def multiplied_by_a_mask_and_dropped(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.sqrt(), 0).sum()


@pytest.mark.parametrize(
    ("function", "always"),
    [
        (nan_to_num, True),
        (replaced, False),
        (compared_with_itself, False),
        (nanmean, True),
        (selected_away, False),
        (multiplied_by_a_mask_and_dropped, False),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_nan_on_which_nothing_depends_is_a_note(
    function: Callable[..., Any], always: bool, second_runs: list[int]
) -> None:
    """Operations that test for NaN see it; what ends in them is judged once."""
    model = fxguard.instrument(as_module(function))
    model(ROOTS)
    (note,) = fxguard.guard_of(model).notes
    assert (note.what, note.not_judged) == ("sqrt", "")
    second_runs.clear()
    model(ROOTS * 2)
    assert bool(second_runs) != always


def test_many_layers_are_judged_together(second_runs: list[int]) -> None:
    """A row that is masked in each of 24 layers: three second runs, once."""
    mask = torch.zeros(4, 4)
    mask[2] = -math.inf

    def function(x: Tensor) -> Tensor:
        for _ in range(24):
            x = x + torch.nan_to_num((x + mask).softmax(-1))
        return x

    model = fxguard.instrument(as_module(function))
    model(torch.randn(4, 4))
    assert len(second_runs) == 3
    model(torch.randn(4, 4))
    assert len(second_runs) == 3


@torch.library.custom_op("second_opinion_test::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x * x * x


@cube.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_what_nobody_can_judge_is_said_once_and_counted(
    capsys: pytest.CaptureFixture[str], second_runs: list[int]
) -> None:
    model = fxguard.instrument(as_module(lambda x: cube(x).tanh()))
    model(LARGE)
    text = capsys.readouterr().err
    assert "not judged: no float64 kernel for cube" in text
    assert "not judged: 1 (no float64 kernel for cube)" in fxguard.guard_of(model).coverage()
    second_runs.clear()
    model(LARGE)
    assert "not judged" not in capsys.readouterr().err
    assert not second_runs
    strict = fxguard.instrument(as_module(lambda x: cube(x).tanh()), strict=True)
    with pytest.raises(fxguard.NonFiniteError, match="cube made inf"):
        strict(LARGE)


def origin_of(function: Callable[..., Any], *args: Tensor) -> Origin:
    return reports_of(function, *args)[0].origins[0]


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 5), (2, 5)])
def test_a_bias_of_any_shape(shape: tuple[int, ...]) -> None:
    """Torch takes whatever broadcasts; the element of the bias that was added is not the row's."""
    bias, weight = torch.ones(shape, dtype=HALF), torch.ones(5, 3, dtype=HALF)
    weight[4] = 300.0
    x = torch.tensor([[1.0, 1, 1], [300, 300, 300]], dtype=HALF)
    origin = origin_of(lambda x: functional.linear(x, weight, bias), x)
    assert (origin.what, origin.cause, origin.first_index) == ("linear", "overflow", (1, 4))
    row = "a row from 300.0 to 300.0 times a column from 300.0 to 300.0 (3 elements)"
    assert origin.operands.startswith(f"at [1, 4]: {row} is 270001 in float64")


def test_a_lost_eps_is_an_underflow() -> None:
    def function(x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-8).sqrt()

    origin = origin_of(function, torch.zeros(2, 4, dtype=HALF))
    assert (origin.what, origin.cause) == ("div", "underflow")
    assert origin.operands.startswith("at [0, 0]: 0.0 / 0.0; in float64 0.0 / 0.0001")


def test_a_fix_is_tried() -> None:
    """In float32 as far as it has to be; the error is that of the rest."""
    origin = origin_of(lambda x: (x * x).mean(-1).sqrt() + 1, LARGE)
    (tried,) = (fix for fix in origin.fixes if fix.kind == "tried")
    assert tried.text.startswith("keep mul (")
    assert "in float32: finite, error 0.000" in tried.text
    nothing = origin_of(lambda x: x * x, LARGE)  # float16 cannot hold what it returns
    assert not any(fix.kind == "tried" for fix in nothing.fixes)


def test_what_does_no_harm_is_not_kept_in_float32() -> None:
    """Another product overflows as well, and its tanh is 1 all the same."""

    def function(x: Tensor) -> Tensor:
        lost = (x * 300) * (x * 300) * 1e-3
        return lost + torch.tanh((x * 6e4) * 4)

    (report,) = reports_of(function, torch.ones(2, 2, dtype=HALF))
    assert [note.what for note in report.absorbed] == ["mul"]
    (kept,) = (fix.text for fix in report.origins[0].fixes if fix.kind == "tried")
    assert kept.count("mul") == 1


@pytest.mark.parametrize(
    "then",
    [
        lambda y: y - y.square().square().exp() + y.square().square().exp(),  # inf - inf
        lambda y: -y.exp(),
        lambda y: cube(y * 1e-4),
    ],
    ids=["NaN", "-inf", "no float64 kernel"],
)
def test_nothing_is_tried_against_a_reference_that_fails(then: Callable[[Tensor], Tensor]) -> None:
    """What float64 cannot compute either is no proof that float32 suffices."""

    def function(x: Tensor) -> Tensor:
        return then((x * x).mean(-1))

    (report,) = reports_of(function, LARGE)
    fixes = report.origins[0].fixes
    assert fixes
    assert not any(fix.kind == "tried" for fix in fixes)


def test_a_rule_that_fails_hides_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise IndexError

    monkeypatch.setattr(second_opinion, "cause_of", fails)
    monkeypatch.setattr(description, "operands_text", fails)
    monkeypatch.setattr(description, "fixes_for", fails)
    with pytest.raises(IndexError):  # in tests it is seen
        reports_of(torch.log, torch.zeros(2))
    monkeypatch.setattr(forgiving, "RAISES", False)
    origin = origin_of(torch.log, torch.zeros(2))
    assert (origin.what, origin.cause, origin.operands, origin.fixes) == ("log", "unknown", "", ())


def test_outputs_gradients_and_random_numbers_stay() -> None:
    """Second runs in a healthy batch leave no trace."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.seen.add_(y.detach().mean(0))
            y = functional.dropout(y, 0.5)
            root = y.sqrt().detach()  # its gradient would be NaN where y is negative
            return torch.where(y > 0, root, y) + torch.rand_like(y)

    def train() -> list[Tensor]:
        torch.manual_seed(0)
        model = Model()
        if guarded:
            fxguard.instrument(model)
        made = []
        for _ in range(3):
            output = model(torch.randn(4, 8))
            output.sum().backward()
            made += [output.detach(), model.seen.clone()]
        return [*made, *(p.grad for p in model.parameters() if p.grad is not None), torch.rand(2)]

    guarded = False
    plain = train()
    guarded = True
    for one, other in zip(plain, train(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
