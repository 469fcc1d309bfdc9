"""An optimizer of one's own: the update of a weight of zeros has no length."""

import torch
from torch import nn


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update = p.grad / (p.grad.abs().max() + 1e-8)
                    trust = p.norm() / update.norm()
                    p.add_(update * trust, alpha=-group["lr"])


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Linear(4, 4), nn.Linear(4, 2)
        self.gate, self.skip = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.out(x + self.gate * self.skip * self.body(x).relu())


torch.manual_seed(0)
model = Gated()
optimizer = Lamb(model.parameters())
for step in range(3):
    loss = nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 2, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step)
