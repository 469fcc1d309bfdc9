"""Losses that a script computes from the outputs of its model, under ``watch``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everybody writes F
from torch import Tensor, nn

import fxguard

from ..records import Cases, Record, of_reports, raised_by

Loss = Callable[[Tensor, Tensor], Tensor]
WIDTH = 4


class Net(nn.Module):
    """Finite, and so are its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def entropy(y: Tensor, target: Tensor) -> Tensor:
    p = (y * 200).softmax(-1)
    return -(p * p.log()).sum(-1).mean()


def masked_entropy(y: Tensor, target: Tensor) -> Tensor:
    p = y.masked_fill(target > 0, -math.inf).softmax(-1)
    return -(p * p.log()).nansum(-1).mean()


def dead_row(y: Tensor, target: Tensor) -> Tensor:
    hidden = torch.ones_like(y, dtype=torch.bool)
    hidden[1:] = False
    return y.masked_fill(hidden, -math.inf).log_softmax(-1)[..., 0].mean()


def ppo(y: Tensor, target: Tensor) -> Tensor:
    ratio = (y - target * 300).exp()
    return -torch.minimum(ratio * target, ratio.clamp(0.8, 1.2) * target).mean()


def gaussian(y: Tensor, target: Tensor) -> Tensor:
    mean, log_sigma = y.chunk(2, -1)
    sigma = (log_sigma * 400).exp()
    return ((target[..., :2] - mean) ** 2 / (2 * sigma**2) + sigma.log()).mean()


def mixture(y: Tensor, target: Tensor) -> Tensor:
    density = torch.exp(-((target - y * 40) ** 2)).prod(-1)
    return -density.log().mean()


def vae(y: Tensor, target: Tensor) -> Tensor:
    mean, log_var = (y * 100).chunk(2, -1)
    return (mean.square() + log_var.exp() - log_var).mean()


def sinkhorn(y: Tensor, target: Tensor) -> Tensor:
    kernel = torch.exp(-(y[:, None] - target[None]).square().sum(-1) * 100)
    u = torch.ones(len(y))
    for _ in range(3):
        u = 1 / (kernel @ (1 / (kernel.mT @ u)))
    return u.mean()


def contrastive(y: Tensor, target: Tensor) -> Tensor:
    scores = (y @ target.mT * 100).exp()
    return -(scores.diagonal() / scores.sum(-1)).log().mean()


def focal(y: Tensor, target: Tensor) -> Tensor:
    p = torch.sigmoid(y * 300)
    return -((1 - p) ** 2 * p.log()).mean()


def ctc(y: Tensor, target: Tensor) -> Tensor:
    log_probabilities = y.log_softmax(-1)[:, None]
    labels = torch.ones(1, 6, dtype=torch.long)
    lengths = torch.tensor([len(y)]), torch.tensor([6])
    return F.ctc_loss(log_probabilities, labels, *lengths)


def all_ignored(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y, torch.full((len(y),), -100))


def weighted(y: Tensor, target: Tensor) -> Tensor:
    counts = torch.bincount(target.argmax(-1) * 0, minlength=WIDTH)
    return F.cross_entropy(y, target.argmax(-1), weight=1 / counts)


def bad_target(y: Tensor, target: Tensor) -> Tensor:
    target = target.clone()
    target[2, 1] = math.nan
    return F.mse_loss(y, target)


def in_half(y: Tensor, target: Tensor) -> Tensor:
    return ((y - target) * 300).half().square().float().mean()


def penalty_of_a_norm(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y, target) + (y - y.detach()).norm(dim=-1).sum()


def root_of_zero(y: Tensor, target: Tensor) -> Tensor:
    return (y - y.detach()).square().sum(-1).sqrt().mean()


def distances(y: Tensor, target: Tensor) -> Tensor:
    return torch.sqrt((y[:, None] - y[None]).square().sum(-1)).mean()


def angle(y: Tensor, target: Tensor) -> Tensor:
    return torch.acos(F.cosine_similarity(y, y.detach(), dim=-1)).mean()


def branch_not_taken(y: Tensor, target: Tensor) -> Tensor:
    return torch.where(y > 1e9, (y - y.detach()).log(), y).sum()


def power(y: Tensor, target: Tensor) -> Tensor:
    return (y - y.detach()).pow(0.3).sum()


def equal_eigenvalues(y: Tensor, target: Tensor) -> Tensor:
    matrix = torch.eye(WIDTH) + y.mT @ (y - y.detach())
    return torch.linalg.eigh(matrix).eigenvectors.abs().sum()


def std_of_one(y: Tensor, target: Tensor) -> Tensor:
    return y[:1].std(0).mean()


def own_function(y: Tensor, target: Tensor) -> Tensor:
    return Inverse.apply(y - y.detach()).sum()  # type: ignore[no-untyped-call]


def by_gradient(y: Tensor, target: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
    return ((slope - slope.detach()).norm(dim=-1) - 1).square().mean() / (y - y.detach()).sum()


def healthy(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y, target)


def healthy_with_a_mask(y: Tensor, target: Tensor) -> Tensor:
    masked = y.masked_fill(y > 0.5, -math.inf)
    return F.cross_entropy(y, target.argmax(-1)) + masked.logsumexp(-1).mean()


class Inverse(torch.autograd.Function):
    """Healthy; its gradient divides by what it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x + 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 2 / x


LOSSES: tuple[Loss, ...] = (
    *(entropy, masked_entropy, dead_row, ppo, gaussian, mixture, vae, sinkhorn, contrastive),
    *(focal, ctc, all_ignored, weighted, bad_target, in_half, penalty_of_a_norm, root_of_zero),
    *(distances, angle, branch_not_taken, power, equal_eigenvalues, std_of_one, own_function),
    *(by_gradient, healthy, healthy_with_a_mask),
)


def cases() -> Cases:
    """Each under ``watch``, in eager mode and compiled, and with the options that matter."""
    for place, loss in enumerate(LOSSES):
        name = loss.__name__
        yield f"{name}/eager", functools.partial(trained, loss)
        yield f"{name}/aot_eager", functools.partial(trained, loss, backend="aot_eager")
        yield f"{name}/raise", functools.partial(trained, loss, on_detect="raise")
        if place % 3 == 0:
            yield f"{name}/replay", functools.partial(trained, loss, replay=True)
        if place % 3 == 1:
            yield f"{name}/inside", functools.partial(trained, loss, inside=True)
        if place % 3 == 2:
            yield f"{name}/warn", functools.partial(trained, loss, on_detect="warn")
        if place % 2:
            yield f"{name}/bfloat16", functools.partial(trained, loss, dtype=torch.bfloat16)


class WithLoss(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net, self.loss = Net(), loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.net(x), target)


def trained(
    loss: Loss,
    backend: str | None = None,
    inside: bool = False,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Record:
    """What is said of two steps."""
    torch.manual_seed(0)
    model: nn.Module = WithLoss(loss) if inside else Net()
    model.to(dtype)
    x, target = torch.randn(5, WIDTH, dtype=dtype), torch.randn(5, WIDTH, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    reports: list[fxguard.types.Report] = []

    def steps() -> Record:
        called: Any = model if backend is None else torch.compile(model, backend=backend)
        with fxguard.watch(model, **{"on_detect": reports.append, **options}):
            for _ in range(2):
                optimizer.zero_grad()
                value = called(x, target) if inside else loss(called(x), target)
                value.backward()
                optimizer.step()
        return {}

    return {**raised_by(steps), **of_reports(reports)}
