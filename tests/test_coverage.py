"""What is not entered is counted as such, and what comes out of it is checked."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_models import assert_same, results
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxguard


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.linear(x))


class Checkpointed(nn.Module):
    """One block recomputed in backward: a higher-order operation in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x * 1, use_reentrant=False) + 1


class Vectorized(nn.Module):
    """A torch.func region in the graph, as in Mamba."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: torch.exp(row).sum() * row)(self.linear(x))


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = torch.exp(x)
        ctx.save_for_backward(result)
        return result * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return gradient * result * 2


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Exponential.apply(self.linear(x))


CASES = {
    Checkpointed: "inside tag_activation_checkpoint",
    Vectorized: "inside a torch.func region",
    Custom: "inside autograd_function_apply",
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", CASES)
def test_regions_that_are_not_entered(kind: type[nn.Module], backend: str) -> None:
    """Results keep every bit, `coverage` counts what is inside, a fault is blamed on the region."""
    torch.manual_seed(0)
    plain = kind()
    model = fxguard.instrument(copy.deepcopy(plain))
    inputs = ((torch.randn(3, 4),), {})
    expected = results(torch.compile(plain, backend=backend), inputs, train=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    assert_same(expected, results(compiled, inputs, train=True))
    coverage = fxguard.guard_of(model).coverage()
    assert CASES[kind] in coverage
    checked, total = coverage.removeprefix("checked ").split(" operations")[0].split(" of ")
    assert int(checked) < int(total)
    with pytest.raises(fxguard.NonFiniteError) as caught:
        compiled(torch.full((3, 4), 1e4))
    assert caught.value.report.origins[0].problem in ("inf", "nan")


@pytest.mark.parametrize("kind", CASES)
def test_a_fault_before_a_region_is_blamed_there(kind: type[nn.Module]) -> None:
    """What came into a region bad is not blamed on the region."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = kind()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(torch.sqrt(x))

    reports: list[fxguard.Report] = []
    model = fxguard.instrument(Model(), on_detect=reports.append)
    model(torch.ones(3, 4))
    assert not reports
    model(-torch.ones(3, 4))
    assert [origin.what for origin in reports[0].origins] == ["sqrt"]


def test_backward_recomputation_is_no_batch() -> None:
    """A checkpointed block runs again in backward; that is no call of the model."""
    model = fxguard.instrument(Checkpointed())
    for _ in range(2):
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert fxguard.guard_of(model).batch_number == 2


def test_a_model_that_is_entered_whole_says_so() -> None:
    """The clean twin: the same block without a region is checked to the last operation."""
    model = fxguard.instrument(Block())
    model(torch.randn(3, 4))
    assert fxguard.guard_of(model).coverage() == "checked 2 of 2 operations in 1 graph"
