"""What a forecast says of the backward: gradients that a dtype does not hold."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import fxguard
from fxguard.errors import FxguardError
from support.masks import Function
from support.residual import X, residual


def gradients(
    model: nn.Module | Callable[..., Any], *args: Any, scale: float = 1.0
) -> dict[str, str]:
    """Operation whose backward fails to its problem."""
    model = model if isinstance(model, nn.Module) else Function(model)
    forecast = fxguard.forecast(model, *args, loss=lambda y: y.float().sum() * scale)
    return {row.operation: row.problem for row in forecast.rows if row.backward}


ONES = torch.ones(4)

CASES: list[tuple[str, Callable[..., Any], tuple[Any, ...], float, dict[str, str]]] = [
    ("too large", lambda x: x * 500, (ONES,), 500.0, {"mul": "overflow"}),
    (
        "it goes on until a gradient fits",
        lambda x: (x / 1e3) * 500 * 500 / 250,
        (ONES,),
        500.0,
        {"mul": "overflow"},
    ),
    ("too small", lambda x: x * 1e-3, (ONES,), 1e-6, {"mul": "underflow"}),
    (
        "what becomes 0 in forward is listed there",
        lambda x: torch.sqrt(x * x + 1e-9),
        (torch.full((4,), 1e-5),),
        1.0,
        {},
    ),
    ("so is what overflows in forward", lambda x: torch.tanh(x.exp()), (ONES * 12,), 1.0, {}),
    (
        "a softmax in float32 takes what float16 does not hold",
        lambda x: F.softmax(x, -1, dtype=torch.float32) * torch.tensor([1e5, 0, 0, 0]),
        (ONES,),
        1.0,
        {},
    ),
]


@pytest.mark.parametrize(
    ("function", "args", "scale", "wanted"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_what_fails(
    function: Callable[..., Any], args: tuple[Any, ...], scale: float, wanted: dict[str, str]
) -> None:
    class Weighted(nn.Module):
        """With something to differentiate with respect to."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(ONES.clone())

        def forward(self, *given: Tensor) -> Any:
            return function(self.weight * given[0], *given[1:])

    found = gradients(Weighted(), *args, scale=scale)
    found = {name.replace("mul #2", "mul"): problem for name, problem in found.items()}
    assert found == wanted


def test_a_healthy_backward_lists_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16),
        nn.LayerNorm(16),
        nn.GELU(),
        nn.Linear(16, 8),
        nn.Softmax(-1),
        nn.Linear(8, 4),
    )
    assert gradients(model, torch.randn(4, 8)) == {}


def test_a_bias_in_front_of_a_norm_has_no_gradient_by_right() -> None:
    """What is summed there cancels: the rest is roundings, and no failure."""
    assert gradients(residual(), X / 1e4) == {}


@pytest.mark.parametrize(
    "last",
    [nn.Softmax(-1), nn.LayerNorm(64, elementwise_affine=False), nn.BatchNorm1d(64, affine=False)],
    ids=["softmax", "layer norm", "batch norm"],
)
def test_of_a_gradient_that_cancels_roundings_are_left(last: nn.Module) -> None:
    """The same number for each element has no gradient behind these: that is judged, and fine."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 64), last), torch.randn(8, 8)
    found = fxguard.forecast(model, x, loss=lambda y: y.float().sum())
    assert not found.rows
    assert not found.not_judged


def test_buffers_and_frozen_weights_want_no_gradient() -> None:
    """A batch norm in evaluation mode is judged, and what stands in front of a frozen layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).eval()
    model[2].requires_grad_(False)
    found = fxguard.forecast(model, torch.randn(4, 8), loss=lambda y: y.float().sum())
    assert found, found
    assert not found.not_judged
    labels = {
        frame.kind: [row.label for row in frame.rows]
        for frame in found.frames
        if frame.phase == "backward"
    }
    assert labels["batch_norm"] == [
        *("grad of output", "grad of input[0]", "grad of input[3]", "grad of input[4]")
    ]


def test_the_scale_of_the_loss_is_what_a_vanishing_gradient_needs() -> None:
    model = residual()
    assert "underflow" in gradients(model, X / 1e4, scale=1e-7).values()
    assert gradients(model, X / 1e4, scale=2.0**8) == {}


def test_attention_and_cross_entropy() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 24)
            self.head = nn.Linear(8, 5)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            q, k, v = self.project(x).chunk(3, -1)
            attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
            return F.cross_entropy(self.head(attended).flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    model, x, labels = Head(), torch.randn(2, 6, 8), torch.randint(5, (2, 6))
    assert not fxguard.forecast(model, x, labels, loss=lambda loss: loss).rows
    rows = fxguard.forecast(model, x, labels, loss=lambda loss: loss * 1e7).rows
    assert [str(row) for row in rows] == [
        "backward of output 0: overflow, needs 1e+07, float16 holds 65504"
    ]


def test_across_a_graph_break() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) * 300
            torch._dynamo.graph_break()
            return self.last(x) * 300

    torch.manual_seed(0)
    found = gradients(Broken(), torch.ones(2, 4), scale=300.0)
    assert found["mul"] == "overflow"


def test_rows_say_that_it_is_the_backward() -> None:
    forecast = fxguard.forecast(residual(), X / 1e4, loss=lambda y: y.float().sum() * 1e-7)
    row = forecast.rows[0]
    assert row.backward
    assert str(row).startswith("backward of norm ")
    assert str(forecast).startswith("in float16 none of 12 operations fails, and the backward of ")
    assert "backward of norm" in forecast.to_table()
    assert json.loads(forecast.to_json())["rows"][0]["backward"] is True


class Gated(nn.Module):
    """A forward that float16 holds, and a gradient that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.weight * x
        return (gate * 600 * 1e-2).sum() * 600


def test_a_plan_keeps_what_a_gradient_needs() -> None:
    model, x = Gated(), torch.full((4,), 1e-2)
    forecast = fxguard.forecast(model, x, loss=lambda loss: loss.float() * 60)
    assert {row.problem for row in forecast.rows} == {"overflow"}
    plan = forecast.plan()
    assert plan
    assert math.isfinite(plan.gradient_error)
    kept = fxguard.keep_float32(Gated().half(), plan)
    (kept(x.half()).float() * 60).backward()
    assert kept.weight.grad is not None
    assert kept.weight.grad.isfinite().all()


def test_a_key_or_an_attribute_names_the_loss() -> None:
    class Two(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"loss": super().forward(x).sum() * 1e5}

    model = Two(2, 2)
    assert fxguard.forecast(model, torch.ones(1, 2), loss="loss").rows
    both = Function(lambda x: (x.sum(), x))
    assert fxguard.forecast(both, torch.ones(2), loss=0).operations == 1
    with pytest.raises(FxguardError, match=r"has a gradient, and is of shape \[2\]"):
        fxguard.forecast(both, torch.ones(2), loss=1)
