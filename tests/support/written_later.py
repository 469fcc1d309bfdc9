"""Functions that write what they have made, in all ways that a captured graph has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["CASES", "X"]


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.mark_dirty(x)
        return x.mul_(-7)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0] * -7


@torch.library.custom_op("waiting::spoils", mutates_args={"x"})
def spoils(x: Tensor) -> None:
    x.mul_(11)


@spoils.register_fake
def _(x: Tensor) -> None:
    return None


def out(x: Tensor) -> Any:
    made = x * 2
    torch.add(x, 5, out=made)
    return made + 1


def in_a_view(x: Tensor) -> Any:
    made = x * 2
    made.view(-1)[3:5].fill_(100.0)
    return made


def through_detach(x: Tensor) -> Any:
    made = x * 2
    made.detach().mul_(9)
    made.data.add_(1)
    return made * 1


def a_chunk(x: Tensor) -> Any:
    left, right = (x * 3).chunk(2, dim=1)
    left.sub_(40)
    return left, right, left + right


def of_each(x: Tensor) -> Any:
    made = [x * 2, x + 3]
    torch._foreach_mul_(made, 10.0)
    return made[0] + made[1]


def parts(x: Tensor) -> Any:
    made = x * 2
    made[1] = 70.0
    made.index_put_((torch.tensor([0]),), torch.tensor(90.0))
    made.masked_fill_(made > 80, -3.0)
    return made.copy_(x)


def the_input(x: Tensor) -> Any:
    made = x + 1
    x.mul_(12)
    return made, x * 2


def hidden(x: Tensor) -> Any:
    made = x * 2
    spoils(made)
    return made + 1


def by_hand(x: Tensor) -> Any:
    made = x * 2
    return Writes.apply(made) + 1


def statistics_of_a_batch(x: Tensor, mean: Tensor, variance: Tensor) -> Any:
    made = mean * 2
    normed = nn.functional.batch_norm(x, mean, variance, training=True, momentum=0.9)
    return normed, made, mean + 1


def one_of_two_inputs(x: Tensor, y: Tensor) -> Any:
    made = x * 1
    y.mul_(50)
    return made, x + y


def inside_a_checkpoint(x: Tensor) -> Any:
    def body(x: Tensor) -> Tensor:
        made = x.exp()
        made.add_(1)
        return made.log()

    return checkpoint(body, x * 2, use_reentrant=False) + 1


def in_a_branch(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos(), (x * 2,))


def in_many_dtypes(x: Tensor) -> Any:
    made = [x.to(dtype) * 2 for dtype in (torch.float16, torch.bfloat16, torch.float64)]
    whole = (x * 10).to(torch.int32)
    return *made, whole * 2, torch.complex(x, x) * 2, x[:, ::2] * 1, x.t()


def spoilt(x: Tensor) -> Any:
    return x / 0, (x - x) / 0, (-x).sqrt(), x * 1e38 * 10


X = torch.arange(12.0).view(3, 4) + 0.5
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    each.__name__: (each, (X,))
    for each in (
        *(out, in_a_view, through_detach, a_chunk, of_each, parts, the_input, hidden, by_hand),
        *(inside_a_checkpoint, in_a_branch, in_many_dtypes, spoilt),
    )
}
WHOLE = torch.arange(24.0).view(6, 4) + 0.5
CASES["overlapping inputs"] = one_of_two_inputs, (WHOLE[:4], WHOLE[2:])
CASES["running statistics"] = statistics_of_a_batch, (X, torch.ones(4), torch.full((4,), 2.0))
