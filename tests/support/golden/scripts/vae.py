"""A variational autoencoder whose log variance is not bounded."""

import torch
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 4), nn.Linear(2, 8)

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decode(code), mean, log_variance


torch.manual_seed(0)
model = Autoencoder()
optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
for step in range(8):
    x = torch.randn(16, 8) * 3
    reconstructed, mean, log_variance = model(x)
    divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(-1)
    loss = ((reconstructed - x).square().sum(-1) + divergence / 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step)
