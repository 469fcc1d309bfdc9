"""A residual stream that float16 does not hold, and a norm behind it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["X", "residual"]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Residual(nn.Module):
    """A stream that float16 does not hold, and a norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = Norm()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)


def residual() -> Residual:
    torch.manual_seed(0)
    model = Residual()
    with torch.no_grad():
        for layer in model.layers:
            layer.weight *= 4
    return model


X = torch.linspace(-4e4, 4e4, 32).view(4, 8)
