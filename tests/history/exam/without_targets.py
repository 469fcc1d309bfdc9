"""Healthy runs that are no regression: a GAN, and an agent that learns by acting."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam

from history.exam.training import Started

__all__ = ["actor_critic", "gan"]


def perceptron(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def gan(started: Started, steps: int) -> list[float]:
    """A GAN of points on a circle. A step has two optimizer steps, and its loss is their sum."""
    generator, discriminator = perceptron(8, 64, 64, 2), perceptron(2, 64, 64, 1)
    optimizer_g = Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optimizer_d = Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    started(generator, optimizer_g)
    started(discriminator, optimizer_d)
    real, made = torch.ones(64, 1), torch.zeros(64, 1)
    losses = []
    for _ in range(steps):
        turns = torch.randint(8, (64,)) * (math.pi / 4)
        points = torch.stack([turns.cos(), turns.sin()], dim=1) + 0.05 * torch.randn(64, 2)
        fake = generator(torch.randn(64, 8))
        optimizer_d.zero_grad()
        loss_d = functional.binary_cross_entropy_with_logits(discriminator(points), real)
        loss_d = loss_d + functional.binary_cross_entropy_with_logits(
            discriminator(fake.detach()), made
        )
        loss_d.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        loss_g = functional.binary_cross_entropy_with_logits(discriminator(fake), real)
        loss_g.backward()
        optimizer_g.step()
        losses.append(loss_d.item() + loss_g.item())
    return losses


class Corridor:
    """Sixteen corridors of nine places; the end to the right gives 1, and one starts anew."""

    def __init__(self) -> None:
        self.places = torch.randint(8, (16,))

    def seen(self) -> Tensor:
        return functional.one_hot(self.places, 9).float() + 0.05 * torch.randn(16, 9)

    def act(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        self.places = (self.places + 2 * actions - 1).clamp(0, 8)
        ends = self.places == 8
        self.places = torch.where(ends, torch.randint(8, (16,)), self.places)
        return ends.float() - 0.01, ends


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(9, 64, 64)
        self.policy = nn.Linear(64, 2)
        self.value = nn.Linear(64, 1)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(seen))
        return self.policy(x), self.value(x).squeeze(-1)


def actor_critic(started: Started, steps: int) -> list[float]:
    """An agent that makes eight moves in sixteen corridors, and learns from them."""
    agent, corridor = Agent(), Corridor()
    optimizer = Adam(agent.parameters(), lr=1e-3)
    started(agent, optimizer)
    losses = []
    for _ in range(steps):
        seen, taken, rewards, ends = [], [], [], []
        with torch.no_grad():
            for _ in range(8):
                seen.append(corridor.seen())
                taken.append(agent(seen[-1])[0].softmax(-1).multinomial(1).squeeze(-1))
                reward, ended = corridor.act(taken[-1])
                rewards.append(reward)
                ends.append(ended)
            total = agent(corridor.seen())[1]
            returns = []
            for reward, ended in zip(reversed(rewards), reversed(ends), strict=True):
                total = reward + 0.95 * total * ~ended
                returns.append(total)
        logits, values = agent(torch.cat(seen))
        wanted = torch.cat(returns[::-1])
        advantages = wanted - values.detach()
        chosen = logits.log_softmax(-1).gather(1, torch.cat(taken)[:, None]).squeeze(1)
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        loss = functional.mse_loss(values, wanted) - (advantages * chosen).mean() - 0.1 * entropy
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses
