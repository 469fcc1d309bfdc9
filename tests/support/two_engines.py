"""One small decoder, written twice: as a reference, and as an engine with other names, fused."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Engine", "Reference", "engine_of", "ids"]

VOCAB, WIDTH, HEADS, LAYERS, LENGTH = 50, 32, 4, 2, 7
HEAD = WIDTH // HEADS


def ids() -> Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        found: Tensor = self.weight * (x * torch.rsqrt(variance + 1e-6))  # the norm of A
        return found


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Norm(), Norm()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        q, k, v = (
            each(h).view(*h.shape[:2], HEADS, HEAD).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # attention of A
        x = x + self.o(h.transpose(1, 2).reshape(x.shape))
        h = self.second(x)
        found: Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return found


class Reference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(self.norm(x))
        return found


class Block(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.n1, self.n2 = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.wqkv = nn.Parameter(torch.empty(WIDTH, 3 * WIDTH))
        self.wo = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.w13 = nn.Parameter(torch.empty(4 * WIDTH, WIDTH))
        self.w2 = nn.Parameter(torch.empty(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor, length: int) -> Tensor:
        h = self.normalized(x, self.n1)
        q, k, v = (
            part.view(-1, length, HEADS, HEAD).transpose(1, 2)
            for part in (h @ self.wqkv).chunk(3, -1)
        )
        scores = q @ k.mT
        if self.fault != "no scale":
            scores = scores * (0.3 if self.fault == "scale" else 1 / math.sqrt(HEAD))  # scale of B
        beyond = 2 if self.fault == "mask" else 1
        hidden = torch.ones(length, length, dtype=torch.bool).triu(beyond)  # mask of B
        p = scores.masked_fill(hidden, -math.inf).softmax(-1)
        if self.fault == "dropout":
            p = functional.dropout(p, 0.2)  # dropout of B
        if self.fault == "bfloat16":
            p = p.bfloat16().to(v.dtype)  # cast of B
        x = x + (p @ v).transpose(1, 2).reshape(x.shape) @ self.wo.t()
        gate, up = (self.normalized(x, self.n2) @ self.w13.t()).chunk(2, -1)
        if self.fault == "activation":
            gate = functional.gelu(gate)  # activation of B
        else:
            gate = functional.silu(up if self.fault == "halves" else gate)  # gate of B
        return x + (gate * up) @ self.w2.t()

    def normalized(self, x: Tensor, gain: Tensor) -> Tensor:
        eps = 1e-5 if self.fault == "eps" else 1e-6
        return functional.rms_norm(x, (WIDTH,), gain, eps)  # norm of B


class Engine(nn.Module):
    """Tokens of a batch are one after the other, and weights that belong together are one."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.emb, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(fault) for _ in range(LAYERS))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.out = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        at = torch.arange(length).clamp(max=length - 2 if self.fault == "position" else length)
        x = self.emb(tokens.flatten()) + self.pos(at).repeat(len(tokens), 1)  # embeddings of B
        for block in self.blocks:
            x = block(x, length)
        found: Tensor = self.out(functional.rms_norm(x, (WIDTH,), self.gain, 1e-6))
        return found


def engine_of(reference: Reference, fault: str = "") -> Engine:
    """The engine with the weights of a reference, and with a fault."""
    engine = Engine(fault)
    with torch.no_grad():
        engine.emb.weight.copy_(reference.tokens.weight)
        engine.pos.weight.copy_(reference.positions.weight)
        engine.gain.copy_(reference.norm.weight)
        engine.out.weight.copy_(reference.head.weight)
        for block, layer in zip(engine.blocks, reference.layers, strict=True):
            assert isinstance(block, Block)
            assert isinstance(layer, Layer)
            block.n1.copy_(layer.first.weight)
            block.n2.copy_(layer.second.weight)
            block.wqkv.copy_(torch.cat([layer.q.weight, layer.k.weight, layer.v.weight]).t())
            block.wo.copy_(layer.o.weight)
            block.w13.copy_(torch.cat([layer.gate.weight, layer.up.weight]))
            block.w2.copy_(layer.down.weight)
        if fault == "weight":
            engine.blocks[1].w2[3, 5] += 0.01
    return engine.eval()
