"""While an optimizer of torch makes a step, no torch function mode of fxguard is in its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("form_of_operations")

RunHere = Callable[[str], Any]

HEAD = (
    "import torch\n"
    "from torch import nn\n"
    "from torch.overrides import _get_current_function_mode_stack as modes\n"
    "torch.manual_seed(0)\n"
    "net, x = nn.Linear(4, 2), torch.randn(3, 4)\n"
    "def say(*given):\n"
    "    print(len(modes()), end=' ')\n"
)

TRAIN = (
    "optimizer.register_step_pre_hook(say)\n"
    "for _ in range(2):\n"
    "    optimizer.zero_grad()\n"
    "    net(x).square().mean().backward()\n"
    "    optimizer.step()\n"
    "    say()\n"
)

OWN = (
    "class Own(torch.optim.Optimizer):\n"
    "    def __init__(self, weights):\n"
    "        super().__init__(weights, {})\n"
    "    @torch.no_grad()\n"
    "    def step(self, closure=None):\n"
    "        for group in self.param_groups:\n"
    "            for weight in group['params']:\n"
    "                weight -= 0.1 * weight.grad\n"
    "optimizer = Own(net.parameters())\n"
)


def test_the_mode_rests_during_a_step(run_here: RunHere) -> None:
    """It is back when the step has ended."""
    ran = run_here(HEAD + "optimizer = torch.optim.Adam(net.parameters())\n" + TRAIN)
    assert (ran.status, ran.out.split()) == (0, ["0", "1"] * 2)


def test_an_own_step_is_looked_at(run_here: RunHere) -> None:
    """A step that the script has written itself runs as before."""
    ran = run_here(HEAD + OWN + TRAIN)
    assert (ran.status, ran.out.split()) == (0, ["1", "1"] * 2)


def test_a_closure_is_looked_at(run_here: RunHere) -> None:
    """What it computes is a part of the script."""
    text = (
        "optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)\n"
        "optimizer.register_step_pre_hook(say)\n"
        "def closure():\n"
        "    optimizer.zero_grad()\n"
        "    loss = net(x).square().mean()\n"
        "    loss.backward()\n"
        "    torch.zeros(1).log().item()\n"
        "    return loss\n"
        "optimizer.step(closure)\n"
    )
    ran = run_here(HEAD + text)
    assert ran.out.split() == ["1"]
    assert "log made -inf (script.py:14)" in ran.err


@pytest.mark.parametrize("mode", ["", "with torch.device('cpu'):\n    "])
def test_a_loss_after_a_step_that_raised_is_followed(run_here: RunHere, mode: str) -> None:
    """A hook of the script raises, and the script goes on."""
    text = (
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "def fail(*given):\n"
        "    raise KeyError('mine')\n"
        "hook = optimizer.register_step_pre_hook(fail)\n"
        "net(x).sum().backward()\n"
        "try:\n"
        "    optimizer.step()\n"
        "except KeyError:\n"
        "    hook.remove()\n"
        "out = net(x)\n"
        f"{mode}(out - out).log().sum().backward()\n"
    )
    ran = run_here(HEAD + text)
    assert ran.status == 3
    assert "log made -inf (script.py:" in ran.err or "log made inf (script.py:" in ran.err


def test_a_compiled_step_keeps_its_modes(run_here: RunHere) -> None:
    """TorchDynamo has guards on the stack of modes."""
    text = (
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "step = torch.compile(optimizer.step, backend='eager')\n"
        "for _ in range(3):\n"
        "    optimizer.zero_grad()\n"
        "    net(x).square().mean().backward()\n"
        "    step()\n"
        "    say()\n"
    )
    ran = run_here(HEAD + text)
    assert (ran.status, ran.out.split()) == (0, ["1"] * 3)


def test_weights_that_turn_bad_in_a_step_are_told(run_here: RunHere) -> None:
    """The guard looks at them after the step."""
    text = (
        "optimizer = torch.optim.SGD(net.parameters(), 1e38)\n"
        "net(x * 1e10).sum().backward()\n"
        "optimizer.step()\n"
    )
    ran = run_here(HEAD + text)
    assert ran.status == 3
    assert "SGD's step made weight weight inf" in ran.err
