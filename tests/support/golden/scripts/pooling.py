"""A learned exponent over features that a ReLU made 0: healthy forward, infinite gradient."""

import torch
from torch import nn


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 2)
        self.p = nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        x = self.features(x).relu()
        x = x.pow(self.p).mean((-2, -1)).pow(1 / self.p)
        return self.head(x)


torch.manual_seed(0)
model = Pooled()
nn.init.constant_(model.features.bias, -9.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = nn.functional.cross_entropy(model(torch.randn(3, 1, 6, 6)), torch.tensor([0, 1, 0]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step)
