"""What looks like a small story, and is healthy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everybody writes F
from torch import Tensor

from support.stories.overflows import literal_mask, ppo
from support.stories.story import grid, half, single


def rotary(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[0])[:, None] / 10000 ** torch.linspace(0, 1, x.shape[1] // 2)
    one, two = x.chunk(2, dim=-1)
    return torch.cat(
        [one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], -1
    )


HEALTHY: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "GELU by cubes, in half": (
        lambda x: 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x**3))),
        (half(50.0, -50.0, 1.0),),
    ),
    "a geometric mean with a zero": (lambda x: x.log().mean().exp(), (single(0.0, 4.0),)),
    "a root of zero": (lambda x: x.sqrt().sum(), (single(0.0, 4.0),)),
    "rotary embedding": (rotary, (grid(6, 8),)),
    "a literal mask": (literal_mask, (half([1.0, 2.0]), half([1.0, 0.0]))),
    "sigmoid by hand": (lambda x: 1 / (1 + torch.exp(-x)), (half(-12.0, 3.0),)),
    "a log that where discards": (lambda x: torch.where(x > 0, x.log(), 0.0), (single(0.0, 4.0),)),
    "a long dot product, in bfloat16": (
        lambda q, k: (q * k).sum(-1),
        (torch.full((400,), 20.0).bfloat16(), torch.full((400,), 20.0).bfloat16()),
    ),
    "group norm of large numbers, in half": (
        lambda x: F.group_norm(x, 2),
        (grid(2, 4, 3, high=6e4).half(),),
    ),
    "layer norm of a constant, in half": (
        lambda x: F.layer_norm(x, (2,), eps=1e-5),
        (half([2.0, 2.0]),),
    ),
    "arc tangent of an infinite slope": (
        lambda y, x: torch.atan(y / x),
        (single(1.0), single(0.0)),
    ),
    "tanh of an overflow": (lambda x: torch.tanh(x * x), (half(300.0, 1.0),)),
    "PPO's ratio that the clip discards": (
        ppo,
        (single(-1.0), single(-120.0), single(1.0)),
    ),
    "PPO with a bound on its argument": (
        lambda new, old: (new - old).clamp(-20, 20).exp(),
        (single(-1.0), single(-120.0)),
    ),
    "inverse distances, but for the diagonal": (
        lambda x: (1 / (x[:, None] - x[None]).abs()).masked_fill(torch.eye(2, dtype=torch.bool), 0),
        (single(1.0, 2.0),),
    ),
    "minimum over others": (
        lambda x: ((x[:, None] - x[None]).abs() + torch.diag(torch.full((2,), math.inf))).amin(-1),
        (single(1.0, 2.0),),
    ),
}
