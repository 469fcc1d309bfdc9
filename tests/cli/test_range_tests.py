"""A loop that raises the learning rate until the loss is lost, and goes back, is no fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.programs import IMPORTS

RunHere = Callable[[str], Any]

TEST = (
    "import copy\nx, y = torch.randn(64, 4), torch.randn(64, 1)\n"
    "net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))\n"
    "def test(net):\n    saved = {saved}\n    opt = torch.optim.SGD(net.parameters(), lr=1e-4)\n"
    "    for turn in range(60):\n        for group in opt.param_groups:\n            {rate}\n"
    "        loss = F.mse_loss(net(x), y)\n        opt.zero_grad()\n        loss.backward()\n"
    "        opt.step()\n        if {asks}:\n            {leaves}\n    {loads}\n"
    "test(net)\nprint('went on')\nF.mse_loss(net(x), y).backward()\n"
)
WHOLE = {
    "saved": "copy.deepcopy(net.state_dict())",
    "rate": 'group["lr"] = 1e-4 * 2.0 ** turn',
    "asks": "not math.isfinite(loss.item())",
    "leaves": "break",
    "loads": "net.load_state_dict(saved)",
}

SAME = {
    "math.isfinite": {},
    "torch.isnan": {"asks": "torch.isnan(loss) or torch.isinf(loss)"},
    "the rate of one group": {"rate": 'opt.param_groups[0]["lr"] = 1e-4 * 2.0 ** turn'},
}

# Without one of its parts it is a training whose loss was lost.
OTHER = {
    "no weights are loaded": {"loads": "pass"},
    "nothing was saved": {"saved": "None", "loads": "pass"},
    "the rate stays": {"rate": 'opt.defaults["x"] = 0\n            group.update(lr=50.0)'},
    "the script ends": {"leaves": "raise SystemExit(1)"},
    "a test for something else": {"asks": "loss.item() > 1e40"},
}


@pytest.mark.parametrize("name", SAME)
def test_it_goes_on_and_is_noted_once(run_here: RunHere, name: str) -> None:
    found = run_here(IMPORTS + TEST.format(**{**WHOLE, **SAME[name]}))
    assert found.status == 0, found.err
    assert "went on" in found.out
    assert found.err.count("note: ") == 1
    assert "the loop at script.py:11 raises the learning rate until then" in found.err


@pytest.mark.parametrize("name", OTHER)
def test_another_loop_stops_at_the_cause(run_here: RunHere, name: str) -> None:
    found = run_here(IMPORTS + TEST.format(**{**WHOLE, **OTHER[name]}))
    assert found.status == 3, found.err
    assert "raises the learning rate until then" not in found.err


def test_what_is_lost_after_it_is_reported(run_here: RunHere) -> None:
    text = TEST.format(**WHOLE) + "F.mse_loss(net(x / 0), y).backward()\n"
    assert run_here(IMPORTS + text).status == 3
