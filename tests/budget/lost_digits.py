"""Twenty programs in which one line loses the digits: it ends in ``# lost``."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["PROGRAMS"]

generator = torch.Generator().manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


class Rotary(nn.Module):
    """Positions above 256 in a bfloat16 table."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        pos = torch.arange(x.shape[1], dtype=x.dtype)  # lost
        inv = (1000 ** (-torch.arange(0, 32, 2) / 32)).to(x.dtype)
        angle = pos[:, None] * inv[None]
        c, s = angle.cos(), angle.sin()
        a, b = self.q(x).chunk(2, -1)
        q = torch.cat([a * c - b * s, a * s + b * c], -1)
        return q @ self.k(x).transpose(-1, -2) / 32**0.5


class OnePassVariance(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)  # lost
        square = (x * x).mean(-1, keepdim=True)
        var = square - mean * mean
        return (x - mean) / (var + 1e-5).sqrt()


class CumulativeSum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            total = total + x[:, step]  # lost
        return total - 1.0


class OneMinus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        p = torch.sigmoid(x + 2.0)  # lost
        return torch.log(1 - p)


class LongNorm(nn.Module):
    """A normalisation over many elements, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        size = x[:, 0].square()
        for position in range(1, x.shape[1]):
            size = size + x[:, position].square()  # lost
        return x / size.sqrt()[:, None]


class FourierFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", 30 * randn(2, 16))
        self.out = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        phase = 2 * math.pi * (x @ self.b)  # lost
        return self.out(torch.cat([phase.sin(), phase.cos()], -1))


class LogOfRatio(nn.Module):
    """The log of a ratio near 1."""

    def forward(self, x: Tensor) -> Tensor:
        new = 0.5 + 0.001 * torch.tanh(x)  # lost
        ratio = new / 0.5
        return ratio.log()


class Frequencies(nn.Module):
    """A table of frequencies."""

    def forward(self, x: Tensor) -> Tensor:
        f = torch.exp(-torch.arange(16, dtype=x.dtype) * 0.5)
        angle = (400 + x)[..., None] * f  # lost
        return angle.sin().sum(-1)


class LargeScale(nn.Module):
    """Logits times a large scale."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        cosine = nn.functional.normalize(self.head(x), dim=-1)
        logits = 64.0 * cosine
        return (logits - logits.logsumexp(-1, keepdim=True)).exp()  # lost


class SumOfLosses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for row in x:
            total = total + row.square().mean()  # lost
        return total


class Momentum(nn.Module):
    """A running average with a small rate."""

    def forward(self, x: Tensor) -> Tensor:
        average = torch.ones_like(x[0])
        for row in x:
            average = average + 0.002 * (row - average)  # lost
        return average - 1.0


class Softplus(nn.Module):
    """log(1 + exp(x)) of negative numbers."""

    def forward(self, x: Tensor) -> Tensor:
        grown = 1 + torch.exp(x - 5.0)  # lost
        return torch.log(grown)


class Distances(nn.Module):
    """Squared distances by the binomial formula."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 0.05 + 3.0
        square = (x * x).sum(-1)
        far = square[:, None] + square[None, :] - 2 * x @ x.T  # lost
        return far.clamp(min=0)


class Angle(nn.Module):
    """acos near 1."""

    def forward(self, x: Tensor) -> Tensor:
        c = torch.cos(0.05 * x)  # lost
        return torch.acos(c.clamp(-1, 0.9999))


class Times(nn.Module):
    """A difference of times that are large."""

    def forward(self, x: Tensor) -> Tensor:
        later = 1000.0 + x  # lost
        return torch.exp(-(later - 1000.0))


class Power(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        base = 1 + 0.01 * torch.sigmoid(x)  # lost
        return base**200


class Residual(nn.Module):
    """A small branch on a large stream."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        stream = 100.0 + self.a(x)  # lost
        return self.b(stream - stream.mean(-1, keepdim=True))


class Interpolation(nn.Module):
    """Coordinates of a large image, and the weights between pixels."""

    def forward(self, x: Tensor) -> Tensor:
        at = torch.sigmoid(x) * 500  # lost
        weight = at - at.floor()
        return weight * (1 - weight)


class Standardized(nn.Module):
    """Data far from 0."""

    def forward(self, x: Tensor) -> Tensor:
        shifted = x * 0.1 + 50.0  # lost
        return (shifted - 50.0) / 0.1


class Phase(nn.Module):
    """A phase that is added up."""

    def forward(self, x: Tensor) -> Tensor:
        phase = torch.cumsum(0.3 + 0.1 * torch.sigmoid(x), -1)  # lost
        return torch.sin(phase)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "positions": (Rotary, randn(2, 600, 32)),
    "one-pass variance": (OnePassVariance, randn(8, 64) + 10),
    "a sum in a loop": (CumulativeSum, torch.rand(16, 200, generator=generator) * 0.01),
    "1 - p": (OneMinus, randn(64).abs()),
    "a long norm": (LongNorm, randn(8, 400)),
    "Fourier features": (FourierFeatures, torch.rand(32, 2, generator=generator)),
    "log of a ratio": (LogOfRatio, randn(64)),
    "frequencies": (Frequencies, randn(32)),
    "a large scale": (LargeScale, randn(32, 16)),
    "a sum of losses": (SumOfLosses, randn(300, 32)),
    "a small rate": (Momentum, randn(200, 16)),
    "log(1 + exp(x))": (Softplus, randn(64)),
    "distances": (Distances, randn(16, 8)),
    "acos": (Angle, randn(64).abs() + 1),
    "times": (Times, torch.rand(64, generator=generator) * 3),
    "a power": (Power, randn(64)),
    "a small branch": (Residual, randn(16, 16)),
    "interpolation": (Interpolation, randn(64)),
    "data far from 0": (Standardized, randn(64)),
    "a phase": (Phase, randn(8, 300)),
}
