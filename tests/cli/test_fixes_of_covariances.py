"""``fxguard run`` on variances that turned negative: of a filter, and of a formula's own range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.repairs import expect_first, expect_not_said

RunHere = Callable[[str], Any]

FILTER = (
    "def loglik(x, y, log_var):\n    obs, qa, qb = log_var.exp()\n"
    "    Q = torch.stack([qa, qb]).diag()\n    state, P = torch.zeros(2), 1e4 * torch.eye(2)\n"
    "    total = torch.zeros(())\n    for t in range(len(y)):\n        P = P + Q\n"
    "        z = torch.stack([torch.ones(()), x[t]])\n        err = y[t] - z @ state\n"
    "        F = z @ P @ z + obs\n{}\n        total = total - 0.5 * (F.log() + err**2 / F)\n"
    "    return total\nx = 100 + torch.randn(60)\ny = 0.3 + 0.5 * x + 0.1 * torch.randn(60)\n"
    "log_var = torch.tensor([-4.0, -9.0, -12.0], requires_grad=True)\n"
    "print(loglik(x, y, log_var).item())\n"
)
UPDATES = (
    "        K = P @ z / F\n        state = state + K * err\n        P = P - torch.outer(K, P @ z)",
    "        K = (P @ z) / F\n        state = state + K * err\n"
    "        P = P - K[:, None] * (P @ z)",
    "        K = P @ z / F\n        state = state + K * err\n"
    "        P = P - K[:, None] @ z[None] @ P",
    "        K = torch.linalg.solve(F.reshape(1, 1), (P @ z)[None])[0]\n"
    "        state = state + K * err\n        P = P - torch.outer(K, K) * F",
)
JOSEPH = "update P (script.py:17) by Joseph's form, (I - K H) P (I - K H)^T + K R K^T, in float64"


@pytest.mark.parametrize("update", UPDATES)
def test_a_covariance_that_a_filter_updates(run_here: RunHere, update: str) -> None:
    expect_first(run_here, FILTER.format(update), JOSEPH)


def test_a_difference_without_a_gain(run_here: RunHere) -> None:
    """A matrix from which something else is subtracted was never a covariance."""
    text = (
        "A, u = torch.eye(3), torch.tensor([1.0, 2.0, 0.5], requires_grad=True)\n"
        "z = torch.ones(3)\nP = A - torch.outer(u, u)\nprint((z @ P @ z + 0.1).log())\n"
    )
    expect_not_said(run_here, text, "Joseph")


RECTIFIED = (
    "t, end = torch.zeros(()), 1999.0\nfor _ in range(3):\n    t += 1\n    b = 0.999**t\n"
    "    rho = end - 2 * t * b / (1 - b)\n    {}\n    print({}.item())\n"
)
ONLY = "compute it only where `{}` is above 0, by if or where, and what holds without it elsewhere"


@pytest.mark.parametrize(
    ("text", "name", "factor"),
    [
        ("r = ((rho - 4) * (rho - 2) * end / ((end - 4) * rho)).sqrt()", "r", "rho - 4"),
        ("r = torch.sqrt((rho - 5) / rho)", "r", "rho - 5"),
    ],
)
def test_a_factor_that_is_below_0(run_here: RunHere, text: str, name: str, factor: str) -> None:
    expect_first(run_here, RECTIFIED.format(text, name), ONLY.format(factor))


@pytest.mark.parametrize(
    "text",
    [
        "r = torch.sqrt((rho - 4) * (rho - 5) * (2 - rho))",  # not x - 4 alone
        "r = torch.sqrt(torch.stack([rho, t]) - 4).sum()",  # several elements
        "r = torch.sqrt((rho - t * 4) / rho)",  # by no number
        "less = rho - 4\n    r = torch.sqrt(0.5 * (less - 1) * rho)",  # less is negative
    ],
)
def test_factors_whose_sign_is_not_known(run_here: RunHere, text: str) -> None:
    expect_not_said(run_here, RECTIFIED.format(text, "r"), "compute it only where")


DIFFUSION = (
    "{}\nx = torch.randn(4, 2)\nnet = nn.Linear(2, 2)\nwith torch.no_grad():\n"
    "    for t in (9, 5, 1):\n        ab, before = bars[t], bars[t - 1]\n        eps = net(x)\n"
    "        x0 = (x - (1 - ab).sqrt() * eps) / {}\n        rest = (1 - ab / before).clamp(min=0)\n"
    "        x = before.sqrt() * x0 + rest.sqrt() * eps\n    print(net(x).sum().item())\n"
)
BARS = "bars = torch.linspace(1, 0, 10) ** 2"


@pytest.mark.parametrize("root", ["ab.sqrt()", "torch.sqrt(ab)", "bars[t].sqrt()", "ab"])
def test_the_root_of_an_entry_of_a_schedule(run_here: RunHere, root: str) -> None:
    """Not that another division reads it: that by another entry does not."""
    found = run_here(f"import torch\nfrom torch import nn\n{DIFFUSION.format(BARS, root)}")
    assert found.status == 3
    assert "keep bars away from 0 where it is made (script.py:3)" in found.fixes[0], found.fixes
    assert not any("reads it, too" in each for each in found.fixes)


def test_another_operation_that_divides_by_the_same_entry(run_here: RunHere) -> None:
    text = (
        "a = torch.linspace(1, 0, 5).requires_grad_()\nw = (a * 2)[4]\n"
        "print((1 / w + w.log()).item())\n"
    )
    found = run_here(f"import torch\n{text}")
    assert any("reads it, too" in each for each in found.fixes), found.fixes
