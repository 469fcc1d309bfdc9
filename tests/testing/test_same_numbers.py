"""``numerically_stable`` and ``compare`` say the same numbers of one model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxguard import compare
from fxguard.testing import Deviation, Stability, numerically_stable

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


class Module(nn.Module):
    """A function with one weight, which tells ``compare`` the dtype."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.weight)


def cancelling_variance(x: Tensor, weight: Tensor) -> Tensor:
    x = x * weight + 100
    return (x * x).mean(-1) - x.mean(-1).square()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def attention(x: Tensor, weight: Tensor) -> Tensor:
    x = x * weight
    return (x @ x.transpose(-1, -2) / 8).softmax(-1) @ x


def overflowing(x: Tensor, weight: Tensor) -> Tensor:
    return (x * 3e5 * weight).sigmoid()


def zero_but_for_roundings(x: Tensor, weight: Tensor) -> Tensor:
    return (x + 1) - 1 - x * weight


def writing(x: Tensor, weight: Tensor) -> Tensor:
    y = x * weight
    y[0] = x[1] * 3
    y.mul_(x).add_(x)
    return y.exp_()


def broken_in_two(x: Tensor, weight: Tensor) -> Tensor:
    y = (x * weight).exp()
    torch._dynamo.graph_break()
    return y.log1p()


def checkpointed(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = checkpoint(
        lambda x: (x.exp() * 2).log(), (x * weight).sin(), use_reentrant=False
    )
    return result


def layers() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(64, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8), nn.Softmax(-1))
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 64)), nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.Tanh(), nn.AvgPool1d(2)
    )


FUNCTIONS = (
    *(cancelling_variance, norm, attention, overflowing, zero_but_for_roundings),
    *(writing, broken_in_two, checkpointed),
)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": layers,
    "convolutions": convolutions,
    **{each.__name__: lambda each=each: Module(each) for each in FUNCTIONS},  # type: ignore[misc]
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def in_a_dtype(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """A model and its input."""
    torch.manual_seed(0)
    return MODELS[name]().to(dtype), X.to(dtype)


def of(found: Stability, phase: str) -> list[Deviation]:
    return [each for each in found.deviations if each.phase == phase]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_errors_of_operations(name: str, dtype: torch.dtype) -> None:
    """That of each operation is how far its result is from that of the model in float64."""
    model, x = in_a_dtype(name, dtype)
    stable = numerically_stable(model, x, dtype=dtype)
    compared = compare(copy.deepcopy(model).double(), model, x.double())
    mine = [(each.title, each.error) for each in of(stable, "forward")]
    theirs = [
        (each.title.partition(" #")[0], each.total.relative)
        for each in compared.operations
        if each.total is not None
    ]
    assert mine == theirs
    worst = max(of(stable, "forward"), key=lambda each: each.error)
    assert (worst.title, worst.error) == max(theirs, key=lambda pair: pair[1])
    assert worst.error > 0


def test_complex_numbers() -> None:
    """They are pairs of real ones."""

    def spectrum(x: Tensor, weight: Tensor) -> Tensor:
        return (torch.fft.rfft(x * weight) * 1j).abs()

    model = Module(spectrum)
    compared = compare(copy.deepcopy(model).double(), model, X.double())
    found = numerically_stable(model, X, dtype=torch.float32).deviations
    errors = [each.total.relative for each in compared.operations if each.total is not None]
    assert [each.error for each in found] == errors
    assert [each.title for each in found] == ["mul", "fft_rfft", "mul", "abs"]
    assert found[1].error > 0


# Those whose first operation is the only one that reads the input, and reads leaves alone.
READ_ONCE = (
    *("layers", "convolutions", "cancelling_variance", "attention", "broken_in_two"),
    "checkpointed",
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", READ_ONCE)
def test_errors_of_gradients(name: str, dtype: torch.dtype) -> None:
    """The first operation hands back the gradients of the input and of its own weights."""
    model, x = in_a_dtype(name, dtype)
    stable = numerically_stable(model, x, dtype=dtype, gradients=True)
    compared = compare(model, copy.deepcopy(model), x.requires_grad_())
    last = of(stable, "backward")[-1]
    first = of(stable, "forward")[0]
    assert (last.title, last.source) == (first.title, first.source)
    module = first.title.rpartition(" ")[0]
    names = {f"{module}.weight".lstrip("."), f"{module}.bias", "input 0"}
    errors = [each.errors for each in compared.gradients if each.title in names]
    assert len(errors) >= 2
    assert last.error == max(error[0] for error in errors if error is not None) > 0


class Choosing(nn.Module):
    """A network of two relus behind batch norms, so that some are on the other side of 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Linear(64, 999), nn.BatchNorm1d(999), nn.ReLU()),
            *(nn.Linear(999, 99), nn.BatchNorm1d(99), nn.ReLU(inplace=True)),
        )

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


def test_derivatives_that_jump() -> None:
    """Both take them at the operands that the model had."""
    model, x = Choosing().bfloat16(), X.bfloat16()
    backward = of(numerically_stable(model, x, dtype=torch.bfloat16, gradients=True), "backward")
    low, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    assert not torch.equal(low.layers[:2](x) > 0, exact.layers[:2](x.double()) > 0)
    compared = compare(model, copy.deepcopy(model), x.requires_grad_())
    errors = {each.title: each.errors[0] for each in compared.gradients if each.errors}
    first = [error for name, error in errors.items() if name[:8] in ("layers.0", "input 0")]
    assert len(first) == 3
    assert backward[-1].title == "layers.0 linear"
    assert backward[-1].error == max(first)
    assert max(errors.values()) <= max(each.error for each in backward) < 0.1


def test_errors_of_outputs() -> None:
    """A model and its copy are both as far from float64 as the last operation is."""
    model, x = in_a_dtype("layers", torch.float16)
    found = compare(model, copy.deepcopy(model), x)
    last = numerically_stable(model, X).deviations[-1]
    assert found.outputs[0].errors == (last.error, last.error)
