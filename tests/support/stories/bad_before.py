"""Stories of what was bad before the model began."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from support.stories.story import Story, grid, single


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.table.weight.data[2] = math.nan

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).sum(1)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3).eval()
        self.norm.running_var[1] = math.nan

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).relu()


GIVEN = {
    "an embedding of nobody": Story(
        "weight table.weight", "weight", Embedded(), (torch.tensor([[0, 2], [1, 1]]),)
    ),
    "running variance": Story("buffer norm.running_var", "weight", Normed(), (grid(2, 3),)),
    "a sample that holds NaN": Story(
        "argument `input` of Linear.forward",
        "data",
        nn.Linear(2, 2),
        (single([1.0, 2.0], [math.nan, 1.0]),),
    ),
}
