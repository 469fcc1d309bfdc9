"""The bodies of higher-order operations and torch.func regions are entered."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as hop_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import fxguard
from fxguard.graph import higher_order, tables
from fxguard.verdict import report_of
from support import zoo
from support.models import Block
from support.needs import TORCH
from support.same_results import assert_same, results


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


class ExponentialAndSine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return torch.exp(x), torch.sin(x)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return first * torch.exp(x) + second * torch.cos(x)


@torch.compiler.nested_compile_region
def region(x: Tensor) -> Tensor:
    return torch.exp(x) * 2


def in_while_loop(model: nn.Module, x: Tensor) -> Tensor:
    def body(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.exp(model.block.linear(y) * 2)

    return while_loop(lambda i, y: i < 2, body, (torch.tensor(0), x))[1]


def in_scan(model: nn.Module, x: Tensor) -> Tensor:
    def combine(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return carry + row, torch.exp(row * 2) + carry

    carry, rows = scan(combine, torch.zeros(4), model.block.linear(x), dim=0)
    return carry + rows


# What runs the block, or an exponential, inside something; which operation overflows in it.
INSIDE: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "checkpoint": (lambda m, x: checkpoint(m.block, x, use_reentrant=False) + 1, "exp"),
    "reentrant checkpoint": (lambda m, x: checkpoint(m.block, x, use_reentrant=True) + 1, "exp"),
    "checkpoint in checkpoint": (
        lambda m, x: checkpoint(
            lambda y: checkpoint(m.block, y, use_reentrant=False) * 2, x, use_reentrant=False
        ),
        "exp",
    ),
    "cond": (
        lambda m, x: torch.cond(
            x.sum() > -1e9, lambda y: m.block(y), lambda y: m.block.linear(y).sin(), (x,)
        ),
        "exp",
    ),
    "while_loop": (in_while_loop, "exp"),
    "scan": (in_scan, "exp"),
    "map": (
        lambda m, x: hop_map(
            lambda row, w: torch.exp(row * w), m.block.linear(x), torch.full((4,), 3.0)
        ),
        "exp",
    ),
    "autograd function": (lambda m, x: Exponential.apply(m.block.linear(x)), "exp"),
    "two outputs": (lambda m, x: ExponentialAndSine.apply(m.block.linear(x))[0], "exp"),
    "nested region": (lambda m, x: region(m.block.linear(x)) + region(x / 1e9), "exp"),
    "vmap": (
        lambda m, x: torch.func.vmap(lambda row: torch.exp(row).sum() * row)(m.block.linear(x)),
        "exp",
    ),
    "vmap in vmap": (
        lambda m, x: torch.func.vmap(torch.func.vmap(lambda y: torch.exp(y) * 2))(
            m.block.linear(x)
        ),
        "exp",
    ),
    "grad": (
        lambda m, x: torch.func.grad(lambda y: (torch.exp(y) * 2).sum())(m.block.linear(x)),
        "exp",
    ),
    "jvp": (
        lambda m, x: torch.func.jvp(lambda y: torch.exp(y) * 2, (m.block.linear(x),), (x,))[0],
        "exp",
    ),
}

# The eager backend runs the graph as it is, and these cannot be differentiated that way.
FORWARD_ONLY = {("nested region", "eager")}
if TORCH < (2, 12):
    FORWARD_ONLY.add(("scan", "aot_eager"))  # "scan might be aliasing the input or the output"


class Inside(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.block = Block()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Inside(INSIDE[name][0])


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", INSIDE)
def test_entering_changes_no_bit(name: str, backend: str) -> None:
    """Outputs and gradients are those of the plain model under the same backend."""
    plain = model_of(name)
    guarded = fxguard.instrument(copy.deepcopy(plain))
    inputs = ((torch.randn(3, 4),), {})
    train = (name, backend) not in FORWARD_ONLY
    expected = results(torch.compile(plain, backend=backend, fullgraph=True), inputs, train=train)
    torch._dynamo.reset()
    compiled = torch.compile(guarded, backend=backend, fullgraph=True)
    assert_same(expected, results(compiled, inputs, train=train))
    coverage = fxguard.guard_of(guarded).coverage()
    assert "not checked" not in coverage
    assert coverage.endswith("in 1 graph")


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", INSIDE)
def test_a_fault_inside_is_blamed_on_the_operation(name: str, backend: str) -> None:
    """The operation in the body is named with its line, counted, and shown in its frame."""
    reports: list[fxguard.types.Report] = []
    guarded = fxguard.instrument(model_of(name), on_detect=reports.append)
    compiled = torch.compile(guarded, backend=backend, fullgraph=True)
    with torch.no_grad():
        compiled(torch.rand(3, 4))
        assert not reports
        sign = torch.sign(guarded.block.linear.weight.sum(0))
        compiled(1e4 * sign.expand(3, 4))
    origin = reports[0].origins[0]
    assert (origin.what, origin.problem) == (INSIDE[name][1], "inf")
    assert origin.frame.source is not None
    assert "exp(" in origin.frame.source.code
    assert origin.posinf_count
    assert reports[0].frames[-1] == origin.frame


@pytest.mark.sampled
@pytest.mark.parametrize("name", INSIDE)
def test_what_came_in_bad_is_not_blamed_on_what_is_inside(name: str) -> None:
    reports: list[fxguard.types.Report] = []
    guarded = fxguard.instrument(model_of(name), on_detect=reports.append)
    with torch.no_grad():
        guarded(torch.full((3, 4), float("nan")))
    assert [origin.what for origin in reports[0].origins] == ["argument `x` of Inside.forward"]


NOT_ENTERED = {  # what is blamed then
    "checkpoint": "tag_activation_checkpoint",
    "cond": "cond",
    "scan": "scan",
    "vmap": "sum",
    "while_loop": "while_loop",
}


@pytest.mark.parametrize("name", NOT_ENTERED)
def test_the_tests_above_can_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not entered, the same fault is blamed on the whole, and coverage says what was not seen."""
    monkeypatch.setattr(higher_order, "ENTERED", {})
    moves = tables.MOVES | {"exp", "linear"}
    if name == "vmap":  # regions are no operations: hide what is inside
        monkeypatch.setattr(tables, "MOVES", moves)
    reports: list[fxguard.types.Report] = []
    guarded = fxguard.instrument(model_of(name), on_detect=reports.append)
    compiled = torch.compile(guarded, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(1e4 * torch.sign(guarded.block.linear.weight.sum(0)).expand(3, 4))
    assert reports[0].origins[0].what == NOT_ENTERED[name]
    if name != "vmap":
        assert "not checked" in fxguard.guard_of(guarded).coverage()


def test_the_branch_that_did_not_run_has_no_frames() -> None:
    guarded = fxguard.instrument(model_of("cond"))
    guarded(torch.rand(3, 4))
    kinds = [frame.kind for frame in fxguard.guard_of(guarded).frames()]
    assert "sin" not in kinds
    assert "exp" in kinds


def test_a_loop_shows_the_first_bad_iteration() -> None:
    """Only the second iteration overflows; what it read was finite."""

    class Loop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            def body(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
                z = y * 2
                return i + 1, z * z

            return while_loop(lambda i, y: i < 6, body, (torch.tensor(0), x))[1]

    reports: list[fxguard.types.Report] = []
    fxguard.instrument(Loop(), on_detect=reports.append)(torch.full((3,), 1e15))
    first = reports[0].origins[0]
    assert (first.what, first.problem) == ("mul", "inf")
    assert first.frame.source is not None
    assert first.frame.source.code == "return i + 1, z * z"
    assert all(row.abs_max is not None and row.abs_max < 1e38 for row in first.frame.rows[:-1])


def test_an_infinity_that_a_loop_begins_with_is_no_fault() -> None:
    """A running maximum starts at -inf; a fault in a later iteration is still blamed."""

    class RunningMaximum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            def combine(top: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
                return torch.maximum(top, row), torch.exp(row)

            top, rows = scan(combine, torch.full((4,), float("-inf")), x, dim=0)
            return top + rows

    reports: list[fxguard.types.Report] = []
    guarded = fxguard.instrument(RunningMaximum(), on_detect=reports.append)
    x = torch.rand(5, 4)
    guarded(x)
    assert not reports
    x[3, 2] = 100.0
    guarded(x)
    assert [origin.what for origin in reports[0].origins] == ["exp"]


# On each change: faults are planted in a checkpointed model, by `test_planted_faults.py`.
@pytest.mark.campaign
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["t5", "llama", "gpt2", "bert"])
def test_transformers_gradient_checkpointing(name: str, backend: str) -> None:
    """The blocks are entered, bits stay, and recomputation in backward is no batch or frame."""
    entry = zoo.ZOO[name]
    plain = entry.model(train=True)
    plain.config.use_cache = False
    without = fxguard.instrument(copy.deepcopy(plain))
    plain.gradient_checkpointing_enable()
    guarded = fxguard.instrument(copy.deepcopy(plain))
    inputs = entry.inputs(torch.float32, entry.has_mask)
    # torch's own "eager" draws other random numbers in the backward: see checkpointing.py.
    reference = plain if backend == "eager" else torch.compile(plain, backend=backend)
    expected = results(reference, inputs, train=True)
    torch._dynamo.reset()
    assert_same(expected, results(torch.compile(guarded, backend=backend), inputs, train=True))
    guard = fxguard.guard_of(guarded)
    assert guard.batch_number == 1
    assert "not checked" not in guard.coverage()
    torch._dynamo.reset()
    torch.manual_seed(0)
    without(*inputs[0], **inputs[1])
    shown = [frame.name for frame in guard.frames() if not frame.is_op]
    assert shown == [f.name for f in fxguard.guard_of(without).frames() if not f.is_op]


def test_recomputation_of_the_whole_model_is_no_batch() -> None:
    """The user checkpoints the guarded model itself: backward calls its forward again."""
    guarded = fxguard.instrument(Block())
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(2):
        checkpoint(guarded, x, use_reentrant=False).sum().backward()
    assert fxguard.guard_of(guarded).batch_number == 2


class Flex(nn.Module):
    """A score function with a mask, and a bias of which it reads one element at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x)

        def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            weight = torch.exp(value * 20)
            return torch.where(i >= j, weight - weight * 2 + self.bias[i, j], float("-inf"))

        return flex_attention(q, q, q, score_mod=score)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_flex_attention_score_functions(backend: str) -> None:
    """The operation in the score function is blamed, though no number leaves the kernel."""
    torch.manual_seed(0)
    plain = Flex().requires_grad_(False)
    reports: list[fxguard.types.Report] = []
    guarded = fxguard.instrument(copy.deepcopy(plain), on_detect=reports.append)
    x = torch.randn(1, 1, 64, 16)
    expected = torch.compile(plain, backend=backend, fullgraph=True)(x / 10)
    torch._dynamo.reset()
    compiled = torch.compile(guarded, backend=backend, fullgraph=True)
    assert torch.equal(expected, compiled(x / 10))
    assert "not checked" not in fxguard.guard_of(guarded).coverage()
    assert not reports
    compiled(x * 3)
    origin = reports[0].origins[0]
    assert (origin.what, origin.problem) == ("exp", "inf")
    assert origin.frame.source is not None
    assert origin.frame.source.code == "weight = torch.exp(value * 20)"
    assert origin.posinf_count
    # Without the look inside, the whole kernel is blamed.
    reports.clear()
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_of, "numbers_inside", lambda run: {})
        compiled(x * 3)
    assert [origin.what for origin in reports[0].origins] == ["flex_attention"]


@pytest.mark.parametrize("name", ["vmap", "vmap in vmap", "grad", "jvp", "autograd function"])
def test_regions_between_graphs(name: str) -> None:
    """Left to Python, under vmap or grad, operations are measured and blamed all the same."""
    plain = model_of(name)
    reports: list[fxguard.types.Report] = []
    guarded = fxguard.instrument(copy.deepcopy(plain), on_detect=reports.append)
    x = torch.rand(3, 4)
    torch.compiler.set_stance("force_eager")
    try:
        assert torch.equal(plain(x), guarded(x))
        assert not reports
        guarded(1e4 * torch.sign(plain.block.linear.weight.sum(0)).expand(3, 4))
    finally:
        torch.compiler.set_stance("default")
    assert "in 0 graphs" in fxguard.guard_of(guarded).coverage()
    assert reports[0].origins[0].what == "exp"
