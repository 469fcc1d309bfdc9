"""Stories that no dtype would save: poles, domains, and nothing to work on."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - everybody writes F
from torch import Tensor

from support.stories.story import Story, grid, single


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum(-1)


def normal_log_prob(x: Tensor, mean: Tensor, sigma: Tensor) -> Tensor:
    return -((x - mean) ** 2) / (2 * sigma**2) - sigma.log()


def focal(p: Tensor) -> Tensor:
    return (1 - p).pow(-0.5) * p


def weighted(logits: Tensor, target: Tensor) -> Tensor:
    counts = torch.bincount(target, minlength=3).float()
    weight = 1 / counts
    return F.cross_entropy(logits, target, weight=weight / weight.sum())


def cholesky(matrix: Tensor) -> Tensor:
    first = matrix[0, 0].sqrt()
    below = matrix[1, 0] / first
    return torch.stack([first, below, (matrix[1, 1] - below**2).sqrt()])


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = q.relu(), k.relu()
    return (q @ (k.mT @ v)) / (q @ k.sum(0)[:, None])


def top_p(probabilities: Tensor) -> Tensor:
    keep = probabilities.cumsum(-1) < 0.1
    return torch.multinomial(probabilities.log().masked_fill(~keep, -math.inf).softmax(-1), 1)


def scaled_dropout(x: Tensor, keep: Tensor) -> Tensor:
    return x * torch.zeros_like(x) / keep


def expert_means(x: Tensor, expert: Tensor) -> Tensor:
    chosen = F.one_hot(expert, 3).float()
    return (chosen.T @ x) / chosen.sum(0)[:, None]


POLES = {
    "cosine of a zero vector": Story(
        "div", "zero divisor", cosine, (single([0.0, 0.0]), single([1.0, 2.0]))
    ),
    "a quaternion of zeros": Story(
        "div", "zero divisor", lambda q: q / q.norm(dim=-1, keepdim=True), (torch.zeros(2, 4),)
    ),
    "RMSNorm without an eps": Story(
        "rsqrt",
        "zero divisor",
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
        (torch.zeros(2, 4),),
    ),
    "standard score of a constant column": Story(
        "div", "zero divisor", lambda x: (x - x.mean(0)) / x.std(0), (torch.ones(4, 2),)
    ),
    "minimum and maximum of a constant": Story(
        "div", "zero divisor", lambda x: (x - x.min()) / (x.max() - x.min()), (torch.ones(4),)
    ),
    "dice of two empty masks": Story(
        "div",
        "zero divisor",
        lambda p, t: 2 * (p * t).sum() / (p.sum() + t.sum()),
        (torch.zeros(4), torch.zeros(4)),
    ),
    "a mean over no token": Story(
        "div",
        "zero divisor",
        lambda x, mask: (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True),
        (grid(2, 3, 4), single([1.0, 1.0, 0.0], [0.0, 0.0, 0.0])),
    ),
    "a loss over no token": Story(
        "div",
        "zero divisor",
        lambda loss, mask: (loss * mask).sum() / mask.sum(),
        (grid(4), torch.zeros(4, dtype=torch.long)),
    ),
    "temperature 0": Story(
        "div", "zero divisor", lambda x, t: (x / t).softmax(-1), (single([1.0, 2.0]), single(0.0))
    ),
    "a sigmoid far out": Story(
        "log", "zero divisor", lambda x: (1 - torch.sigmoid(x)).log(), (single(120.0, 1.0),)
    ),
    "KL divergence of a zero": Story(
        "log", "zero divisor", kl_divergence, (single([0.0, 1.0]), single([0.5, 0.5]))
    ),
    "entropy of a one-hot": Story(
        "log", "zero divisor", lambda p: -(p * p.log()).sum(-1), (single([0.0, 1.0]),)
    ),
    "log of a silent spectrum": Story(
        "log10", "zero divisor", lambda x: 20 * x.abs().log10(), (single(0.0, 1.0),)
    ),
    "log of class frequencies": Story(
        "log",
        "zero divisor",
        lambda y: (torch.bincount(y, minlength=3) / 4).log(),
        (torch.tensor([0, 0, 1, 1]),),
    ),
    "log of a histogram": Story(
        "log", "zero divisor", lambda x: x.histc(4, 0, 1).log().sum(), (single(0.1, 0.9),)
    ),
    "normal of no width": Story(
        "div", "zero divisor", normal_log_prob, (single(1.0), single(1.0), single(0.0))
    ),
    "Gumbel noise": Story(
        "log", "zero divisor", lambda u: -torch.log(-torch.log(u)), (single(0.5, 1.0),)
    ),
    "focal loss of a sure pixel": Story("pow", "zero divisor", focal, (single(1.0, 0.5),)),
    "weight of an absent class": Story(
        "div", "zero divisor", weighted, (grid(4, 3), torch.tensor([0, 0, 1, 1]))
    ),
    "attention without a feature": Story(
        "div", "zero divisor", linear_attention, (-torch.ones(3, 2), torch.ones(3, 2), grid(3, 2))
    ),
    "an idle expert": Story(
        "div", "zero divisor", expert_means, (grid(4, 2), torch.tensor([0, 0, 1, 1]))
    ),
    "dropout of everything": Story(
        "div", "zero divisor", scaled_dropout, (single(1.0, 2.0), single(0.0))
    ),
    "a sign of a complex zero": Story(
        "div", "zero divisor", lambda z: z / z.abs(), (torch.tensor([0j, 1 + 1j]),)
    ),
    "inverse distances": Story(
        "div", "zero divisor", lambda x: 1 / (x[:, None] - x[None]).abs(), (single(1.0, 2.0),)
    ),
    "slope of a vertical": Story(
        "atanh", "zero divisor", lambda x: torch.atanh(x), (single(1.0, 0.5),)
    ),
    "probit of one": Story(
        "erfinv", "zero divisor", lambda p: torch.erfinv(2 * p - 1), (single(1.0),)
    ),
    "remainder by zero": Story("fmod", "zero divisor", torch.fmod, (single(3.0), single(0.0))),
    "x log y": Story("xlogy", "zero divisor", torch.xlogy, (single(1.0), single(0.0))),
    "a negative pivot": Story(
        "sqrt", "domain", cholesky, (torch.tensor([[1.0, 2.0], [2.0, 1.0]]),)
    ),
    "a root of a negative": Story("pow", "domain", lambda x: x**0.5, (single(-1.0, 4.0),)),
    "a log of a negative": Story("log", "domain", lambda x: x.log().sum(), (single(-1.0, 4.0),)),
    "an arc sine above one": Story("asin", "domain", torch.asin, (single(1.5, 0.5),)),
    "an inverse cosh below one": Story("acosh", "domain", torch.acosh, (single(0.5, 2.0),)),
    "log1p below minus one": Story("log1p", "domain", torch.log1p, (single(-2.0),)),
    "a masked row less its maximum": Story(
        "sub",
        "masked row",
        lambda x: (y := x.masked_fill(x < 9, -math.inf)) - y.amax(-1, keepdim=True),
        (single([1.0, 2.0]),),
    ),
    "a mask times an infinity": Story(
        "mul",
        "domain",
        lambda x, keep: x + (1 - keep) * torch.full_like(x, -math.inf),
        (single(1.0, 2.0), single(1.0, 0.0)),
    ),
    "a row of which all is masked": Story(
        "softmax",
        "masked row",
        lambda x: x.masked_fill(torch.ones_like(x, dtype=torch.bool), -math.inf).softmax(-1),
        (grid(2, 3),),
    ),
    "log softmax of a masked row": Story(
        "log_softmax",
        "masked row",
        lambda x, keep: x.masked_fill(~keep, -math.inf).log_softmax(-1),
        (grid(2, 3), torch.tensor([[True, True, False], [False, False, False]])),
    ),
    "sampling from nothing": Story("softmax", "masked row", top_p, (single([0.5, 0.5]),)),
    "std of one sample": Story("std", "empty", lambda x: x / x.std(0), (grid(1, 4),)),
    "variance of one pixel": Story("var", "empty", lambda x: x.var((2, 3)), (grid(2, 3, 1, 1),)),
    "mean of what was selected": Story("mean", "empty", lambda x: x[x > 5].mean() + 1, (grid(4),)),
    "a loss of no pair": Story(
        "mse_loss", "empty", lambda x: F.mse_loss(x[:0], x[:0]), (grid(4, 2),)
    ),
    "no target at all": Story(
        "nll_loss",
        "empty",
        lambda x, y: F.nll_loss(x.log_softmax(-1), y, ignore_index=0),
        (grid(2, 3), torch.zeros(2, dtype=torch.long)),
    ),
    "a target too long": Story(
        "ctc_loss",
        "no alignment",
        lambda x: F.ctc_loss(
            x.log_softmax(-1), torch.ones(1, 3).long(), torch.tensor([2]), torch.tensor([3])
        ),
        (grid(2, 1, 4),),
    ),
}
