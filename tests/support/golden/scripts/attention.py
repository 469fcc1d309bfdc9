"""Attention in float16: a mask is added to scores, and one row is hidden altogether."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, x, keep):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / 4
        scores = scores + (1 - keep[:, None].to(x.dtype)) * torch.finfo(x.dtype).min * 2
        return self.out(scores.softmax(-1) @ v)


torch.manual_seed(0)
model = Attention().half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(3):
    x = torch.randn(2, 5, 16).half()
    keep = torch.ones(2, 5)
    if step == 2:
        keep[1] = 0
    loss = model(x, keep).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step)
