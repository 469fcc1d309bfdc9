"""A GPT of three layers on the documentation of Python; at one step a callback sets the rate."""

import pydoc_data.topics
import sys

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LENGTH, STEPS = 64, 64, 700


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


torch.manual_seed(0)
text = "".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")
text = torch.tensor(list(text))
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 50))
for step in range(STEPS):
    begin = torch.randint(len(text) - LENGTH - 1, (16, 1))
    part = text[begin + torch.arange(LENGTH + 1)]
    if step == 500 and "--healthy" not in sys.argv:
        optimizer.param_groups[0]["lr"] = 0.05  # a callback that was written for SGD
    loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warm_up.step()
    if step % 100 == 0:
        print(f"step {step} loss {loss.item():.2f}")
