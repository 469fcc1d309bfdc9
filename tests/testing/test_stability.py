"""Two precisions, operation by operation: the first one whose error jumps is named."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.testing import numerically_stable
from support import zoo

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def cancelling_variance(x: Tensor) -> Tensor:
    return (x * x).mean(-1) - x.mean(-1).square()


def two_pass_variance(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)).square().mean(-1)


def test_cancellation_is_named() -> None:
    """The subtraction made the error; its twin in two passes is stable."""
    found = numerically_stable(cancelling_variance, X + 100, dtype=torch.float32)
    assert not found
    assert found.first is not None
    assert found.first.title == "sub"
    assert found.first.source is not None
    assert found.first.source.code == "return (x * x).mean(-1) - x.mean(-1).square()"
    assert found.first.error > 1e-5 > found.first.error_before
    assert "not stable in float32: sub (test_stability.py:" in str(found)
    assert numerically_stable(two_pass_variance, X + 100, dtype=torch.float32)


def phases(x: Tensor) -> Tensor:
    position = torch.arange(x.shape[-1], dtype=x.dtype)
    return x + (position * 1.5).cos()


def test_where_the_digits_went_is_said() -> None:
    """The cosine shows the error first; the positions, which are all right, are its cause."""
    found = numerically_stable(phases, torch.rand(2, 600), dtype=torch.bfloat16)
    assert not found
    assert found.first is not None
    assert found.first.title == "cos"
    assert found.budget is not None
    assert found.budget.rows[0].kind == "arange"
    of_inputs = {row.kind for row in found.budget.rows} & {"weight", "input"}
    assert not of_inputs  # the reference begins with rounded ones
    lines = str(found).splitlines()
    assert lines[2].startswith("  bfloat16 changes the output by ")
    assert "arange test_stability.py:" in lines[3]
    assert found.to_dict()["budget"]["verdict"] == found.budget.verdict


def test_a_budget_is_asked_for_what_is_not_stable_against_float64() -> None:
    assert numerically_stable(two_pass_variance, X).budget is None
    found = numerically_stable(phases, X, dtype=torch.bfloat16, reference=torch.float32)
    assert found.budget is None


def test_errors_are_those_of_the_definition() -> None:
    """``max |x - reference| / max |reference|``, from the rounded input on."""
    [found] = numerically_stable(torch.exp, X, dtype="bf16", reference="float64").deviations
    low = X.bfloat16()
    exact = low.double().exp()
    assert found.error == float((low.exp().double() - exact).abs().max() / exact.abs().max())
    assert found.error_before == 0


def test_an_overflow_is_an_infinite_error() -> None:
    found = numerically_stable(lambda x: (x * x).sqrt(), X * 1000)
    assert found.first is not None
    assert (found.first.title, found.first.error) == ("mul", float("inf"))
    assert "mul (test_stability.py:" in str(found)
    assert "made an inf or a NaN out of 0" in str(found)
    assert numerically_stable(lambda x: (x * x).sqrt(), X * 1000, dtype=torch.bfloat16)


def test_a_reference_of_zeros() -> None:
    """What is 0 but for roundings has an error of 1, and is not called infinite."""
    found = numerically_stable(lambda x: (x + 1) - 1 - x, X)
    assert found.first is not None
    assert (found.first.title, found.first.error) == ("sub", 1.0)
    assert numerically_stable(lambda x: x - x, X)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_complex_inputs_keep_their_imaginary_part(dtype: torch.dtype) -> None:
    """It was dropped, with a warning of torch."""
    x = torch.complex(X, X.flip(0))
    found = numerically_stable(lambda x: (x * x).abs().log(), x, dtype=dtype)
    assert [d.title for d in found.deviations] == ["mul", "abs", "log"]
    assert 0 < found.deviations[1].error < 1e-6  # complex64 in any case


def test_casts_do_not_make_the_reference_coarser() -> None:
    """What the model computes in float32, or under autocast, is float64 in the reference."""

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.linear(x)
            y = x.float().softmax(-1, dtype=torch.float32)
            return y.to(torch.bfloat16).type_as(x) * torch.ones(64, dtype=torch.float32)

    torch.manual_seed(0)
    model = Casts()
    found = numerically_stable(model, X, dtype=torch.float32, tolerance=1)
    errors = {d.title: d.error for d in found.deviations}
    # Against float32 in the reference the errors of what bfloat16 rounds would be zeros.
    assert 1e-3 < errors["linear linear"] < 1e-2
    assert 1e-4 < errors["mul"] < 1e-2
    assert model.linear.weight.dtype is torch.float32  # a copy was converted


def test_masks_indices_and_random_numbers_are_taken_over() -> None:
    """A choice that comes out differently is no error by itself."""

    def chosen(x: Tensor) -> Tensor:
        best = x.argmax(-1, keepdim=True)
        kept = torch.where(x > x.mean(), x, torch.zeros_like(x))
        return x.gather(-1, best) + nn.functional.dropout(kept, 0.5)

    found = numerically_stable(chosen, X / 1000 + 1)
    assert found
    assert found.taken_over == 1
    assert "1 random ones or without a kernel for float64 not" in str(found)


def test_integers_are_computed_once() -> None:
    """What both runs share is not written twice."""

    def model(x: Tensor) -> Tensor:
        index = torch.zeros(4, dtype=torch.int64)
        index += 1
        index[0] = 0
        return x.index_select(0, index) * index.unsqueeze(-1)

    [selected, product] = numerically_stable(model, X).deviations
    assert (selected.error, product.error) == (0, 0)


def test_an_operation_without_a_kernel() -> None:
    """What float64 cannot do is taken over, and said."""

    @torch.library.custom_op("fxguard_tests::halve", mutates_args=())
    def halve(x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise RuntimeError("Expected Float16 or Float32, got Double")
        return x / 2

    halve.register_fake(torch.empty_like)
    with pytest.warns(RuntimeWarning, match="1 random ones or without a kernel for float64 not"):
        found = numerically_stable(lambda x: halve(x.exp()).log(), X)
    assert [d.title for d in found.deviations] == ["exp", "log"]
    assert found.deviations[1].error_before == 0  # the reference starts anew


def test_in_place_operations() -> None:
    """Each value is compared when it is made, not when something has overwritten it."""

    def accumulate(x: Tensor) -> Tensor:
        total = x.float()
        total += 1
        total[0] = 0
        x.mul_(2)
        return total - x

    given = X.clone()
    found = numerically_stable(accumulate, given)
    assert found
    assert torch.equal(given, X)
    assert [d.title for d in found.deviations] == ["float", "add_", "setitem", "mul_", "sub"]


def test_graphs_are_followed_over_a_break() -> None:
    """The reference of what one graph returned is what the next one is given."""

    def model(x: Tensor) -> Tensor:
        y = x.exp()
        torch._dynamo.graph_break()
        return y.log()

    found = numerically_stable(model, X)
    assert [d.title for d in found.deviations] == ["exp", "log"]
    exp, log = found.deviations
    assert log.error_before == exp.error > 0
    assert found.between == 0


LONG = [
    pytest.param(name, marks=pytest.mark.campaign) for name in ("t5", "llama", "mixtral", "bert")
]


@pytest.mark.parametrize("name", ["cnn", *LONG])
def test_healthy_models(name: str) -> None:
    """Real models of two layers are stable in float32 and bfloat16; every operation is compared."""
    entry = zoo.ZOO[name]
    model = entry.model()
    args, kwargs = entry.inputs(torch.float32, entry.has_mask)
    plain = numerically_stable(model, *args, dtype=torch.float32, tolerance=1e-4, **kwargs)
    assert plain, str(plain)
    assert len(plain.deviations) > 4
    assert plain.between == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Mixtral's grouped products know no float64 there
        assert numerically_stable(model, *args, dtype=torch.bfloat16, **kwargs)


def test_what_runs_between_graphs_is_not_passed_over_in_silence() -> None:
    entry = zoo.ZOO["encoder"]
    args, kwargs = entry.inputs(torch.float32, True)
    with pytest.warns(RuntimeWarning, match=r"(?s)not every .* between graphs"):
        found = numerically_stable(entry.model(), *args, **kwargs)
    assert found.between > 0


def test_a_guarded_and_a_compiled_model() -> None:
    model = fxguard.instrument(nn.Sequential(nn.Linear(64, 8), nn.Softmax(-1)))
    assert numerically_stable(model, X)
    assert fxguard.guard_of(model).batch_number == 0
    assert numerically_stable(torch.compile(model), X)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.float64}, "is not more precise"),
        ({"dtype": torch.float16, "reference": torch.bfloat16}, "is not more precise"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(fxguard.FxguardError, match=message):
        numerically_stable(torch.exp, X, **arguments)


def test_nothing_to_compare() -> None:
    with pytest.raises(fxguard.FxguardError, match="there is nothing to compare"):
        numerically_stable(lambda x: x, X)


def test_the_default_tolerance_of_bfloat16_is_no_quarter() -> None:
    """A difference that loses 8 % of its largest element is named; one that loses 1 % is not."""

    def shifted(x: Tensor, by: float) -> Tensor:
        return (x + by) - by

    x = torch.linspace(-3, 3, 1000)
    found = numerically_stable(shifted, x, 64.0, dtype=torch.bfloat16)
    assert not found
    assert found.first is not None
    assert 0.0625 < found.first.error < 0.25
    assert numerically_stable(shifted, x, 4.0, dtype=torch.bfloat16)
