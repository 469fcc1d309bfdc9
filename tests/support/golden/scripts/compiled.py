"""A compiled model, and a compiled function for its loss."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
compiled = torch.compile(model, backend="aot_eager")


@torch.compile(backend="aot_eager")
def loss_of(output, target):
    p = output.softmax(-1)
    return -(target * p.log()).sum(-1).mean()


optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    output = compiled(torch.randn(6, 4) * 10**step)
    loss = loss_of(output * 10**step, torch.ones(6, 4) / 4)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step)
