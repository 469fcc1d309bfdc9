"""Four small models, the data that they learn, and what an ordinary training of each consists of.

A step of each takes a few milliseconds on one core.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

__all__ = ["ARCHITECTURES", "GPT", "MLP", "Architecture", "Batches", "MoE", "ViT", "text_batches"]

Batches = Iterator[tuple[Tensor, Tensor]]  # inputs and targets

LICENSE = Path(__file__).parents[3] / "LICENSE"  # a text that nobody edits


class Attention(nn.Module):
    """Self-attention that is written out."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.scale = (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1)
        scores = scores * self.scale
        if self.causal:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        mixed = scores.softmax(dim=-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.act(self.up(x))))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = FeedForward(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A language model of bytes."""

    def __init__(self, width: int = 64, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(128, width)
        self.blocks = nn.ModuleList(Block(width, 2, True, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.normal_(self.positions.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ViT(nn.Module):
    """A classifier of images of 16 by 16 pixels, by the cosine to the direction of each class."""

    def __init__(self, width: int = 48, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.positions = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 3, False, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        x = functional.normalize(self.norm(x).mean(dim=1), dim=-1)
        return self.head(x) * self.logit_scale.exp()


class Standardize(nn.Module):
    """Columns of a table in units of their own deviation, which the training set has given."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", table.mean(dim=0))
        self.register_buffer("std", table.std(dim=0))

    def forward(self, table: Tensor) -> Tensor:
        return (table - self.mean) / self.std


class Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.norm = nn.BatchNorm1d(outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.relu(self.norm(self.linear(x))))


class MLP(nn.Module):
    """A classifier of the rows of a table, with batch norm."""

    def __init__(self, width: int = 64, dropout: float = 0.1) -> None:
        super().__init__()
        self.standardize = Standardize(table_of(4096, torch.Generator().manual_seed(1))[0])
        sizes = [16, width, width, width]
        self.layers = nn.Sequential(*(Layer(a, b, dropout) for a, b in itertools.pairwise(sizes)))
        self.head = nn.Linear(width, 5)

    def forward(self, table: Tensor) -> Tensor:
        return self.head(self.layers(self.standardize(table)))


class Experts(nn.Module):
    """A mixture of experts: each row goes to the `chosen` of them that its router likes best."""

    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.temperature = 1.0
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x) / self.temperature
        gates, places = scores.softmax(dim=-1).topk(self.chosen, dim=-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, ranks = torch.where(places == number)
            y = y.index_add(0, rows, gates[rows, ranks, None] * expert(x[rows]))
        return y


class MoE(nn.Module):
    """A regression with two mixtures of experts: the first takes two of them, the second one."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(12, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.layers = nn.ModuleList([Experts(width, 4, 2), Experts(width, 4, 1)])
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


@cache
def text() -> Tensor:
    """So few paragraphs of this repository's licence that a short training learns to attend."""
    return torch.frombuffer(bytearray(LICENSE.read_bytes()[300:1500]), dtype=torch.uint8).long()


def text_batches(seed: int, length: int = 24, batch: int = 8) -> Batches:
    """Stretches of the text; the target of each byte is the one after it."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text()) - length - 2, (batch, 1), generator=generator)
        bytes_ = text()[starts + torch.arange(length + 1)]
        yield bytes_[:, :-1], bytes_[:, 1:]


def image_batches(seed: int, batch: int = 16) -> Batches:
    """Ten patterns under noise."""
    patterns = torch.rand(10, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(seed)
    while True:
        labels = torch.randint(10, (batch,), generator=generator)
        noise = torch.randn(batch, 3, 16, 16, generator=generator)
        yield patterns[labels] + 0.35 * noise, labels


def table_of(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Columns in many units, and to which of five classes each row belongs."""
    fixed = torch.Generator().manual_seed(3)
    units = 10.0 ** torch.randint(-2, 4, (16,), generator=fixed)
    offsets = torch.randn(16, generator=fixed)
    centres = torch.randn(5, 2, 16, generator=fixed)
    labels = torch.randint(5, (rows,), generator=generator)
    which = torch.randint(2, (rows,), generator=generator)
    noise = 1.2 * torch.randn(rows, 16, generator=generator)
    return (centres[labels, which] + noise + offsets) * units, labels


def table_batches(seed: int, batch: int = 128) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield table_of(batch, generator)


def regression_batches(seed: int, batch: int = 96) -> Batches:
    """Four linear laws, and which of them holds depends on where a point lies."""
    fixed = torch.Generator().manual_seed(4)
    centres = 1.5 * torch.randn(4, 12, generator=fixed)
    laws = torch.randn(4, 12, 3, generator=fixed) / 3
    generator = torch.Generator().manual_seed(seed)
    while True:
        which = torch.randint(4, (batch,), generator=generator)
        points = centres[which] + torch.randn(batch, 12, generator=generator)
        values = torch.einsum("bi,bio->bo", points, laws[which])
        yield points, values + 0.3 * torch.randn(batch, 3, generator=generator)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def smoothed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits, targets, label_smoothing=0.1)


def huber_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.huber_loss(outputs.float(), targets, delta=0.5)


@dataclass(frozen=True)
class Architecture:
    """A model with what people train it with. `cast` makes a bfloat16 model, else autocast does."""

    model: Callable[[], nn.Module]
    batches: Callable[[int], Batches]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[..., Optimizer]
    clip: float | None = None
    casts: bool = False


ARCHITECTURES = {
    "gpt": Architecture(
        GPT, text_batches, next_token_loss, partial(AdamW, lr=3e-3, betas=(0.9, 0.95)), clip=1.0
    ),
    "vit": Architecture(
        ViT, image_batches, smoothed_loss, partial(AdamW, lr=5e-4, weight_decay=0.05)
    ),
    "mlp": Architecture(
        MLP, table_batches, functional.cross_entropy, partial(SGD, lr=0.05, momentum=0.9)
    ),
    "moe": Architecture(
        MoE, regression_batches, huber_loss, partial(AdamW, lr=2e-3), clip=0.05, casts=True
    ),
}
