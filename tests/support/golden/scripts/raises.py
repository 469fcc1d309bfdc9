"""A script that looks for NaN itself, and ends with an exception of its own."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(3, 3)
for scale in (1.0, 1e30):
    output = model(torch.ones(2, 3) * scale).square()
    if not output.isfinite().all():
        raise SystemExit("the loss is not finite")
    print(output.shape)
