"""Softmaxes by hand whose maximum is that of other groups, or rows, than their sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = "import torch\nimport torch.nn as nn\ntorch.manual_seed(0)\n"
EDGES = (
    "src = torch.tensor([0, 0, 1, 1, 2])\ndst = torch.tensor([0, 1, 0, 2, 2])\n"
    "s = torch.tensor([290.0, 1.0, 3.0, 2.0, 3.0])\n"
)

# The program, and how the only fix begins.
GROUPS = {
    "by index_reduce and gather": (
        (
            EDGES + "m = torch.zeros(3).index_reduce(0, src, s, 'amax', include_self=False)\n"
            "e = (s - m.gather(0, src)).exp()\n"
            "z = torch.zeros(3).scatter_add_(0, dst, e)\n"
            "print(e / z.gather(0, dst))\n"
        ),
        "take the maximum (script.py:7, script.py:8) by `dst`, as the sum (script.py:9)",
    ),
    "indices of one tensor, in a method": (
        (
            "edges = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 0, 2, 2]])\n"
            "s = torch.tensor([290.0, 1.0, 3.0, 2.0, 3.0])\n"
            "class A:\n"
            "    def norm(self, s, edges):\n"
            "        row, col = edges\n"
            "        big = s.new_full((3,), -1e30).scatter_reduce(0, row, s, reduce='amax')\n"
            "        num = torch.exp(s - big[row])\n"
            "        den = torch.zeros(3).index_add(0, col, num)\n"
            "        return num / den[col]\n"
            "print(A().norm(s, edges))\n"
        ),
        "take the maximum (script.py:9, script.py:10) by `col`, as the sum (script.py:11)",
    ),
    "a maximum that is handed back otherwise": (
        (
            EDGES + "m = torch.zeros(3).scatter_reduce(0, dst, s, 'amax')\n"
            "e = torch.exp(s - m[src])\n"
            "z = torch.zeros(3).index_add(0, dst, e)\n"
            "print(e / z[dst])\n"
        ),
        "take the maximum (script.py:8) by `dst`, as the sum (script.py:9)",
    ),
    "functions that group": (
        (
            "def seg_max(x, i, n):\n"
            "    return torch.full((n,), -1e30).scatter_reduce(0, i, x, 'amax')\n"
            "def seg_sum(x, i, n):\n"
            "    return torch.zeros(n).index_add(0, i, x)\n"
            + EDGES
            + "e = torch.exp(s - seg_max(s, src, 3)[src])\n"
            "total = seg_sum(e, dst, 3)\n"
            "print(e / total[dst])\n"
        ),
        "take the maximum (script.py:11) by `dst`, as the sum (script.py:13)",
    ),
    "heads of an attention": (
        (
            EDGES + "S = s[:, None].repeat(1, 2)\n"
            "m = torch.zeros(3, 2).scatter_reduce(0, src[:, None].expand(-1, 2), S, 'amax')\n"
            "e = torch.exp(S - m[src])\n"
            "z = torch.zeros(3, 2).index_add(0, dst, e)\n"
            "print(e / z[dst])\n"
        ),
        "take the maximum (script.py:8, script.py:9) by `dst`, as the sum (script.py:10)",
    ),
    "rows": (
        (
            "s = torch.randn(4, 4)\n"
            "s[1] -= 400\n"
            "e = torch.exp(s - s.amax(dim=0, keepdim=True))\n"
            "print(e / e.sum(dim=-1, keepdim=True))\n"
        ),
        "take the maximum (script.py:6) by dim 1, as the sum (script.py:7), not by dim 0",
    ),
    "rows, with indices of the maximum": (
        (
            "s = torch.randn(4, 4)\n"
            "s[1] -= 400\n"
            "s[1,1]=9\n"
            "s[1,1]-=309\n"
            "e = torch.exp(s - s.max(0, keepdim=True)[0])\n"
            "print(e / e.sum(-1, keepdim=True))\n"
        ),
        "take the maximum (script.py:8) by dim 1, as the sum (script.py:9), not by dim 0",
    ),
    "a logarithm of the sum": (
        (
            EDGES + "m = torch.zeros(3).scatter_reduce(0, src, s, 'amax')\n"
            "e = torch.exp(s - m[src])\n"
            "z = torch.zeros(3).index_add(0, dst, e)\n"
            "print(torch.log(z))\n"
        ),
        "take the maximum (script.py:7, script.py:8) by `dst`, as the sum (script.py:9)",
    ),
    "no maximum": (
        (
            EDGES + "e = torch.exp(-300 - s)\n"
            "z = torch.zeros(3).index_add(0, dst, e)\n"
            "print(e / z[dst])\n"
        ),
        "subtract the maximum of each group from what exp (script.py:7) reads, by scatter_reduce",
    ),
}

# A maximum of the groups that are summed, and what is none.
TWINS = {
    "the same index under another name": (
        EDGES + "idx = dst\n"
        "m = torch.zeros(3).scatter_reduce(0, idx, s, 'amax')\n"
        "e = torch.exp(s - m[idx])\n"
        "e = e * (dst != 1)\n"
        "z = torch.zeros(3).index_add(0, dst, e)\n"
        "print(e / z[dst])\n"
    ),
    "a minimum": (
        EDGES + "m = torch.zeros(3).scatter_reduce(0, src, s, 'amin')\n"
        "e = torch.exp(-300 - s - m[src])\n"
        "z = torch.zeros(3).index_add(0, dst, e)\n"
        "print(e / z[dst])\n"
    ),
    "one row of a tensor, twice": (
        "edges = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 0, 2, 2]])\n"
        "s = torch.tensor([-290.0, 1.0, 3.0, 2.0, 3.0])\n"
        "col = edges[1]\n"
        "m = torch.zeros(3).scatter_reduce(0, edges[1], s, 'amax')\n"
        "e = torch.exp(s - m[col])\n"
        "e = e * 0\n"
        "z = torch.zeros(3).index_add(0, col, e)\n"
        "print(e / z[col])\n"
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_maximum_is_that_of_the_sum(run_here: RunHere, name: str) -> None:
    text, told = GROUPS[name]
    err = run_here(HEAD + text).err
    fixes = [line.strip() for line in err.splitlines() if line.strip().startswith("fix: ")]
    assert fixes
    assert fixes[0].startswith(f"fix: {told}"), fixes
    assert "schedule" not in err


@pytest.mark.parametrize("name", TWINS)
def test_groups_that_are_the_same(run_here: RunHere, name: str) -> None:
    err = run_here(HEAD + TWINS[name]).err
    assert "fix: " in err
    assert "take the maximum" not in err
    assert "maximum of each" not in err
    assert "schedule" not in err
