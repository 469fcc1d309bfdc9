"""A report names the columns of a table that hold far larger numbers than others, or the NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxguard.measure.columns import Columns, large_columns

RunHere = Callable[[str], Any]

HEAD = (
    "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\ntorch.manual_seed(0)\n"
)
TABLE = "X = torch.randn(32, 6).clamp(-3, 3)\nX[:, 3] = X[:, 3].abs() * 60000 + 1\n"


def net(forward: str, layers: str = "nn.Linear(6, 4)") -> str:
    return (
        f"{HEAD}class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.l = {layers}\n    def forward(self, x):\n        {forward}\nnet = Net()\n"
    )


EXP = "return torch.exp(self.l(x)).sum()"
GO = "net(X).backward()\n"

NAMED = {
    "a layer": (net(EXP) + TABLE + GO, "scale column 3 of x, such as"),
    "several layers": (
        net(EXP, "nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))") + TABLE + GO,
        "scale column 3 of ",
    ),
    "two columns": (
        net(EXP) + TABLE + "X[:, 0] = X[:, 3] * 1.5\n" + GO,
        "scale columns 0 and 3 of x",
    ),
    "a function": (
        net("return torch.exp(F.linear(x, self.l.weight)).sum()") + TABLE + GO,
        "scale column 3 of x",
    ),
    "a product": (
        net("return torch.exp(x @ self.l.weight.t()).sum()") + TABLE + GO,
        "scale column 3 of x",
    ),
    "another name": (
        net(EXP.replace("x)", "rows)")).replace("self, x", "self, rows") + TABLE + GO,
        "scale column 3 of rows",
    ),
    "negative numbers": (net(EXP) + TABLE + "X = -X\n" + GO, "scale column 3 of x"),
    "the first batch of several": (
        net(EXP) + TABLE + "for rows in X.split(8):\n    net(rows).backward()\n",
        "scale column 3 of x",
    ),
    "a cast on the way": (
        net(EXP) + TABLE + "X = X.double()\nnet.double()\n" + GO,
        "column 3 of x",
    ),
    "sinh in the place of exp": (
        net(EXP.replace("exp", "sinh")) + TABLE + GO,
        "scale column 3 of x",
    ),
}

NOT_NAMED = {
    "all columns are large": net(EXP) + TABLE.replace("[:, 3]", "[:]") + GO,
    "one row is large": net(EXP) + TABLE.replace("[:, 3]", "[5]") + GO,
    "one column is a little larger": (
        net(EXP) + "X = torch.randn(32, 6) * 60000\nX[:, 3] *= 20\n" + GO
    ),
    "most columns are large": net(EXP) + TABLE.replace("[:, 3]", "[:, 1:]") + GO,
    "a sequence": (
        net(EXP) + "X = torch.randn(8, 4, 6)\nX[..., 3] *= 60000\n" + GO  # these are no columns
    ),
    "the weights are large": (
        net(EXP) + "X = torch.randn(32, 6)\nnet.l.weight.data[:, 3] *= 1e6\n" + GO
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_the_column_is_named(run_here: RunHere, name: str) -> None:
    text, told = NAMED[name]
    fixes = [line for line in run_here(text).err.splitlines() if line.startswith(("  fix", "  or"))]
    assert told in "\n".join(fixes)
    assert " in the others" in "\n".join(fixes)


@pytest.mark.parametrize("name", NOT_NAMED)
def test_without_such_a_column_none_is_named(run_here: RunHere, name: str) -> None:
    ran = run_here(NOT_NAMED[name])
    assert "made" in ran.err
    assert "in the others" not in ran.err


def test_the_numbers_are_those_of_the_columns(run_here: RunHere) -> None:
    """The largest of the column, and the largest of all others; scaled so, the rest is finite."""
    text = (
        net(EXP) + TABLE + "X[4, 3] = 123456.0\nX[:, 3].clamp_(max=123456.0)\nX[2, 1] = 4.5\n" + GO
    )
    told = run_here(text).err
    assert (
        "reads numbers up to 1.23e+05 there, and up to 4.5 in the others (advice); with it" in told
    )


@pytest.mark.parametrize(
    ("write", "told"),
    [
        ("X[:, 2] = float('nan')", "32 NaN, in 32 rows, the first is 0, all in column 2"),
        ("X[3:5, 1] = float('inf')", "2 +inf, in rows 3 and 4, all in column 1"),
        ("X[3:9, 1:3] = float('nan')", "12 NaN, in 6 rows, the first is 3, all in columns 1 and 2"),
        ("X[3] = float('nan')", "6 NaN, in row 3\n"),
        ("X[3, 2] = float('nan')", "1 NaN, in row 3\n"),
        ("X[3:5] = float('nan')", "12 NaN, in rows 3 and 4\n"),
    ],
)
def test_bad_numbers_of_a_column(run_here: RunHere, write: str, told: str) -> None:
    """Where several rows have them, in a few columns of many."""
    text = net("return self.l(x).sum()") + f"X = torch.ones(32, 6)\n{write}\n{GO}"
    assert told in run_here(text).err + "\n"


def test_large_columns_are_few_and_far_above_the_others() -> None:
    table = torch.ones(4, 5)
    assert large_columns(table) is None
    table[1, 2] = -1000.0
    assert large_columns(table) == Columns((2,), 1000.0, 1.0)
    table[1, 4] = 500.0
    assert large_columns(table) == Columns((2, 4), 1000.0, 1.0)
    table[1, 3] = 500.0
    assert large_columns(table) is None
    assert large_columns(torch.ones(0, 5)) is None
    assert large_columns(torch.tensor([[1.0, torch.inf]])) is None
