"""The backward in two precisions: gradients of each operation, and no alarm where they are 0."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fxguard
from fxguard.testing import Deviation, Stability, numerically_stable
from support import zoo

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def compared(model: Any, *args: Tensor, **options: Any) -> Stability:
    return numerically_stable(model, *args, gradients=True, **options)


def backward_of(found: Stability) -> dict[str, Deviation]:
    return {each.title: each for each in found.deviations if each.phase == "backward"}


def test_a_gradient_that_saturates_is_named() -> None:
    """``1 - sigmoid(x)`` is 0 in float16 from 9 on; the value itself is right."""
    x = X.abs() + 12
    assert numerically_stable(torch.sigmoid, x)
    found = compared(lambda x: torch.sigmoid(x), x)
    assert not found
    assert found.first is not None
    assert (found.first.title, found.first.phase, found.first.error) == ("sigmoid", "backward", 1)
    lines = str(found).splitlines()
    assert lines[0].startswith("not stable in float16: sigmoid (backward) (test_stability_of_grad")
    assert lines[0].endswith("made an error of 1 out of 0, against float64")
    assert lines[2] == "  tolerance 0.031; 1 operations and the backward of 1 compared"


def test_errors_are_those_of_the_definition() -> None:
    """``max |g - reference| / max |reference|`` of what an operation hands back."""
    found = compared(lambda x: x.exp().sum(), X, dtype=torch.bfloat16)
    assert [(d.title, d.phase) for d in found.deviations] == [
        ("exp", "forward"),
        ("sum", "forward"),
        ("sum", "backward"),
        ("exp", "backward"),
    ]
    low = X.bfloat16()
    exact = low.double().exp()
    gradient = backward_of(found)["exp"]
    assert gradient.error == float((low.exp().double() - exact).abs().max() / exact.abs().max())
    assert gradient.error_before == 0


def test_an_overflow_in_the_backward_only() -> None:
    found = compared(lambda x: (x * 1e-4 * 3e4 * 3).sum() / 1e-3, torch.zeros(4))
    assert found.first is not None
    assert (found.first.title, found.first.phase) == ("mul", "backward")
    assert "mul (backward) (test_stability_of_gradients.py:" in str(found)
    assert "made an inf or a NaN out of" in str(found)


class BiasBeforeNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(64, 64)
        self.conv = nn.Conv1d(1, 8, 3)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(self.before(x)[:, None])).relu()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        return (scores / 8).softmax(-1) @ self.v(x)


@pytest.mark.parametrize("model", [BiasBeforeNorm, Attention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_that_are_0_by_right(model: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """The bias before a batch norm and the bias of keys have none but for roundings."""
    torch.manual_seed(0)
    net = model()
    low = torch.autograd.grad(net(X).square().sum(), list(net.parameters()))
    names = [name for name, _ in net.named_parameters()]
    norms = {name: float(g.abs().max()) for name, g in zip(names, low, strict=True)}
    assert norms.get("conv.bias", norms.get("k.bias", 1)) < 1e-4 * max(norms.values())
    found = compared(net, X, dtype=dtype)
    assert found, str(found)
    assert len(backward_of(found)) > 3


def test_a_bias_whose_gradients_happen_to_cancel() -> None:
    """A sum that is small because its summands cancel is measured by them."""
    weights = torch.tensor([1.0, 0.3, -1.3])

    def model(x: Tensor, bias: Tensor) -> Tensor:
        return ((x + bias).tanh() * weights.to(x.dtype)).sum()

    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        x, bias = X[0, :3].bfloat16().to(dtype), torch.zeros(1, dtype=dtype, requires_grad=True)
        x = x.abs() / 100
        gradients += [g.double() for g in torch.autograd.grad(model(x, bias), bias)]
    low, wide = gradients
    assert float((low - wide).abs() / wide.abs()) > 1 / 16
    found = compared(model, X[0, :3].abs() / 100, torch.zeros(1), dtype=torch.bfloat16)
    assert found, str(found)
    assert backward_of(found)["add"].error < 1 / 64


def rounded(x: Tensor) -> Tensor:
    """As large as the input, but for roundings."""
    return (x / 7) * 7


def near_zero(x: Tensor) -> Tensor:
    """In every other column nothing but roundings: their sign is a matter of the precision."""
    even = torch.arange(x.shape[-1]) % 2 == 0
    return rounded(x) - x.masked_fill(even, 0)


def near_equal(x: Tensor) -> Tensor:
    """Three numbers in a row that are equal but for roundings."""
    return torch.stack([rounded(x), x, (x / 3) * 3], -1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (-near_zero(x)).relu(),
        lambda x: near_zero(x).abs(),
        lambda x: near_zero(x).clamp(0, 9),
        lambda x: functional.relu(-near_zero(x), inplace=True) * x,
        lambda x: functional.max_pool1d(near_equal(x).flatten(1), 3),
        lambda x: near_equal(x).max(-1).values,
        lambda x: near_equal(x).amax(-1),
        lambda x: torch.maximum(x, rounded(x)),
        lambda x: (x / 7).topk(3).values * (x / 7).sort().values[:, :3],
    ],
)
def test_choices_are_those_of_the_model(function: Callable[[Tensor], Tensor]) -> None:
    """Where two numbers are nearly equal their gradients are no error if the other one is taken."""
    found = compared(function, X.repeat(1, 32), dtype=torch.bfloat16)
    assert found, str(found)
    assert len(backward_of(found)) > 1


def test_an_autograd_function_is_compared_as_what_it_is() -> None:
    """A backward that somebody wrote, and that loses what it adds to a large number."""

    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return (gradient * x.float().exp().to(x.dtype) + 4096) - 4096

    class Careful(Careless):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return gradient * x.float().exp().to(x.dtype)

    found = compared(lambda x: Careless.apply(x).log(), X)
    assert found.first is not None
    assert (found.first.title, found.first.phase) == ("Careless", "backward")
    assert found.first.source is not None
    assert found.first.source.code.startswith("found = compared(lambda x: Careless.apply(x)")
    fine = compared(lambda x: Careful.apply(x).log(), X)
    assert fine
    # What it casts to float32 by itself is float64 in the reference.
    assert 1e-5 < backward_of(fine)["Careful"].error < 1e-2


def test_in_place_operations() -> None:
    """As their twins that write nothing."""

    def writes(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[0] = x[1] * 3
        y[1:] = x[1:].exp()
        y.mul_(x).add_(x)
        return y.view(-1).clamp_(-1, 9).unsqueeze_(0)

    def writes_nothing(x: Tensor) -> Tensor:
        y = torch.cat([(x[1] * 3)[None], x[1:].exp()])
        return (y * x + x).view(-1).clamp(-1, 9).unsqueeze(0)

    one, two = compared(writes, X), compared(writes_nothing, X)
    assert one
    assert two
    errors = [
        {title.removesuffix("_"): d.error for title, d in backward_of(found).items()}
        for found in (one, two)
    ]
    for title in ("mul", "exp", "clamp"):
        assert errors[0][title] == errors[1][title]
    assert {"setitem", "add", "mul", "exp", "clamp"} <= set(errors[0])


def test_a_model_that_writes_its_input() -> None:
    """The caller's tensor stays as it was, in the same dtype, too."""
    given = X.clone()
    for gradients in (False, True):
        found = numerically_stable(
            lambda x: x.mul_(2).exp(), given, dtype=torch.float32, gradients=gradients
        )
        assert found
        assert torch.equal(given, X)
    assert list(backward_of(found)) == ["exp", "mul_"]


def test_an_operation_without_a_kernel_hands_its_gradient_on() -> None:
    @torch.library.custom_op("fxguard_tests::third", mutates_args=())
    def third(x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise RuntimeError("Expected Float16 or Float32, got Double")
        return x / 3

    third.register_fake(torch.empty_like)
    third.register_autograd(lambda ctx, gradient: gradient / 3)
    with pytest.warns(RuntimeWarning, match="1 random ones or without a kernel for float64 not"):
        found = compared(lambda x: (third(x.exp()) * 3).log(), X)
    assert found
    assert list(backward_of(found)) == ["log", "mul", "exp"]


def test_a_write_without_a_kernel_is_an_error_of_fxguard() -> None:
    """The reference has no gradient for what it would have to take over."""

    @torch.library.custom_op("fxguard_tests::halved_in_place", mutates_args={"x"})
    def halved(x: Tensor) -> None:
        if x.dtype is torch.float64:
            raise RuntimeError("Expected Float16 or Float32, got Double")
        x.div_(2)

    def model(x: Tensor) -> Tensor:
        y = x * 1
        halved(y)
        return y.exp()

    with pytest.warns(RuntimeWarning, match="1 random ones or without a kernel for float64 not"):
        assert numerically_stable(model, X)
    with pytest.raises(fxguard.FxguardError, match="no run in two precisions: halved_in_place"):
        compared(model, X)


def test_bodies_are_compared() -> None:
    """Forward and backward of a checkpointed part, of a branch and of a loop."""

    def body(x: Tensor) -> Tensor:
        return (x.exp() * 2).log()

    def checkpointed(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(body, x.sin(), use_reentrant=False)
        return result

    def branched(x: Tensor) -> Tensor:
        result: Tensor = torch.cond(x.sum() > 1e6, lambda x: x.cos(), body, (x.sin(),))
        return result

    titles = ["sin", "exp", "mul", "log"]
    found = compared(checkpointed, X)
    assert [d.title for d in found.deviations] == titles + titles[::-1]
    assert found
    found = compared(branched, X)
    assert list(backward_of(found)) == titles[::-1]
    assert [d.title for d in numerically_stable(checkpointed, X).deviations] == titles
    overflows = numerically_stable(lambda x: checkpointed(x * 0 + 1) * 1e9, X * 0)
    assert overflows.first is not None
    assert overflows.first.title == "mul"


def test_a_body_that_overflows_is_named() -> None:
    """It was passed over once, and what read its result was named instead."""

    def model(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda x: (x * 1000).exp().log(), x, use_reentrant=False)
        return result.sin()

    found = numerically_stable(model, X)
    assert found.first is not None
    assert (found.first.title, found.first.error) == ("exp", float("inf"))


def test_dropout_keeps_the_same_elements() -> None:
    found = compared(lambda x: functional.dropout(x.exp(), 0.5).log1p(), X)
    assert found
    assert list(backward_of(found)) == ["log1p", "exp"]


def test_gradients_flow_over_a_graph_break() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.exp()
        torch._dynamo.graph_break()
        return y.log()

    found = compared(model, X)
    exp = backward_of(found)["exp"]
    assert exp.error_before == backward_of(found)["log"].error > 0


def test_what_is_written_between_two_graphs() -> None:
    """The reference begins anew: it does not know what was written."""

    def model(x: Tensor) -> Tensor:
        y = x.exp()
        torch._dynamo.graph_break()
        y.data.mul_(2)
        y.add_(1)
        torch._dynamo.graph_break()
        return y.log()

    assert numerically_stable(model, X)
    assert compared(model, X)


def test_the_backward_begins_anew_where_operations_ran_between_graphs() -> None:
    def model(x: Tensor) -> Tensor:
        return (x.exp() / 7).clamp(float(X[0, 0]) / 7, 1)

    with warnings.catch_warnings(), pytest.warns(RuntimeWarning, match="not every operation"):
        found = compared(model, X)
    assert found.between > 0
    assert {"exp", "truediv"} <= {title.replace("div", "truediv") for title in backward_of(found)}


def test_what_cannot_be_compared_is_counted() -> None:
    """Operations inside torch.func, and those that no gradient came to."""
    found = compared(torch.vmap(lambda x: (x.exp() * x).sum()), X)
    assert "3 operations and the backward of 0 compared, the backward of 3 not" in str(found)

    found = compared(lambda x: (x.sin(), x.exp().detach()), X)
    assert "the backward of 1 not" in str(found)


def test_the_model_is_left_alone() -> None:
    """A copy runs: nobody's gradients, modes and random numbers change."""
    model = fxguard.instrument(nn.Sequential(nn.Linear(64, 8), nn.Dropout(), nn.Softmax(-1)))
    x = X.clone().requires_grad_()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert compared(model, x)
            assert torch.is_grad_enabled() is grad
    assert x.grad is None
    assert all(p.grad is None for p in model.parameters())
    assert fxguard.guard_of(model).batch_number == 0


@pytest.mark.parametrize("x", [torch.arange(4), torch.ones(4, dtype=torch.bool)])
def test_nothing_to_differentiate(x: Tensor) -> None:
    with pytest.raises(fxguard.FxguardError, match="there is nothing to differentiate"):
        compared(lambda x: x.float().exp(), x)


LONG = [
    pytest.param(name, marks=pytest.mark.campaign)
    for name in ("t5", "llama", "gpt2", "bert", "vit", "resnet", "whisper", "mixtral")
]


@pytest.mark.parametrize("name", ["cnn", *LONG])
def test_healthy_models(name: str) -> None:
    """Real models of two layers with their loss are stable in float32 and bfloat16."""
    entry = zoo.ZOO[name]
    model = entry.model()
    args, kwargs = entry.inputs(torch.float32, entry.has_mask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Mixtral's grouped products know no float64
        for options in ({"dtype": torch.float32, "tolerance": 1e-4}, {"dtype": torch.bfloat16}):
            found = compared(model, *args, **options, **kwargs)
            assert found, str(found)
            assert len(backward_of(found)) > 4
