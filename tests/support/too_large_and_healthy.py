"""Idioms in which a number overflows and the result is right all the same."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - everybody writes F
from torch import Tensor, nn

from support.twins import HALF, Draw, Twins

TOO_LARGE = Twins()
twin, sister, gone_wrong = TOO_LARGE.twin, TOO_LARGE.sister, TOO_LARGE.gone_wrong


def activations(draw: Draw) -> tuple[Tensor, ...]:
    """Their cubes overflow in float16."""
    return (draw.of(-60.0, -1.0, 0.5, 3.0, 60.0),)


def exponents(draw: Draw) -> tuple[Tensor, ...]:
    """Their exponentials overflow in float16: the largest is exp(11.09)."""
    return (draw.of(-12.0, -1.0, 0.5, 3.0, 12.0),)


def near_the_limit(draw: Draw) -> tuple[Tensor, ...]:
    """Their doubles overflow."""
    most = torch.finfo(draw.dtype).max
    return (draw.exact(-most / 1.5, -1.0, 0.25, 0.5, most / 1.5),)


class Large(nn.Module):
    """A linear layer whose results overflow, and what is made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[4.0, 0.0], [-4.0, 0.0], [0.0, 1.0]]))


def half_of_the_limit(draw: Draw) -> tuple[Tensor, ...]:
    most = torch.finfo(draw.dtype).max
    return (draw.exact([most / 2, 0.5], [most / 3, -0.25]),)


@twin(half_of_the_limit)
class TanhOfLinear(Large):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


@sister("linear")
class SoftsignOfLinear(Large):
    def forward(self, x: Tensor) -> Tensor:
        return F.softsign(self.linear(x))


@twin(half_of_the_limit)
class SigmoidOfLinear(Large):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x))


@sister("linear")
class ReluOfLinear(Large):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


@twin(half_of_the_limit)
class Relu6OfLinear(Large):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.linear(x)) + F.hardtanh(self.linear(x)) + F.elu(-self.linear(x).abs())


@sister("linear")
class ClipOfLinear(Large):
    """The clip hides that the number was not held."""

    def forward(self, x: Tensor) -> Tensor:
        most = torch.finfo(x.dtype).max
        return self.linear(x).clip(-most, most)


@sister("linear")
class NumbersOfLinear(Large):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nan_to_num(self.linear(x))


@twin(half_of_the_limit)
class LayersBetween(Large):
    """A submodule returns infinities, and the model does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(self.linear, nn.Identity(), nn.Tanh(), nn.Linear(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@twin(near_the_limit)
def tanh_of_infinity(x: Tensor) -> Tensor:
    return torch.tanh(x * 2)


@twin(near_the_limit)
def sigmoid_of_infinity(x: Tensor) -> Tensor:
    return torch.sigmoid(x * 2)


@sister("mul")
def gelu_of_infinity_returned(x: Tensor) -> Tensor:
    return F.gelu(x.abs() * 2, approximate="tanh")


@twin(near_the_limit)
def gelu_of_infinity_gates(x: Tensor) -> Tensor:
    return torch.tanh(F.gelu(x.abs() * 2, approximate="tanh"))


@twin(near_the_limit)
def cut_off_at_zero(x: Tensor) -> Tensor:
    return torch.relu(-(x * 2).abs()) + F.hardsigmoid(x * 2) + F.relu6(x * 2)


@twin(lambda draw: (draw.of(15.0, 0.5).view(1, 2),), dtypes=HALF)
class GeluOfLinear(Large):
    """As transformers write it: the cube of what the layer made overflows."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


@twin(activations, dtypes=HALF)
def gelu_by_its_cube(x: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


@sister("pow")
def cube_returned(x: Tensor) -> Tensor:
    return x + 0.044715 * torch.pow(x, 3.0)


@twin(exponents, dtypes=HALF)
def sigmoid_by_hand(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


@sister("exp")
def sigmoid_by_a_quotient(x: Tensor) -> Tensor:
    return torch.exp(x) / (1 + torch.exp(x))


@twin(exponents, dtypes=HALF)
def swish_by_hand(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


@twin(exponents, dtypes=HALF)
def softplus_by_where(x: Tensor) -> Tensor:
    return torch.where(x > 10, x, torch.log1p(torch.exp(x)))


@sister("exp")
def softplus_by_a_logarithm(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(x))


@twin(exponents, dtypes=HALF)
def box_sizes_that_are_clamped(x: Tensor) -> Tensor:
    return torch.exp(x).clamp(max=1000.0)


@sister("exp")
def box_sizes_clamped_at_the_limit(x: Tensor) -> Tensor:
    return torch.exp(x).clamp(max=65504.0)


@twin(exponents, dtypes=HALF)
def exponential_linear_unit(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.exp(x) - 1)


@sister("sum", lambda draw: (draw.of(10.0, 10.4, 10.2),))
def softmax_by_hand(x: Tensor) -> Tensor:
    return torch.exp(x) / torch.exp(x).sum()


@twin(activations, dtypes=HALF)
def squares_compared(x: Tensor) -> Tensor:
    return (x * 10).square() > 100.0


@sister("square", lambda draw: (draw.of(300.0, 400.0, 1.0),))
def largest_of_squares_that_overflow(x: Tensor) -> Tensor:
    return x.square().argmax()


@twin(lambda draw: (draw.of(300.0, 400.0, 1.0),), dtypes=HALF)
def kernel_of_a_large_distance(x: Tensor) -> Tensor:
    return torch.exp(-(x - 1).square())


@sister("square", lambda draw: (draw.normal(2, 64, scale=400.0),))
def norm_by_squares(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@twin(lambda draw: (draw.of(300.0, 400.0, 1.0),), dtypes=HALF)
def cauchy_kernel(x: Tensor) -> Tensor:
    """1 / (1 + d²), beside a point at the centre."""
    return 1 / (1 + torch.cat([x, x[:1] * 0]).square())


@twin(lambda draw: (draw.normal(2, 8, scale=300.0), draw.normal(2, 8, scale=0.1)), dtypes=HALF)
def the_larger_branch_is_not_taken(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x.abs() < 100, x * x, y)


@twin(lambda draw: (draw.exact(300.0, 70000.0, 1.0e5),), dtypes=(torch.bfloat16, torch.float32))
def cast_that_is_saturated(x: Tensor) -> Tensor:
    return torch.tanh(x.half())
