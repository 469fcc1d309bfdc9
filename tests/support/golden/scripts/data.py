"""A row of the data is not a number, and the loss of evaluation shows it first."""

import torch
from torch import nn

torch.manual_seed(0)
table = torch.randn(24, 4)
table[17, 2] = float("nan")
target = torch.randn(24, 1)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step, (x, y) in enumerate(zip(table.split(6), target.split(6), strict=True)):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        print(step, "of 4", model(table[:6]).mean().isfinite().item())
