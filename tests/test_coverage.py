"""coverage() counts what is checked and what is not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxguard


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.linear(x))


class Checkpointed(nn.Module):
    """One block recomputed in backward: a higher-order operation in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x * 1, use_reentrant=False) + 1


def test_a_model_that_is_entered_whole_says_so() -> None:
    """Both operations, in one graph."""
    model = fxguard.instrument(Block())
    model(torch.randn(3, 4))
    assert fxguard.guard_of(model).coverage() == "checked 2 of 2 operations in 1 graph"
