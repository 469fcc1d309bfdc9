"""The four outcomes of a comparison, and what each of them says."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxguard


class Does(nn.Module):
    """A model with one weight that does what it is told."""

    def __init__(self, does: Any, **parts: Any) -> None:
        super().__init__()
        self.weight, self.does = nn.Parameter(torch.ones(1)), does
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.does(self, x)


def grows(s: Any, x: Tensor) -> Tensor:
    """Each rounding of the first product is a thousand times as large in the end."""
    return ((x * 1000 * s.weight) * 1.7).sin()


def test_roundings_that_add_up(tmp_path: Path) -> None:
    """No operation is to blame, and the text says so; with a wider tolerance the two agree."""
    a, x = Does(grows), torch.linspace(0.1, 1, 64)
    b = copy.deepcopy(a).to(torch.bfloat16)
    found = fxguard.compare(a, b, x)
    assert found.outcome == "precision", str(found)
    assert not found.agrees
    assert not found.differs
    assert found.first is None
    want = a(x).double()
    distance = (
        b(x.bfloat16()).double() - want
    ).square().mean().sqrt() / want.square().mean().sqrt()
    assert found.outputs[0].distance == pytest.approx(float(distance))
    assert found.outputs[0].tolerance == pytest.approx(4 * torch.finfo(torch.bfloat16).eps / 2)
    assert found.verdict[0].startswith("A and B differ in precision: output 0 is ")
    assert found.verdict[0].endswith("% apart (root mean square), its tolerance is 1.6 %")
    assert "no operation is at fault" in found.verdict[1]
    data = json.loads(found.to_json())
    assert (data["outcome"], data["agrees"]) == ("precision", False)
    assert data["outputs"][0]["output_tolerance"] == found.outputs[0].tolerance
    found.to_html(tmp_path / "page.html")
    assert (
        'class="verdict ill"><p>A and B differ in precision' in (tmp_path / "page.html").read_text()
    )
    assert fxguard.compare(a, b, x, output_tolerance=2 * float(distance)).outcome == "agree"
    assert fxguard.compare(a, copy.deepcopy(a), x, output_tolerance=0).outcome == "agree"
    with pytest.raises(fxguard.FxguardError, match="0 or more"):
        fxguard.compare(a, b, x, output_tolerance=-1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_models_of_one_dtype_both_round(dtype: torch.dtype) -> None:
    """So they may be further apart than one of them is from float64."""
    a = Does(lambda s, x: x * s.weight).to(dtype)
    alike = fxguard.compare(a, copy.deepcopy(a), torch.ones(4, dtype=dtype)).outputs[0]
    exact = fxguard.compare(a, copy.deepcopy(a).double(), torch.ones(4)).outputs[0]
    assert exact.tolerance == pytest.approx(4 * torch.finfo(dtype).eps / 2)
    assert alike.tolerance == pytest.approx(math.sqrt(2) * exact.tolerance)


def test_choices_that_roundings_made() -> None:
    """Integers that differ are counted; the two programs choose the same in float64."""
    x = torch.tensor([[1.0, 1.0 + 1e-3], [2.0, 1.0]])
    a = Does(lambda s, x: (x * s.weight).argmax(-1))
    found = fxguard.compare(a, copy.deepcopy(a).to(torch.bfloat16), x)
    assert found.outcome == "precision"
    assert "50 % of the elements of output 0 differ" in found.verdict[0]


def test_an_operation_of_one_model_that_overflows() -> None:
    """It is named although the other model has no such operation."""
    x = torch.full((2, 4), 200.0)
    a = Does(lambda s, x: x.float().norm(dim=-1).to(x.dtype) * s.weight)
    b = Does(lambda s, x: x.square().sum(-1).sqrt() * s.weight)
    assert fxguard.compare(a, b, x).agrees
    half = a.half(), b.half()
    found = fxguard.compare(*half, x.half())
    assert found.outcome == "operation"
    assert found.first is not None
    assert (found.first.kind, found.first.only_in) == ("sum", "B")
    assert found.first.reason == "overflow in B: needs 160000, float16 holds 65504"


def test_a_model_that_raised() -> None:
    """For a bad value: there are no outputs to judge."""

    def raises(s: Any, x: Tensor) -> Tensor:
        y = x * s.weight
        torch._dynamo.graph_break()
        return torch.linalg.cholesky(y.log())

    a = Does(raises)
    found = fxguard.compare(a, copy.deepcopy(a), -torch.eye(2))
    assert found.outcome == "not compared"
    assert found.verdict[0] == (
        "A and B were compared as far as they ran: a bad value led to an exception"
    )


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3)
    ).train()


class Shifted(torch.autograd.Function):
    """Hands back too much to a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient + 1


def attention(s: Any, x: Tensor) -> Tensor:
    q, k, v = (layer(x).view(2, -1, 2, 8).transpose(1, 2) for layer in (s.q, s.k, s.v))
    return functional.scaled_dot_product_attention(q, k, v)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def attending() -> nn.Module:
    torch.manual_seed(0)
    return Does(attention, **{name: nn.Linear(16, 16) for name in "qkv"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("model", "x", "weight"),
    [
        (normalized, drawn(4, 3, 8, 8), "0.bias"),
        (attending, drawn(2, 7, 16), "k.bias"),
    ],
)
def test_a_gradient_that_is_0_by_mathematics(
    model: Any, x: Tensor, weight: str, dtype: torch.dtype
) -> None:
    """What is left of it are roundings of what cancelled in it. Anything larger is a divergence."""
    a = model()
    found = fxguard.compare(a, copy.deepcopy(a).to(dtype), x)
    (of_bias,) = (each for each in found.gradients if each.title == weight)
    assert of_bias.total is not None
    assert of_bias.total.relative > 0.5, "nothing but roundings"
    assert not found.differs, str(found)
    b = model().to(dtype)
    layer = b.get_submodule(weight.partition(".")[0])
    layer.register_forward_hook(lambda module, given, made: Shifted.apply(made))
    found = fxguard.compare(a, b, x)
    assert found.outcome == "operation"
    assert weight in {each.title for each in found.gradients if each.is_significant}


KERNELS = {
    "gelu": functional.gelu,
    "tanhshrink": functional.tanhshrink,
    "rms_norm": lambda x: functional.rms_norm(x, (64,)),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [1e-3, 1.0, 3.0])
def test_kernels_that_cancel_inside_are_healthy(kernel: str, size: float) -> None:
    """Single elements far out, all elements small: the bound has a margin on any machine."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * size
    x[0, 0], x[3, 5] = -5, 6
    a = Does(lambda s, x: KERNELS[kernel](x * s.weight))
    # Of numbers as small as its eps, a norm in float64 is another one: it has another eps.
    for dtype in (torch.bfloat16, torch.float64) if size >= 1 else (torch.bfloat16,):
        assert not fxguard.compare(a, copy.deepcopy(a).to(dtype), x).differs
    wrong = Does(lambda s, x: KERNELS[kernel](x * s.weight) + 1e-3)
    assert fxguard.compare(a, wrong, x).outcome == "operation"


IN_HALF: dict[str, Any] = {
    "instance_norm": lambda x: functional.instance_norm(x.view(2, 16, 64)),
    "lp_pool1d": lambda x: functional.lp_pool1d(x.view(2, 16, 64), 2.0, 4),
    "special_i0": torch.special.i0,
}


@pytest.mark.parametrize("kernel", IN_HALF)
@pytest.mark.parametrize("size", [0.1, 1.0, 2.0])
def test_kernels_in_float16_are_healthy(kernel: str, size: float) -> None:
    """Squares, means and series in float16, of numbers that it holds."""
    a = Does(lambda s, x: IN_HALF[kernel](x * s.weight))
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * size
    assert not fxguard.compare(a, copy.deepcopy(a).half(), x).differs


@pytest.mark.parametrize(
    ("kernel", "size", "reason"),
    [("lp_pool1d", 1e-4, "B is further from float64"), ("special_i0", 10.0, "overflow in B")],
)
def test_kernels_that_leave_the_range_of_float16(kernel: str, size: float, reason: str) -> None:
    """The kernel is wrong there, and not the bound: squares become 0, results infinite."""
    a = Does(lambda s, x: IN_HALF[kernel](x * s.weight))
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * size
    found = fxguard.compare(a, copy.deepcopy(a).half(), x).first
    assert found is not None
    assert found.kind == kernel
    assert found.reason.startswith(reason)


def test_attention_in_float64() -> None:
    """Roundings of float64 move results too."""
    torch.manual_seed(0)
    a, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 16, 8)
    found = fxguard.compare(a, copy.deepcopy(a).double(), x, x, x, gradients=False)
    assert found.agrees, str(found)


def test_outputs_that_nothing_can_follow() -> None:
    """Within the tolerance they agree; a little beyond it nobody knows."""

    def outside(s: Any, x: Tensor) -> Tensor:
        return torch.compiler.disable(torch.mul)(x * s.weight, s.factor)

    a, b = Does(outside, factor=2.0), Does(outside, factor=2.0 + 1e-5)
    x = torch.randn(4, 4)
    assert fxguard.compare(a, Does(outside, factor=2.0), x).agrees
    found = fxguard.compare(a, b, x)
    assert found.outcome == "not compared"
    assert math.isclose(found.outputs[0].distance or 0.0, 5e-6, rel_tol=0.1)
    assert fxguard.compare(a, b, x, output_tolerance=1e-4).agrees


def all_at_once(s: Any, x: Tensor) -> Tensor:
    made = x * s.weight
    return torch.empty_like(made).copy_(made.relu())


def part_by_part(s: Any, x: Tensor) -> Tensor:
    made = x * s.weight
    room = made.new_empty(made.shape[0], 2 * made.shape[1])
    room[:, : made.shape[1]] = made
    room[:, made.shape[1] :] = made.relu()
    return room


def joined(s: Any, x: Tensor) -> Tensor:
    return torch.cat([x * s.weight, (x * s.weight).relu()], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize(("one", "other"), [(all_at_once,) * 2, (part_by_part, joined)])
def test_memory_that_is_written_later_holds_no_numbers(
    one: Any, other: Any, dtype: torch.dtype
) -> None:
    """Two models get other contents of it, and a smaller dtype may not hold them."""
    x = torch.linspace(-1, 1, 16).view(4, 4)
    for a, b in ((one, one), (one, other), (other, one)):
        for _ in range(2):  # what was freed is what is given next
            torch.full((4, 8), 1e30), torch.full((4, 4), math.nan)
            found = fxguard.compare(Does(a), Does(b).to(dtype), x)
            assert found.agrees, str(found)
    wrong = Does(lambda s, x: one(s, x) + 1e-2)
    assert fxguard.compare(Does(one), wrong.to(dtype), x).outcome == "operation"


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_numbers_of_two_halves() -> None:
    """They are compared, though torch has no kernel that tells whether two tensors are equal."""
    a = Does(lambda s, x: torch.view_as_complex(x * s.weight).abs()).half()
    b = Does(lambda s, x: torch.view_as_complex(x * s.weight * 1.1).abs()).half()
    x = drawn(4, 2).half()
    assert fxguard.compare(a, copy.deepcopy(a), x).agrees
    assert fxguard.compare(a, b, x).outcome == "operation"


class Outside(nn.Module):
    """A linear layer that no graph has."""

    def __init__(self, linear: nn.Linear, factor: float) -> None:
        super().__init__()
        self.linear, self.factor = linear, factor

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x) * self.factor
        return made


class Step(nn.Module):
    """A residual step around a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), layer

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.layer(self.norm(x).tanh())
        return made


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_what_one_model_runs_between_graphs(wrong: int) -> None:
    """Named is what makes other values, and not what is in a graph of the other model alone."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(3)]
    table = nn.Linear(8, 8)
    a = nn.Sequential(table, *map(Step, layers))

    def outside(wrong: int) -> nn.Module:
        factors = [1 + 0.1 * (number == wrong) for number in range(3)]
        parts = [Outside(*each) for each in zip(layers, factors, strict=True)]
        return nn.Sequential(Outside(table, 1), *map(Step, parts))

    x = drawn(4, 8)
    assert not fxguard.compare(a, outside(-1), x).differs
    for one, other, side in ((a, outside(wrong), "A"), (outside(wrong), a, "B")):
        found = fxguard.compare(one, other, x)
        assert found.first is not None
        assert found.first.title == f"{wrong + 1}.layer linear", str(found)
        assert found.first.only_in == side
        assert found.first.reason.startswith(f"it is in a graph of {side} alone, and ")


def test_what_no_value_in_between_tells() -> None:
    """Where the other model runs all of it between graphs, the output is named, and no guess."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(8, 8) for name in ("first", "second")}
    a = Does(lambda s, x: s.second(s.first(x).tanh()), **layers)
    parts = {name: Outside(x, 1 + 0.1 * (name == "second")) for name, x in layers.items()}
    found = fxguard.compare(a, Does(a.does, **parts), drawn(4, 8))
    assert found.outcome == "operation"
    assert [each.title for each in found.operations if each.is_significant] == []
    assert found.outputs[0].reason.endswith("not every operation was compared")


def euclidean(x: Tensor) -> Tensor:
    return torch.cdist(x, x.roll(1, 0))


def clamped(x: Tensor) -> Tensor:
    return torch.logit(x.sigmoid(), 1e-3)


def resized(x: Tensor) -> Tensor:
    return functional.interpolate(x[None, None], scale_factor=1.7, mode="bicubic")


def sampled(x: Tensor) -> Tensor:
    grid = x[None, :, :, None].repeat(1, 1, 1, 2) / x.abs().max()
    return functional.grid_sample(x[None, None], grid, align_corners=False)


def near(x: Tensor) -> Tensor:
    return functional.cosine_embedding_loss(x, x * 1.0001, torch.ones(len(x)))


@pytest.mark.parametrize("scale", [(0.0, 1.0), (100.0, 0.01), (0.0, 1e-6), (0.0, 1e3)])
def test_kernels_that_round_larger_numbers_inside_are_healthy(scale: tuple[float, float]) -> None:
    """Squares that cancel, positions in an image, a bound near 1: on any machine, in any dtype."""
    drawn_rows = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    x = scale[0] + scale[1] * drawn_rows
    kernels = (euclidean, clamped, resized, sampled, near)
    a = Does(lambda s, x: tuple(kernel(x * s.weight) for kernel in kernels))
    for dtype in (torch.float64, torch.bfloat16):
        found = fxguard.compare(a, copy.deepcopy(a).to(dtype), x, gradients=False)
        told = [each.reason for each in found.operations if "further from" in each.reason]
        assert not told, str(found)


def test_distances_that_are_wrong_are_found() -> None:
    """Also where squares cancel: the bound is that of the kernel, and no more."""
    x = drawn(32, 64)

    class Wrong(torch.nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.weight, self.factor = nn.Parameter(torch.ones(1)), factor

        def forward(self, x: Tensor) -> Tensor:
            return torch.cdist(x * self.weight, x.roll(1, 0) * self.factor)

    assert fxguard.compare(Wrong(1.0), Wrong(1.0), x).agrees
    assert fxguard.compare(Wrong(1.0), Wrong(1.00001), x).outcome == "operation"


def test_an_infinity_that_the_dtype_could_hold() -> None:
    """The text names no limit that was not reached."""
    a = Does(lambda s, x: torch.logit(x * s.weight, 1e-3))
    found = fxguard.compare(a, copy.deepcopy(a).to(torch.bfloat16), torch.tensor([0.5, 1.0]))
    assert found.first is not None
    assert found.first.reason == "inf in B, and 6.90675 in float64 on the same operands"
