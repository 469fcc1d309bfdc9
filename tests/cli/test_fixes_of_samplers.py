"""What ``fxguard run`` says of samplers, of policies, and of data that no gradient reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("form_of_operations")

RunHere = Callable[[str], Any]

HEAD = "import math\nimport torch\nfrom torch import nn\ntorch.manual_seed(0)\n"

# Chains that begin outside of the support of their density.
OUTSIDE = {
    "a gamma density, chains side by side": (
        "def log_prob(x):\n"
        "    return torch.where(x > 0, 2 * torch.log(x.clamp(min=1e-9)) - x, -math.inf)\n"
        "x = torch.linspace(-4, 4, 8)\n"
        "lp = log_prob(x)\n"
        "for _ in range(5):\n"
        "    proposal = x + 0.1 * torch.randn(8)\n"
        "    lp_new = log_prob(proposal)\n"
        "    ratio = lp_new - lp\n"
        "    chance = torch.exp(ratio.clamp(max=0.0))\n"
        "    taken = torch.rand(8) < chance\n"
        "    x, lp = torch.where(taken, proposal, x), torch.where(taken, lp_new, lp)\n"
        "    print(chance.mean().item())\n"
    ),
    "a uniform prior, one chain": (
        "def log_post(theta):\n"
        "    inside = (theta >= 0) & (theta <= 1)\n"
        "    never = torch.tensor(-math.inf)\n"
        "    return torch.where(inside.all(), -(theta - 0.3).square().sum(), never)\n"
        "theta = torch.full((2,), 1.5)\n"
        "now = log_post(theta)\n"
        "for _ in range(5):\n"
        "    other = theta + 0.05 * torch.randn(2)\n"
        "    then = log_post(other)\n"
        "    log_alpha = then - now\n"
        "    if torch.log(torch.rand(())) < log_alpha:\n"
        "        theta, now = other, then\n"
        "    print(log_alpha.item())\n"
    ),
}


def first_fix(ran: Any) -> str:
    return next((line.strip() for line in ran.err.splitlines() if "fix: " in line), "")


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_chain_that_begins_outside_the_support(run_here: RunHere, name: str) -> None:
    fix = first_fix(run_here(HEAD + OUTSIDE[name]))
    assert fix.startswith("fix: begin inside the support: a state of density 0"), fix
    assert len(fix) < 180


def test_a_recursion_in_logarithms_is_no_sampler(run_here: RunHere) -> None:
    text = (
        "score = torch.full((4,), -math.inf)\n"
        "other = torch.full((4,), -math.inf)\n"
        "other[0] = 0.0\n"
        "print((score - other).sum().item())\n"
    )
    fix = first_fix(run_here(HEAD + text))
    assert "support" not in fix


# Logarithms of negative numbers.
OF_DATA = {
    "distances of sequences": (
        "p = torch.tensor([0.1, 0.3, 0.8])\n"
        "distance = -0.75 * torch.log(1 - 4.0 / 3.0 * p)\n"
        "print(distance.sum().item())\n"
    ),
    "returns of prices": (
        "prices = torch.tensor([3.0, 2.0, -1.0, 4.0])\n"
        "growth = torch.log(prices[1:] / prices[:-1])\n"
        "print(growth.mean().item())\n"
    ),
    "under no_grad": (
        "model = nn.Linear(2, 1)\n"
        "x = torch.randn(6, 2)\n"
        "with torch.no_grad():\n"
        "    level = torch.log2(x.sum(1) - 1.0)\n"
        "loss = (model(x)[:, 0] - level).square().mean()\n"
        "loss.backward()\n"
        "print(loss.item())\n"
    ),
}


@pytest.mark.parametrize("name", OF_DATA)
def test_what_nothing_learns_from_is_not_made_positive(run_here: RunHere, name: str) -> None:
    """By softplus or exp, which would change all that is right."""
    fix = first_fix(run_here(HEAD + OF_DATA[name]))
    assert "leave such elements out, or bound it so far above 0" in fix, fix
    assert "softplus" not in fix


@pytest.mark.parametrize("form_of_operations", ["C", "Python"], indirect=True)
def test_what_is_learned_is_made_positive(run_here: RunHere) -> None:
    """Not on a device, where operands are kept without autograd: nothing tells that it is."""
    text = (
        "rate = nn.Parameter(torch.tensor([0.5, -0.2]))\n"
        "loss = (torch.log(rate * 2) - 1).square().mean()\n"
        "loss.backward()\n"
        "print(loss.item())\n"
    )
    assert "softplus" in first_fix(run_here(HEAD + text))


# Policies return distributions; what is computed of them is a loss all the same.
POLICY = """
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)
    def forward(self, x):
        made = self.net(x)
        return {returned}
policy = Policy()
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
for count in (5, 1):
    policy_of = policy(torch.randn(count, 4))
    action = policy_of.sample()
    returns = torch.arange(count).float()
    advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
    loss = -(policy_of.log_prob(action) * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
RETURNED = {
    "categorical": "torch.distributions.Categorical(logits=made)",
    "normal": "torch.distributions.Independent(torch.distributions.Normal(made, 1.0), 1)",
    "in a tuple": "torch.distributions.Bernoulli(logits=made[:, 0]), made",
    "in a dict": "{'policy': torch.distributions.Categorical(logits=made)}",
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_loss_of_a_distribution_that_a_model_returned(run_here: RunHere, name: str) -> None:
    text = POLICY.replace("{returned}", RETURNED[name])
    taken = {"in a tuple": "[0]", "in a dict": "['policy']"}.get(name, "")
    text = text.replace("policy(torch.randn(count, 4))", f"policy(torch.randn(count, 4)){taken}")
    ran = run_here(HEAD + text)
    assert "std made NaN (" in ran.err, ran.err
    assert "fix: take std of more than one element" in first_fix(ran)
