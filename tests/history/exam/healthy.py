"""Healthy training runs, as people write them: none of them has a jump that wants a cause."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from history.exam.architectures import (
    ARCHITECTURES,
    GPT,
    MLP,
    MoE,
    ViT,
    huber_loss,
    image_batches,
    next_token_loss,
    regression_batches,
    smoothed_loss,
    table_batches,
    text_batches,
)
from history.exam.training import Fault, Started, epochs, train, warm_up_and_cosine
from history.exam.without_targets import actor_critic, gan

__all__ = ["HEALTHY", "Healthy"]


@dataclass(frozen=True)
class Healthy:
    """A run without a fault, of `steps` steps in full; all of them together are 20,000 steps.

    `train(started, steps=None)` runs it, in full or so many steps, and returns the loss of each.
    Each calls `started(model, optimizer)` before the first step; that with two models
    calls it for each, and the one that is resumed once more, with the model of its second part.
    """

    name: str
    architecture: str
    train: Callable[..., list[float]]
    steps: int


Run = Callable[[Started, int], list[float]]

HEALTHY: list[Healthy] = []


def healthy(steps: int, architecture: str = "") -> Callable[[Run], Run]:
    """Add a run of so many steps; the first word of its name is its architecture."""

    def add(run: Run) -> Run:
        name = run.__name__.replace("_", "-")

        def full(started: Started, count: int | None = None) -> list[float]:
            torch.manual_seed(zlib.crc32(name.encode()) % 1000)
            return run(started, steps if count is None else count)

        HEALTHY.append(Healthy(name, architecture or name.partition("-")[0], full, steps))
        return run

    return add


@healthy(900)
def gpt_warm_up_and_cosine(started: Started, steps: int) -> list[float]:
    model = GPT()
    optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = warm_up_and_cosine(optimizer, steps)
    started(model, optimizer)
    losses = []
    for tokens, targets in itertools.islice(text_batches(11), steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token_loss(model(tokens), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@healthy(800)
def gpt_curriculum(started: Started, steps: int) -> list[float]:
    """The sequences become longer seven times, by four bytes."""
    model = GPT(dropout=0.1)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    started(model, optimizer)
    losses = []
    stages = [text_batches(12, length=16 + 4 * stage) for stage in range(8)]
    for step in range(steps):
        tokens, targets = next(stages[8 * step // steps])
        optimizer.zero_grad()
        loss = next_token_loss(model(tokens), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@healthy(500)
def gpt_accumulated(started: Started, steps: int) -> list[float]:
    """Each step adds up the gradients of four small batches."""
    model = GPT()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    started(model, optimizer)
    losses = []
    batches = text_batches(13, batch=3)
    for _ in range(steps):
        total = 0.0
        for tokens, targets in itertools.islice(batches, 4):
            loss = next_token_loss(model(tokens), targets) / 4
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@healthy(800)
def gpt_evaluated(started: Started, steps: int) -> list[float]:
    """Every 50 steps the model is evaluated, on longer sequences, and writes a line."""
    model = GPT(dropout=0.1)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    started(model, optimizer)
    held_out = text_batches(14, length=64)
    losses = []
    for step, (tokens, targets) in enumerate(itertools.islice(text_batches(15), steps)):
        optimizer.zero_grad()
        loss = next_token_loss(model(tokens), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49:
            model.eval()
            with torch.no_grad():
                for unseen, following in itertools.islice(held_out, 2):
                    next_token_loss(model(unseen), following)
                line = torch.full((1, 1), 10)
                for _ in range(8):
                    line = torch.cat([line, model(line)[:, -1].argmax(-1, keepdim=True)], dim=1)
            model.train()
    return losses


@healthy(800)
def gpt_resumed(started: Started, steps: int) -> list[float]:
    """Half of the run, and the rest by a new model with the states of the first."""
    losses: list[float] = []
    batches = text_batches(16)
    states = None
    for part in (steps // 2, steps - steps // 2):
        model = GPT()
        optimizer = AdamW(model.parameters(), lr=1e-3)
        if states:
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
        started(model, optimizer)
        for tokens, targets in itertools.islice(batches, part):
            optimizer.zero_grad()
            loss = next_token_loss(model(tokens), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        states = (model.state_dict(), optimizer.state_dict())
    return losses


@healthy(800)
def vit_dropout(started: Started, steps: int) -> list[float]:
    model = ViT(dropout=0.2)
    optimizer = AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
    scheduler = warm_up_and_cosine(optimizer, steps)
    started(model, optimizer)
    losses = []
    for images, labels in itertools.islice(image_batches(21), steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = smoothed_loss(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@healthy(800)
def vit_unfrozen(started: Started, steps: int) -> list[float]:
    """The head alone is trained for a quarter of the run, and then everything."""
    model = ViT()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = AdamW(model.parameters(), lr=5e-4)
    started(model, optimizer)
    losses = []
    for step, (images, labels) in enumerate(itertools.islice(image_batches(22), steps)):
        if step == steps // 4:
            print(f"step {step}: the whole model is trained")
            model.requires_grad_(True)
        optimizer.zero_grad()
        loss = smoothed_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@healthy(800)
def vit_epochs(started: Started, steps: int) -> list[float]:
    """Epochs of 20 batches of 16 images and one of 5, by SGD with momentum."""
    model = ViT()
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    started(model, optimizer)
    losses = []
    for images, labels in itertools.islice(epochs(image_batches(23), 20, 5), steps):
        optimizer.zero_grad()
        loss = smoothed_loss(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@healthy(2800)
def mlp_momentum(started: Started, steps: int) -> list[float]:
    """The learning rate falls to a tenth after each third of the run."""
    model = MLP()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=max(1, steps // 3), gamma=0.1)
    started(model, optimizer)
    losses = []
    for table, labels in itertools.islice(table_batches(31), steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(table), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@healthy(2800)
def mlp_epochs(started: Started, steps: int) -> list[float]:
    """Epochs of 30 batches of 128 rows and one of 64; after each the model is evaluated."""
    model = MLP(dropout=0.3)
    optimizer = AdamW(model.parameters(), lr=5e-4)
    started(model, optimizer)
    held_out = table_batches(32, batch=500)
    losses = []
    for step, (table, labels) in enumerate(
        itertools.islice(epochs(table_batches(33), 30, 64), steps)
    ):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(table), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 31 == 30:
            model.eval()
            with torch.no_grad():
                model(next(held_out)[0])
            model.train()
    return losses


@healthy(2000)
def mlp_loss_scaling(started: Started, steps: int) -> list[float]:
    """float16 under a GradScaler, which doubles its scale every 200 steps."""
    model = MLP(dropout=0.0)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=200)
    started(model, optimizer)
    losses = []
    for table, labels in itertools.islice(table_batches(34), steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = functional.cross_entropy(model(table), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@healthy(1500)
def moe_unclipped(started: Started, steps: int) -> list[float]:
    model = MoE()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    started(model, optimizer)
    losses = []
    for points, values in itertools.islice(regression_batches(41), steps):
        optimizer.zero_grad()
        loss = huber_loss(model(points), values)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@healthy(800)
def moe_bfloat16(started: Started, steps: int) -> list[float]:
    return train(ARCHITECTURES["moe"], "bfloat16", 42, started, steps, Fault(), planted=steps)


healthy(2000)(gan)
healthy(2000, "actor-critic")(actor_critic)
