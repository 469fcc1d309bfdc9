"""What made a bad number before a model has read it, on whatever way it went there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.programs import IMPORTS

RunHere = Callable[[str], Any]

GRAPH = (
    "a = (torch.rand(20, 20) < 0.2).float()\na[3] = 0\na[3, 5] = 1\n"
    "def table_of(a):\n    return torch.stack([a, a / torch.log(a.sum(1))], -1)\n"
)
STEPS = (
    "opt = torch.optim.SGD(net.parameters(), lr=0.1)\nfor turn in range(3):\n"
    "    i = torch.randint(20, (64,))\n    loss = net({}).square().mean()\n"
    "    opt.zero_grad()\n    loss.backward()\n    opt.step()\n"
)
NET = (
    "class Net(nn.Module):\n    def __init__(self{0}):\n        super().__init__()\n"
    "        self.last = nn.Linear(2, 1)\n{1}"
    "    def forward(self, {2}):\n        return self.last({3}[i, i.flip(0)])\n"
)

# The ways from the line that made a NaN into a model.
WAYS = {
    "an object that is given": (
        "class Scores:\n    def __init__(self, a):\n        self.table = table_of(a)\n"
        + NET.format("", "", "i, scores", "scores.table")
        + "scores = Scores(a)\nnet = Net()\n"
        + STEPS.format("i, scores")
    ),
    "a global": NET.format("", "", "i", "table")
    + "table = table_of(a)\nnet = Net()\n"
    + STEPS.format("i"),
    "an attribute of a module": NET.format(", t", "        self.t = t\n", "i", "self.t")
    + "net = Net(table_of(a))\n"
    + STEPS.format("i"),
    "a list of an attribute": NET.format(", t", "        self.t = [t]\n", "i", "self.t[0]")
    + "net = Net(table_of(a))\n"
    + STEPS.format("i"),
}


@pytest.mark.parametrize("name", WAYS)
def test_the_line_that_made_it_is_named(run_here: RunHere, name: str) -> None:
    found = run_here(f"{IMPORTS}{GRAPH}{WAYS[name]}")
    assert found.status == 3
    assert "div made NaN (script.py:9): 0 / 0" in found.err.splitlines()[0]


RANKS = (
    "q = np.linspace({}, 50)\nz = torch.erfinv(torch.from_numpy(2 * q - 1)).{}\n"
    "x = np.full((50, 1), 0.5, dtype=np.float32)\nx[:, 0] = z\n{}"
    "net = nn.Linear(1, 1)\nopt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    "for turn in range(2):\n    loss = net(torch.from_numpy(x)).square().mean()\n"
    "    opt.zero_grad()\n    loss.backward()\n    opt.step()\n"
)


@pytest.mark.parametrize("way", ["numpy()", "tolist()", "__array__()"])
def test_a_way_through_arrays_is_known(run_here: RunHere, way: str) -> None:
    found = run_here(IMPORTS + RANKS.format("0, 1", way, ""))
    assert found.status == 3
    assert found.err.startswith("erfinv made inf and -inf (script.py:6)")
    assert "was given it; then argument `input` of Linear.forward: 1 +inf, 1 -inf" in found.err


def test_other_numbers_of_an_array_are_not_blamed_on_an_operation(run_here: RunHere) -> None:
    """A gap in the data is NaN, and what was infinite was replaced."""
    more = "x[np.isinf(x)] = 0\nx[7] = np.nan\n"
    found = run_here(IMPORTS + RANKS.format("0, 1", "numpy()", more))
    assert found.status == 3
    assert "argument `input` of Linear.forward" in found.err.splitlines()[0]
    assert "erfinv made" not in found.err.splitlines()[0]


OBSERVER = (
    "class Observer(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.layer = nn.Linear(4, 4)\n"
    "        self.register_buffer('lo', torch.tensor(float('inf')))\n"
    "    def forward(self, x):\n        h = self.layer(x)\n        with torch.no_grad():\n"
    "            {}\n        return h - self.lo\n"
    "net = Observer()\nnet(torch.randn(8, 4)).square().mean().backward()\n"
)
WRITES = {
    "a step towards the batch": ("self.lo += 0.05 * (h.min() - self.lo)", "add"),
    "lerp": ("self.lo.lerp_(h.min(), 0.05)", "lerp"),
    "a product and a sum": ("self.lo.mul_(0.95).add_(h.min(), alpha=0.05)", "mul"),
}


@pytest.mark.parametrize("name", WRITES)
def test_an_average_that_begins_at_inf_is_told_where_it_is_taken(
    run_here: RunHere, name: str
) -> None:
    line, kind = WRITES[name]
    found = run_here(IMPORTS + OBSERVER.format(line))
    assert found.status == 3
    assert found.fixes[0].startswith("fix: begin with what the first batch gives")
    assert f"before {kind} (script.py:13)" in found.fixes[0]


def test_a_minimum_may_begin_at_inf(run_here: RunHere) -> None:
    line = "self.lo.copy_(torch.minimum(self.lo, h.min()))"
    assert run_here(IMPORTS + OBSERVER.format(line)).status == 0
