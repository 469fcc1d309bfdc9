"""An actor and a critic: the advantage of the last, single sample has no deviation."""

import torch
from torch import nn
from torch.distributions import Normal


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.mean, self.value = nn.Linear(16, 2), nn.Linear(16, 1)
        self.log_std = nn.Parameter(torch.zeros(2))

    def forward(self, observation):
        hidden = self.body(observation)
        return Normal(self.mean(hidden), self.log_std.exp()), self.value(hidden).squeeze(-1)


torch.manual_seed(0)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
observation = torch.randn(17, 4)
with torch.no_grad():
    distribution, value = policy(observation)
    action = distribution.sample()
    before = distribution.log_prob(action).sum(-1)
reward = -(action - observation[:, :2]).pow(2).sum(-1)
advantage = reward - value
for places in torch.arange(17).split(8):
    distribution, value = policy(observation[places])
    a = advantage[places]
    a = (a - a.mean()) / (a.std() + 1e-8)
    ratio = (distribution.log_prob(action[places]).sum(-1) - before[places]).exp()
    gain = torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
    loss = 0.5 * (value - reward[places]).pow(2).mean() - gain
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    optimizer.step()
    print(len(places), "samples")
