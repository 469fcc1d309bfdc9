"""Real functions, each well and naively written, under fxguard's own tests of numerics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import fxguard
from fxguard.report.errors import NumericsError
from fxguard.testing import assert_finite, find_overflow, like, tensors
from support import zoo

pytestmark = pytest.mark.slow

HALF = torch.float16


class RMSNorm(nn.Module):
    """As T5 had it before it learned to square in float32."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.weight, self.wide = nn.Parameter(torch.ones(8)), wide

    def forward(self, x: Tensor) -> Tensor:
        computed = x.float() if self.wide else x
        variance = computed.square().mean(-1, keepdim=True)
        return self.weight * (computed * torch.rsqrt(variance + 1e-6)).to(x.dtype)


class GatedGELU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)
        for layer in (self.gate, self.up):
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.gate(x)) * self.up(x)


def naive_softmax(x: Tensor) -> Tensor:
    weights = x.exp()
    return weights / weights.sum(-1, keepdim=True)


def naive_logsumexp(x: Tensor) -> Tensor:
    return x.exp().sum(-1).log()


def naive_layer_norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred * centred).mean(-1, keepdim=True).sqrt()


def naive_cosine(x: Tensor) -> Tensor:
    return (x * x.flip(-1)).sum(-1) / (x.norm(dim=-1) * x.flip(-1).norm(dim=-1))


def wide_cosine(x: Tensor) -> Tensor:
    return F.cosine_similarity(x.float(), x.flip(-1).float(), dim=-1).to(x.dtype)


def attention(x: Tensor, mask: Tensor) -> Tensor:
    scores = (x @ x.transpose(-1, -2)).masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ x


WIDE = {"min_value": -1000, "max_value": 1000}

# name: model, range of the inputs, and the operation that overflows or makes a NaN.
FAULTY: dict[str, tuple[Callable[[], Any], dict[str, float], str]] = {
    "softmax": (lambda: naive_softmax, {"min_value": -20, "max_value": 20}, "made inf"),
    "logsumexp": (lambda: naive_logsumexp, WIDE, "made inf"),
    "layer norm": (lambda: naive_layer_norm, WIDE, "made"),
    "RMS norm": (lambda: RMSNorm(wide=False).half(), WIDE, "square made inf"),
    "cosine": (lambda: naive_cosine, WIDE, "made"),
    "gated GELU": (lambda: GatedGELU().half(), WIDE, "mul made inf"),
}
WELL: dict[str, tuple[Callable[[], Any], dict[str, float]]] = {
    "softmax": (lambda: lambda x: x.softmax(-1), {}),
    "logsumexp": (lambda: lambda x: x.logsumexp(-1), {}),
    "layer norm": (lambda: nn.LayerNorm(8).half(), WIDE),
    "RMS norm": (lambda: RMSNorm(wide=True).half(), {}),
    "cosine": (lambda: wide_cosine, WIDE),
    "gated GELU": (lambda: GatedGELU().half(), {"min_value": -200, "max_value": 200}),
}


def rows(limits: dict[str, float]) -> st.SearchStrategy[Tensor]:
    return tensors(HALF, (3, 8), **limits)


@pytest.mark.parametrize("name", FAULTY)
def test_what_overflows_is_found(name: str) -> None:
    """Within the default number of examples, and the smallest input does it again."""
    make, limits, message = FAULTY[name]
    model = make()
    found = find_overflow(model, rows(limits), seed=1)
    assert found is not None
    assert message in found.report.origins[0].message
    with pytest.raises(NumericsError) as caught:
        assert_finite(model, found.inputs)
    assert str(caught.value).startswith(found.report.origins[0].message)
    assert found.inputs.unique().numel() <= 2  # readable


@pytest.mark.parametrize("name", WELL)
def test_what_is_well_is_left_alone(name: str) -> None:
    """The clean twin."""
    make, limits = WELL[name]
    assert find_overflow(make(), rows(limits), seed=1) is None


def test_the_smallest_input_is_at_the_edge() -> None:
    """The square of 256 is the first power of two that float16 does not hold."""
    found = find_overflow(RMSNorm(wide=False).half(), rows(WIDE), seed=1)
    assert found is not None
    assert torch.equal(found.inputs, torch.full((3, 8), 256.0, dtype=HALF))
    text = str(found)
    assert "inputs = torch.full((3, 8), 256.0, dtype=torch.float16)" in text
    assert "square made inf (test_real_functions.py:" in text
    assert f"with seed {found.seed}" in text


def test_the_search_is_reproducible(capsys: pytest.CaptureFixture[str]) -> None:
    """The seed that is printed finds the same again, in as many runs."""
    model = GatedGELU().half()
    first = find_overflow(model, rows(WIDE))
    assert first is not None
    assert f"seed {first.seed}, {first.runs} runs, mul made inf" in capsys.readouterr().out
    again = find_overflow(model, rows(WIDE), seed=first.seed)
    assert again is not None
    assert torch.equal(first.inputs, again.inputs)
    assert (first.runs, str(first)) == (again.runs, str(again))


def test_a_fully_masked_row_is_named() -> None:
    """Only a row without any position makes a NaN; with `like` no such mask is drawn."""
    mask = torch.ones(4, 4, dtype=torch.bool)
    batch = (torch.ones(4, 8), mask)
    masks = tensors(torch.bool, (4, 4))
    found = find_overflow(attention, st.tuples(st.just(batch[0]), masks), seed=1)
    assert found is not None
    assert found.report.origins[0].masked_row
    assert not found.inputs[1].any(-1).all()
    assert find_overflow(attention, like(batch), seed=1, max_examples=100) is None


@settings(max_examples=30, database=None, deadline=None)
@given(x=tensors(HALF, (3, 8), min_value=-100, max_value=100))
def test_a_property_in_one_line(x: Tensor) -> None:
    assert_finite(torch.softmax, x, dim=-1)


def test_a_transformer_in_a_range() -> None:
    """A real model, in float16, with ids, masks and everything."""
    entry = zoo.ZOO["bert"]
    model = entry.model(HALF)
    _, batch = entry.inputs(HALF, True)
    assert find_overflow(model, like(batch), seed=1, max_examples=15) is None
    with torch.no_grad():
        model.bert.embeddings.LayerNorm.weight.mul_(3e4)
    found = find_overflow(model, like(batch), seed=1, max_examples=15)
    assert found is not None
    assert "made inf" in found.report.origins[0].message


def test_what_an_input_holds_is_not_blamed_on_the_model() -> None:
    strategy = tensors(HALF, (4,), allow_nan=True, allow_infinity=True)
    assert find_overflow(torch.relu, strategy, seed=1) is None


def test_absorbed_values_count_unless_told_otherwise() -> None:
    """Where they do harm they always count: a square that overflows under a reciprocal leaves 0."""
    x = torch.full((3, 8), 300.0, dtype=HALF)
    with pytest.raises(NumericsError, match="square made inf"):
        assert_finite(lambda x: torch.tanh(x.square()), x)
    assert bool((assert_finite(lambda x: torch.tanh(x.square()), x, strict=False) == 1).all())
    model = RMSNorm(wide=False).half()
    for strict in (True, False):
        with pytest.raises(NumericsError, match="square made inf"):
            assert_finite(model, x, strict=strict)
    assert_finite(model, x, ignore=["*:square", "*:mean", "*:add"])


def test_assert_finite_leaves_the_model_as_it_was() -> None:
    model = GatedGELU()
    attributes, x = set(model.__dict__), torch.ones(2, 8)
    plain = model(x)
    assert torch.equal(assert_finite(model, x=x), plain)
    assert set(model.__dict__) == attributes
    fxguard.instrument(model)  # nothing stands in the way
    assert torch.equal(assert_finite(model, x), plain)
    with pytest.raises(NumericsError, match="argument `x` of"):
        assert_finite(model, x * math.nan)
    assert fxguard.guard_of(model).batch_number == 2


def test_a_model_that_is_instrumented_is_not_searched() -> None:
    """Its guard would be taken away; it says so, also where the model was searched before."""
    model = GatedGELU().half()
    strategy = tensors(HALF, (2, 8), min_value=-1, max_value=1)
    assert find_overflow(model, strategy, max_examples=2) is None
    fxguard.instrument(model)
    with pytest.raises(fxguard.FxguardError, match="is instrumented already"):
        find_overflow(model, strategy)
    assert fxguard.guard_of(model).batch_number == 0


def test_examples_do_not_capture_again() -> None:
    """What was captured for one example serves the next one."""
    graphs = []
    original = fxguard.capture.backend.CheckingBackend.__call__

    def counting(self: Any, *args: Any) -> Any:
        graphs.append(1)
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fxguard.capture.backend.CheckingBackend, "__call__", counting)
        for value in range(5):
            assert_finite(torch.sin, torch.full((2, 2), float(value)))
    assert len(graphs) == 1


def test_a_compiled_model_is_tested_compiled() -> None:
    model = GatedGELU().half()
    compiled = torch.compile(model, backend="aot_eager")
    assert_finite(compiled, torch.ones(2, 8, dtype=HALF))
    with pytest.raises(NumericsError, match="mul made inf"):
        assert_finite(compiled, torch.full((2, 8), 900.0, dtype=HALF))
    assert "forward" not in model.__dict__


def test_other_exceptions_are_the_models_own() -> None:
    def fails(x: Tensor) -> Tensor:
        raise KeyError("no such thing")

    with pytest.raises(KeyError):
        assert_finite(fails, torch.ones(2))
    with pytest.raises(KeyError):
        find_overflow(fails, tensors(HALF, (2,)))


def test_a_forward_that_raises_because_of_a_nan() -> None:
    def factor(x: Tensor) -> Tensor:
        return torch.linalg.cholesky(x.log())

    with pytest.raises(NumericsError, match="log made"):
        assert_finite(factor, -torch.eye(2))


@pytest.mark.parametrize("given_", [torch.ones(4, 4), {"x": torch.ones(2)}, 3])
def test_a_batch_in_place_of_a_strategy_is_refused_in_words(given_: Any) -> None:
    """The message says what to give, and does not print the whole tensor."""
    with pytest.raises(fxguard.FxguardError, match=r"give it like\(batch\)") as caught:
        find_overflow(torch.exp, given_)
    assert type(given_).__name__ in str(caught.value)
    assert len(str(caught.value)) < 200
