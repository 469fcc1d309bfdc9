"""A filter without a module: a covariance whose pivot is not positive."""

import torch

torch.manual_seed(0)
noise = torch.nn.Parameter(torch.tensor(-0.5))
transition = torch.nn.Parameter(torch.eye(2))
optimizer = torch.optim.SGD([noise, transition], lr=0.01)
for step in range(3):
    mean, covariance, loss = torch.zeros(2), torch.eye(2) * 0.1, torch.zeros(())
    for measured in torch.randn(4, 2):
        covariance = transition @ covariance @ transition.T + torch.eye(2) * noise
        factor = covariance.diagonal().sqrt()
        gain = factor / (factor + 1)
        mean = transition @ mean + gain * (measured - mean)
        loss = loss + (measured - mean).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step)
