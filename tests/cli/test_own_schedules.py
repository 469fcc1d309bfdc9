"""The part of a learning rate that is not finite, with the numbers that it was computed from.

What a schedule adds to its counter behind the line does not count: the numbers are those of then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.programs import IMPORTS

RunHere = Callable[[str], Any]

PROGRAM = (
    f"{IMPORTS}net = nn.Linear(3, 1)\n"
    "opt = torch.optim.SGD(net.parameters(), 0.1)\nclass Poly:\n    def __init__(self, opt, end):\n"
    "        self.opt, self.n, self.end, self.part = opt, 0, end, np.float64(1) / end\n"
    "    def step(self):\n{}schedule = Poly(opt, 10)\nfor _ in range(13):\n    schedule.step()\n"
    "    opt.zero_grad()\n    net(torch.ones(4, 3)).mean().backward()\n    opt.step()\n"
)
SET = "        for g in self.opt.param_groups:\n            g['lr'] = float(lr)\n"
PAST = (
    ", a fractional power of a negative number: it is stepped more often than the 10 times it was "
    "made for; count them as the loop runs, or keep what the power is taken of at 0 by max"
)

TOLD = {
    "counted behind the line": (
        f"        lr = 0.1 * (np.float64(1) - self.n / self.end) ** 0.9\n{SET}"
        "        self.n += 1\n",
        "(np.float64(1) - 11 / 10) ** 0.9",
    ),
    "counted in front of it": (
        f"        self.n += 1\n        lr = np.power(1.0 - self.n / self.end, 0.9)\n{SET}",
        "np.power(1.0 - 11 / 10, 0.9)",
    ),
    "a share of its own name": (
        "        self.n += 1\n        done = np.float64(self.n) / self.end\n"
        f"        lr = 0.1 * np.power(1.0 - done, 0.9)\n{SET}",
        "np.power(1.0 - np.float64(11) / 10, 0.9)",
    ),
    "the other branch is a warm-up": (
        "        if self.n < 3:\n            lr = 0.1 * (self.n + 1) / 3\n        else:\n"
        f"            lr = 0.1 * (1.0 - self.n * self.part) ** 0.9\n{SET}        self.n += 1\n",
        "(1.0 - 11 * 0.1) ** 0.9",
    ),
    "behind a warm-up that returns no number": (
        "        lr = 0.1\n        if self.n >= 3:\n            left = 1.0 - self.n * self.part\n"
        f"            lr = 0.1 * left ** 0.5\n{SET}        self.n += 1\n",
        "(-0.1) ** 0.5",
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_the_part_is_told_with_the_numbers_of_then(run_here: RunHere, name: str) -> None:
    lines, part = TOLD[name]
    told = run_here(PROGRAM.format(lines)).err
    assert f"computed: {part} (script.py:" in told
    assert PAST in told


@pytest.mark.parametrize("read", ["lr.item() * g.get('scale', 1.0)", "float(lr) / 2", "lr.item()"])
def test_a_rate_that_is_computed_of_a_tensor(run_here: RunHere, read: str) -> None:
    """The operation that made it is named, also where the line goes on with the number."""
    lines = (
        "        self.n += 1\n        done = torch.tensor(float(self.n)) / self.end\n"
        "        lr = 0.1 * (1 - done) ** 0.9\n        for g in self.opt.param_groups:\n"
        f"            g['lr'] = {read}\n"
    )
    told = run_here(PROGRAM.format(lines))
    assert told.err.startswith("pow made NaN (script.py:13): a fractional power of a negative")
    assert "see why (1 - done) is -0.1 in sub (script.py:13), 1 - 1.1" in told.fixes[0]
    assert "the learning rate was nan when the step began" in told.err


def test_a_number_that_may_have_changed_is_not_shown(run_here: RunHere) -> None:
    lines = f"        lr = 0.1 * (np.float64(1) - self.n / self.end) ** 0.9\n{SET}"
    told = run_here(PROGRAM.format(f"{lines}        if self.opt:\n            self.n += 1\n")).err
    assert "fix: look at how the learning rate is computed (advice)" in told


def test_a_counter_of_the_module_is_what_it_has_become(run_here: RunHere) -> None:
    """And not the 0 that it began as."""
    text = (
        "cfg = dict(lr=0.1, power=0.9)\ntotal = 10\ndef poly(it):\n"
        "    return cfg['lr'] * np.power(1 - it / total, cfg['power'])\n"
        "net = nn.Linear(3, 1)\nopt = torch.optim.SGD(net.parameters(), 0.1)\nit = 0\n"
        "for epoch in range(3):\n    for part in range(6):\n        for g in opt.param_groups:\n"
        "            g['lr'] = poly(it)\n        opt.zero_grad()\n"
        "        net(torch.ones(4, 3)).mean().backward()\n        opt.step()\n        it += 1\n"
    )
    told = run_here(IMPORTS + text).err
    assert "computed: np.power(1 - 11 / 10, cfg['power']) (script.py:8)" in told
    assert PAST in told
