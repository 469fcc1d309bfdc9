"""A small model, trained for one step, whose traces are kept as a file of an earlier version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxguard


class Net(nn.Module):
    """Two graphs with an operation between them, a buffer and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(self.embed(ids)).mean(1))
        torch._dynamo.graph_break()
        return self.norm(hidden * 2)


def make() -> Net:
    """The model, its weights a function of their indices: the same in every version of torch."""
    model = Net()
    with torch.no_grad():
        for number, weight in enumerate(model.parameters(), 1):
            places = torch.arange(weight.numel(), dtype=torch.float32)
            weight.copy_(torch.sin(number * (places + 1)).view_as(weight))
    return model


IDS = torch.arange(12).view(4, 3) % 7


def trace(folder: Path, **options: Any) -> Path:
    """Trace one step of training, with its loss, its backward and the optimizer's step.

    The batch norm is frozen. In training the gradient that it returns would be 0 but for roundings,
    which depend on the CPU.
    """
    model = make()
    model.norm.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fxguard.watch(model, trace_batch_nums=[0], trace_to=folder, **options):
        loss = model(IDS).square().mean()
        loss.backward()
        optimizer.step()
    [path] = folder.glob("*.jsonl")
    return path
