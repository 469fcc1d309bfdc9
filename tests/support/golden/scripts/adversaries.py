"""Two models that train each other; the loss of one takes the log of a sigmoid that is 1."""

import torch
from torch import nn

torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
critic = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
steps = [torch.optim.SGD(each.parameters(), lr=2.0) for each in (maker, critic)]
for step in range(12):
    real, made = torch.randn(16, 2) + 4, maker(torch.randn(16, 2)) * 4
    loss = -(critic(real).sigmoid().log() + (1 - critic(made.detach()).sigmoid()).log()).mean()
    steps[1].zero_grad()
    loss.backward()
    steps[1].step()
    steps[0].zero_grad()
    (-critic(made).sigmoid().log().mean()).backward()
    steps[0].step()
    print(step)
