"""Stories of numbers that float16 or float32 cannot hold."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - everybody writes F
from torch import Tensor, nn

from support.stories.story import Story, grid, half, single


def exp_softmax(x: Tensor) -> Tensor:
    return x.exp() / x.exp().sum(-1, keepdim=True)


def ppo(new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def growing_cell(x: Tensor, weight: Tensor) -> Tensor:
    state = x[:, 0]
    for step in range(x.shape[1]):
        state = state @ weight + x[:, step]
    return state


def literal_mask(scores: Tensor, keep: Tensor) -> Tensor:
    return (scores + (1 - keep) * -1e9).softmax(-1)


def newton_root(x: Tensor) -> Tensor:
    guess = x
    for _ in range(8):
        guess = guess * guess - x
    return guess


def residual_tower(x: Tensor) -> Tensor:
    for _ in range(20):
        x = x + torch.relu(x)
    return x / 100


def layer_scale(x: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x * scale, (x.shape[-1],))


def logits_of_temperature(x: Tensor, log_scale: Tensor) -> Tensor:
    x = F.normalize(x, dim=-1)
    return log_scale.exp() * x @ x.mT


def batch_norm_of(eps: float) -> nn.Module:
    norm = nn.BatchNorm1d(3, eps=eps).half().eval()
    norm.running_var.zero_()
    return norm


OVERFLOW = {
    "softmax without its maximum": Story("exp", "overflow", exp_softmax, (single([1.0, 100.0]),)),
    "softmax without its maximum, in half": Story(
        "exp", "overflow", exp_softmax, (half([1.0, 12.0]),)
    ),
    "logsumexp by hand": Story(
        "exp", "overflow", lambda x: x.exp().sum(-1).log(), (single([90.0, 1.0]),)
    ),
    "softplus by hand": Story("exp", "overflow", lambda x: (1 + x.exp()).log(), (half(12.0),)),
    "swish by hand": Story("exp", "overflow", lambda x: x * x.exp() / (1 + x.exp()), (half(12.0),)),
    "exp far beyond float64": Story("exp", "overflow", torch.exp, (single(800.0),)),
    "PPO's ratio": Story(
        "exp", "overflow", ppo, (single(-1.0, -2.0), single(-120.0, -2.0), single(-1.0, 1.0))
    ),
    "variance of a VAE": Story(
        "exp", "overflow", lambda mean, log_var: mean + (log_var / 2).exp(), (half(0.0), half(30.0))
    ),
    "a learned temperature": Story(
        "exp", "overflow", logits_of_temperature, (grid(3, 4).half(), half(11.5))
    ),
    "cosh": Story("cosh", "overflow", lambda x: x.cosh().log(), (single(100.0),)),
    "power of a large base": Story("pow", "overflow", lambda x: 10.0**x, (single(3.0, 40.0),)),
    "a norm by hand, in half": Story(
        "pow",
        "overflow",
        lambda x: x / x.pow(2).sum(-1, keepdim=True).sqrt(),
        (half([300.0, 1.0]),),
    ),
    "mean squared error, in half": Story(
        "mse_loss", "overflow", F.mse_loss, (half(500.0, 1.0), half(1.0, 1.0))
    ),
    "an unscaled dot product": Story(
        "sum", "overflow", lambda q, k: (q * k).sum(-1), (half([20.0] * 400), half([20.0] * 400))
    ),
    "a literal mask, a row masked": Story(
        "mul",
        "overflow",
        literal_mask,
        (half([1.0, 2.0], [1.0, 2.0]), half([1.0, 0.0], [0.0, 0.0])),
    ),
    "a cell that grows": Story(
        "matmul", "overflow", growing_cell, (grid(2, 12, 4).half(), 4 * torch.eye(4).half())
    ),
    "squares of squares": Story("mul", "overflow", newton_root, (single(9.0),)),
    "a tower of residuals": Story("add", "overflow", residual_tower, (half(1.0, 2.0),)),
    "a count as half": Story("half", "overflow", lambda x: x.sum().half() / 4, (single(70000),)),
    "a picture of 16 bits as half": Story(
        "to", "overflow", lambda x: x.to(torch.float16) / 65535, (torch.tensor([7, 65535]),)
    ),
    "cumulative sum, in half": Story(
        "cumsum", "overflow", lambda x: x.cumsum(0) / 100, (torch.full((100,), 1000.0).half(),)
    ),
    "a product of many": Story(
        "prod", "overflow", lambda x: x.prod().pow(1 / 40), (torch.full((40,), 20.0),)
    ),
    "before a layer norm": Story(
        "mul", "overflow", layer_scale, (half([1.0, 300.0, 2.0]), half(1.0, 300.0, 1.0))
    ),
    "factorials": Story("exp", "overflow", lambda n: torch.lgamma(n + 1).exp(), (single(40.0),)),
    "batch norm of a dead channel": Story(
        "batch_norm", "overflow", batch_norm_of(1e-12), (half([1.0, 0.5, 2.0], [1.0, 0.0, 1.0]),)
    ),
    "a loss scale within the model": Story(
        "mul", "overflow", lambda x: x.mean() * 65536.0, (half(1.0, 3.0),)
    ),
    "variance of long vectors": Story(
        "matmul", "overflow", lambda x: (x.T @ x) / len(x), (torch.full((1000, 2), 10.0).half(),)
    ),
}
