"""``fxguard run`` on numbers that are missing, as NaN on purpose, and on means of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.programs import IMPORTS
from support.repairs import expect_first, expect_not_said

RunHere = Callable[[str], Any]

MISSING = (
    "x = torch.randn(8, 6, 4)\nx[torch.rand(8, 6, 4) < 0.2] = float('nan')\n"
    "x[4, :, 1] = float('nan')\n"
)
TABLE = (
    "table = np.ones((8, 6, 4), dtype='float32')\ntable[::3, 2, 2] = np.nan\n"
    "table[4, :, 1] = np.nan\nx = torch.from_numpy(table)\n"
)
TRAINED = "loss = nn.Linear(4, 1)(x).square().mean()\nloss.backward()\n"
SAID = "leave out what holds nothing but NaN before {0}, or say what stands for it: {0}(...)"
FILLS = (
    ("nanmean", "x = torch.nanmean(x, dim=1)\n"),
    ("nanmean", "x = torch.where(x.isnan(), x.nanmean(dim=1, keepdim=True), x)\n"),
    ("nanmedian", "m = x.nanmedian(1, keepdim=True).values\nx = torch.where(x.isnan(), m, x)\n"),
    ("nanquantile", "x = torch.nanquantile(x, 0.5, dim=1)\n"),
    (
        "nanmean",
        "m = torch.nanmean(x, 1, True).expand_as(x)\nx[torch.isnan(x)] = m[torch.isnan(x)]\n",
    ),
)


@pytest.mark.parametrize("data", [MISSING, TABLE], ids=["written", "of numpy"])
@pytest.mark.parametrize(("name", "fill"), FILLS)
def test_mean_of_nothing(run_here: RunHere, data: str, name: str, fill: str) -> None:
    """Who takes ``nanmean`` expects NaN in what it reads; only a row of nothing else is a fault."""
    found = run_here(f"{IMPORTS}{data}{fill}{TRAINED}")
    assert f"{name} made NaN" in found.err.splitlines()[0], found.err
    assert SAID.format(name) in found.fixes[0], found.fixes
    assert "all 6 elements of the row are NaN" in found.err, found.err


def test_mean_of_valid_numbers(run_here: RunHere) -> None:
    """What replaces the missing numbers is at fault, also where it counts by itself."""
    fill = (
        "ok = ~x.isnan()\nm = torch.where(ok, x, 0.0).sum(1, keepdim=True) / ok.sum(1, True)\n"
        "x = torch.where(ok, x, m)\n"
    )
    found = run_here(f"{IMPORTS}{MISSING}{fill}{TRAINED}")
    assert found.err.startswith("div made NaN"), found.err


@pytest.mark.parametrize(
    ("data", "first"),
    [
        (f"{MISSING}x = x.mean(dim=1)\n", "setitem made NaN"),
        ("x = torch.zeros(8, 6, 4)\nx = (x / x).nanmean(dim=1)\n", "div made NaN"),
    ],
    ids=["plain mean", "computed"],
)
def test_numbers_that_nobody_expects(run_here: RunHere, data: str, first: str) -> None:
    found = run_here(f"{IMPORTS}{data}{TRAINED}")
    assert found.err.startswith(first), found.err


def test_missing_numbers_with_a_mean_in_every_row(run_here: RunHere) -> None:
    data = MISSING.replace("x[4, :, 1] = float('nan')\n", "x[:, 0] = 1.0\n")
    found = run_here(f"{IMPORTS}{data}x = torch.nanmean(x, dim=1)\n{TRAINED}")
    assert found.status == 0, found.err


WEIGHTS = (
    "states, actions = torch.randn(64, 6), torch.randn(64, 2)\nq = 300 * torch.randn(64)\n"
    "policy = nn.Linear(6, 2)\n{}\n({}).backward()\n"
)
BOUND = "bound the weight that a term of the mean gets, exp({}.clamp(max=4.6)): `{}` is then at"


@pytest.mark.parametrize(
    ("made", "loss", "x", "name"),
    [
        (
            "with torch.no_grad():\n    weight = torch.exp(3.0 * q)",
            "(weight * (policy(states) - actions).square().sum(1)).mean()",
            "(3.0 * q)",
            "weight",
        ),
        (
            "w = (q / 0.5).exp()",
            "torch.mean(F.mse_loss(policy(states), actions, reduction='none').mean(1) * w)",
            "(q / 0.5)",
            "w",
        ),
        (
            "log_p = -(policy(states) - actions).square().sum(1)\nratio = torch.exp(log_p + q)",
            "-(ratio * actions[:, 0]).mean()",
            "(log_p + q)",
            "ratio",
        ),
    ],
)
def test_weights_of_a_mean(run_here: RunHere, made: str, loss: str, x: str, name: str) -> None:
    expect_first(run_here, WEIGHTS.format(made, loss), BOUND.format(x, name))


def test_precision_of_a_likelihood(run_here: RunHere) -> None:
    """Its logarithm is in the same mean: who bounds only one of them changes the likelihood."""
    made = "mean, log_var = policy(states).unbind(1)\nlog_var = log_var - 200\n"
    made += "precision = torch.exp(-log_var)"
    loss = "(precision * (q - mean).square() + log_var).mean()"
    expect_not_said(run_here, WEIGHTS.format(made, loss), "bound the weight")
