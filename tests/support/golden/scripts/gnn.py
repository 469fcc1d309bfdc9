"""A graph convolution: the last node is nobody's source, and its degree is 0."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


class Convolution(nn.Module):
    def __init__(self, width_in, width_out):
        super().__init__()
        self.linear = nn.Linear(width_in, width_out)

    def forward(self, x, edges):
        row, column = edges
        degree = torch.zeros(len(x)).scatter_add_(0, row, torch.ones(row.numel()))
        scale = degree.pow(-0.5)
        norm = scale[row] * scale[column]
        hidden = self.linear(x)
        return torch.zeros_like(hidden).index_add(0, row, hidden[column] * norm[:, None])


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Convolution(8, 16), Convolution(16, 4)

    def forward(self, x, edges):
        return self.last(F.relu(self.first(x, edges)), edges)


torch.manual_seed(0)
edges = torch.randint(0, 19, (2, 80))
edges[1, 5] = 19
x, y = torch.randn(20, 8), torch.randint(0, 4, (20,))
model = Network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, edges), y)
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch} loss {loss:.3f}")
