"""An ordinary training loop with a place for a fault at each moment; epochs, and a schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from history.exam.architectures import Architecture, Batches

__all__ = ["Fault", "Started", "epochs", "train", "warm_up_and_cosine"]

# Called once before the first step; where a run has two models, or is resumed, once for each pair.
Started = Callable[[nn.Module, Optimizer], None]


@dataclass(frozen=True)
class Fault:
    """What goes wrong in each of `lasts` steps, at one moment or another."""

    data: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    model: Callable[[nn.Module], None] | None = None  # before the forward
    optimizer: Callable[[Optimizer], None] | None = None  # before the forward
    gradients: Callable[[nn.Module], None] | None = None  # after the backward
    keeps_gradients: bool = False  # nobody calls zero_grad
    leaves_out_clipping: bool = False
    lasts: int | None = 1  # None: to the end of the run


def train(
    architecture: Architecture,
    dtype: str,
    seed: int,
    started: Started,
    steps: int,
    fault: Fault,
    planted: int,
) -> list[float]:
    """Train a model for some steps, and return the loss of each; `planted` is the fault's step."""
    torch.manual_seed(seed)
    is_cast = dtype == "bfloat16" and architecture.casts
    is_autocast = dtype == "bfloat16" and not architecture.casts
    model = architecture.model()
    if is_cast:
        model.to(torch.bfloat16)
    optimizer = architecture.optimizer(model.parameters())
    started(model, optimizer)
    losses = []
    for step, (inputs, targets) in enumerate(itertools.islice(architecture.batches(seed), steps)):
        is_wrong = 0 <= step - planted < (steps if fault.lasts is None else fault.lasts)
        if is_wrong and fault.data:
            inputs, targets = fault.data(inputs, targets)
        if is_wrong and fault.model:
            fault.model(model)
        if is_wrong and fault.optimizer:
            fault.optimizer(optimizer)
        if not (is_wrong and fault.keeps_gradients):
            optimizer.zero_grad()
        if is_cast:
            inputs = inputs.to(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            loss = architecture.loss(model(inputs), targets)
        loss.backward()
        if is_wrong and fault.gradients:
            fault.gradients(model)
        if architecture.clip and not (is_wrong and fault.leaves_out_clipping):
            nn.utils.clip_grad_norm_(model.parameters(), architecture.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def epochs(batches: Batches, whole: int, rest: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A training set of `whole` batches, in a new order in each epoch, and a last short batch."""
    inputs, targets = (
        torch.cat(parts) for parts in zip(*itertools.islice(batches, whole + 1), strict=True)
    )
    size = len(inputs) // (whole + 1)
    while True:
        order = torch.randperm(size * whole + rest)
        for rows in order.split(size):
            yield inputs[rows], targets[rows]


def warm_up_and_cosine(optimizer: Optimizer, steps: int) -> LambdaLR:
    def rate(step: int) -> float:
        warm = min(100, steps // 4)
        if step < warm:
            return (step + 1) / warm
        return 0.05 + 0.95 * 0.5 * (
            1 + math.cos(math.pi * min(1.0, (step - warm) / (steps - warm)))
        )

    return LambdaLR(optimizer, rate)
