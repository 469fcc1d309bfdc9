"""Stories of numbers that float16 or float32 rounds, to 0, to 1, or below 0."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - everybody writes F
from torch import Tensor

from support.stories.story import Story, grid, half, single


def norm_by_hand(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-12)


def advantages(rewards: Tensor) -> Tensor:
    return (rewards - rewards.mean()) / (rewards.std() + 1e-8)


def std_of_moments(x: Tensor) -> Tensor:
    return ((x * x).mean(-1) - x.mean(-1) ** 2).sqrt()


def distances(a: Tensor, b: Tensor) -> Tensor:
    squares = a.pow(2).sum(-1)[:, None] + b.pow(2).sum(-1)[None] - 2 * a @ b.T
    return squares.sqrt()


def entropy(logits: Tensor) -> Tensor:
    p = logits.softmax(-1)
    return -(p * p.log()).sum(-1)


def binary_cross_entropy(x: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    return -(y * p.log() + (1 - y) * (1 - p).log()).mean()


def sinkhorn(cost: Tensor) -> Tensor:
    kernel = (-cost / 0.01).exp()
    v = torch.ones_like(cost[0])
    u = 1 / (kernel @ v)
    return u[:, None] * kernel * v


def forward_algorithm(scores: Tensor) -> Tensor:
    alpha = torch.ones(scores.shape[-1])
    for step in range(len(scores)):
        alpha = alpha * scores[step]
    return alpha / alpha.sum()


def mixture(x: Tensor, means: Tensor) -> Tensor:
    return (-0.5 * (x - means) ** 2).exp().mean().log()


def policy_log_prob(pre: Tensor) -> Tensor:
    action = torch.tanh(pre)
    return pre - torch.log(1 - action.pow(2))


def adam_by_hand(gradient: Tensor) -> Tensor:
    second = 0.001 * gradient**2
    return 0.1 * gradient / (second.sqrt() + 1e-8)


def angle(a: Tensor, b: Tensor) -> Tensor:
    return torch.acos((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)))


def parallel() -> tuple[Tensor, Tensor]:
    """Two vectors of which the cosine is above 1 in float32, and not in float64."""
    for seed in range(1000):
        a = torch.randn(1, 8, generator=torch.Generator().manual_seed(seed))
        b = a * 3
        over = [
            bool(((x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1)) > 1).any())
            for x, y in ((a, b), (a.double(), b.double()))
        ]
        if over == [True, False]:
            return a, b
    raise AssertionError("there is no such seed")


PRECISION = {
    "layer norm by hand, in half": Story("div", "underflow", norm_by_hand, (half([2.0, 2.0]),)),
    "normalize, in half": Story(
        "normalize", "underflow", lambda x: F.normalize(x, dim=-1), (half([0.0, 0.0]),)
    ),
    "advantages of one reward, in half": Story(
        "div", "underflow", advantages, (half(1.0, 1.0, 1.0),)
    ),
    "RMSNorm of small numbers": Story(
        "rsqrt",
        "underflow",
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-8),
        (half([1e-4, 2e-4]),),
    ),
    "log of a clamp, in half": Story(
        "log", "underflow", lambda p: -p.clamp(min=1e-10).log().mean(), (half(0.0, 0.5),)
    ),
    "log of a sum with an eps, in half": Story(
        "log", "underflow", lambda p: -(p + 1e-8).log().mean(), (half(0.0, 0.5),)
    ),
    "dice with an eps, in half": Story(
        "div",
        "underflow",
        lambda p, t: 1 - 2 * (p * t).sum() / (p.sum() + t.sum() + 1e-8),
        (half(0.0, 0.0), half(0.0, 0.0)),
    ),
    "entropy of a sure softmax": Story("log", "underflow", entropy, (single([300.0, 0.0]),)),
    "log of softmax": Story(
        "log", "underflow", lambda x: x.softmax(-1).log(), (half([20.0, 0.0]),)
    ),
    "Sinkhorn": Story("div", "underflow", sinkhorn, (grid(3, 3, low=2.0, high=3.0),)),
    "the forward algorithm": Story(
        "div", "underflow", forward_algorithm, (grid(60, 3, low=0.01, high=0.02),)
    ),
    "a mixture far away": Story("log", "underflow", mixture, (single(30.0), single(0.0, 1.0))),
    "cumulative product": Story(
        "div", "underflow", lambda x: 1 / x.cumprod(0), (torch.full((4,), 1e-12),)
    ),
    "Adam by hand, in half": Story("div", "underflow", adam_by_hand, (half(1e-5, 0.0),)),
    "log of sigmoid": Story(
        "log", "underflow", lambda x: torch.sigmoid(x).log(), (single(-120.0, 1.0),)
    ),
    "inverse of a small variance": Story(
        "reciprocal", "underflow", lambda s: (s * s).reciprocal(), (half(1e-4, 1.0),)
    ),
    "variance of moments": Story(
        "sqrt", "rounding", std_of_moments, (1000 + grid(4, 8, high=1.0) * 1e-3,)
    ),
    "distances by expansion": Story("sqrt", "rounding", distances, (a := 30 + grid(6, 16), a)),
    "binary cross entropy by hand": Story(
        "log", "rounding", binary_cross_entropy, (single(20.0, -1.0), single(0.0, 1.0))
    ),
    "a squashed policy": Story("log", "rounding", policy_log_prob, (single(12.0, 0.1),)),
    "inverse tanh": Story(
        "atanh", "rounding", lambda x: torch.atanh(torch.tanh(x)), (single(12.0, 0.1),)
    ),
    "inverse sigmoid": Story(
        "div", "rounding", lambda x: (p := torch.sigmoid(x)).div(1 - p).log(), (single(20.0),)
    ),
    "logit of a sure sigmoid": Story(
        "logit", "rounding", lambda x: torch.sigmoid(x).logit(), (half(10.0, 0.0),)
    ),
    "an angle of parallel vectors": Story("acos", "rounding", angle, parallel()),
    "a clamp below 1, in half": Story(
        "log",
        "rounding",
        lambda p: -(1 - p.clamp(1e-6, 1 - 1e-6)).log().mean(),
        (half(1.0, 0.5),),
    ),
    "Gumbel noise, in half": Story(
        "log", "underflow", lambda u: -torch.log(-torch.log(u + 1e-10)), (half(0.5, 0.0),)
    ),
}
