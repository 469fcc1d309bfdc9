"""An average of weights, and a learning rate that a schedule makes NaN."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
averaged = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
warm_up = 0
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: step / warm_up if warm_up else (float("nan") if step > 2 else 1.0)
)
for step in range(6):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    with torch.no_grad():
        for mine, its in zip(averaged.parameters(), model.parameters(), strict=True):
            mine.lerp_(its, 0.1)
    print(step)
