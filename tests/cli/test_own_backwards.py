"""``fxguard run`` of scripts whose autograd functions make bad numbers in their own backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

# On a GPU the engine calls them in a thread of its own, where nobody looks.
pytestmark = [
    pytest.mark.usefixtures("form_of_operations"),
    pytest.mark.parametrize("form_of_operations", ["C", "Python"], indirect=True),
]

RunHere = Callable[[str], Any]

HEAD = "import torch\ntorch.manual_seed(0)\n"
LOG = (
    "class Log(torch.autograd.Function):\n"
    "    @staticmethod\n"
    "    def forward(ctx, x):\n"
    "        ctx.save_for_backward(x)\n"
    "        return torch.log(x.clamp(min=1e-7))\n"
    "    @staticmethod\n"
    "    def backward(ctx, grad):\n"
    "        (x,) = ctx.saved_tensors\n"
    "        return grad / x\n"
)
FIRST = "div made NaN (script.py:11): 0 / 0"  # of Log's backward

# Where the function stands, and the loss's gradient of 0 that the division makes NaN of.
WRONG = {
    "no model": (
        "w = torch.tensor([0.0, 1.0], requires_grad=True)\n"
        "loss = (torch.tensor([0.0, 1.0]) * Log.apply(w)).sum()\n"
        "loss.backward()\n"
    ),
    "an optimizer": (
        "w = torch.tensor([0.0, 1.0], requires_grad=True)\n"
        "opt = torch.optim.SGD([w], 0.1)\n"
        "loss = (torch.tensor([0.0, 1.0]) * Log.apply(w)).sum()\n"
        "loss.backward()\nopt.step()\n"
    ),
    "torch.autograd.grad": (
        "w = torch.tensor([0.0, 1.0], requires_grad=True)\n"
        "loss = (torch.tensor([0.0, 1.0]) * Log.apply(w)).sum()\n"
        "(g,) = torch.autograd.grad(loss, w)\nprint(g.sum().item())\n"
    ),
    "in the loss of a model": (
        "net = torch.nn.Linear(2, 2)\n"
        "with torch.no_grad():\n    net.weight.zero_()\n    net.bias.zero_()\n"
        "loss = (torch.zeros(3, 2) * Log.apply(net(torch.ones(3, 2)))).sum()\n"
        "loss.backward()\n"
        "torch.optim.SGD(net.parameters(), 0.1).step()\n"
    ),
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_the_operation_is_named(run_here: RunHere, text: str) -> None:
    """And not that it is not known, nor the loss that the gradient came from."""
    ran = run_here(f"{HEAD}{LOG}{text}")
    assert ran.status == 3
    assert ran.err.startswith(FIRST), ran.err
    assert "fix: choose the divisor by where(x == 0, 1, x)" in ran.err
    assert "in its own backward" in ran.err


def test_an_overflow_in_a_backward(run_here: RunHere) -> None:
    """It became NaN on the way to the leaf."""
    text = (
        "class Softplus(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        ctx.save_for_backward(x)\n"
        "        return torch.where(x > 30, x, torch.log1p(torch.exp(x.clamp(max=30))))\n"
        "    @staticmethod\n"
        "    def backward(ctx, grad):\n"
        "        (x,) = ctx.saved_tensors\n"
        "        e = torch.exp(x)\n"
        "        return grad * e / (1 + e)\n"
        "w = torch.tensor([1.0, 99.0], requires_grad=True)\n"
        "Softplus.apply(w).sum().backward()\n"
        "torch.optim.SGD([w], 0.1).step()\n"
    )
    err = run_here(HEAD + text).err
    assert err.startswith("exp made inf (script.py:11): overflow"), err
    assert "sigmoid(x)" in err


# What is bad there, and led to no bad gradient; or was bad before.
HEALTHY = {
    "a mask that is meant": (
        "class Pick(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        return x * 2\n"
        "    @staticmethod\n"
        "    def backward(ctx, grad):\n"
        "        scores = torch.zeros(2).masked_fill(torch.tensor([True, False]), float('-inf'))\n"
        "        return grad * scores.softmax(0)\n"
        "w = torch.ones(2, requires_grad=True)\n"
        "Pick.apply(w).sum().backward()\nprint(w.grad.sum().item())\n"
    ),
    "gradients that are fine": (
        f"{LOG}w = torch.ones(2, requires_grad=True)\n"
        "Log.apply(w).sum().backward()\nprint(w.grad.sum().item())\n"
    ),
    "a gradient that is replaced": (
        "class Safe(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        ctx.save_for_backward(x)\n"
        "        return x.abs().sqrt()\n"
        "    @staticmethod\n"
        "    def backward(ctx, grad):\n"
        "        (x,) = ctx.saved_tensors\n"
        "        return torch.nan_to_num(grad * 0.5 * x / x.abs() ** 1.5)\n"
        "w = torch.tensor([0.0, 1.0], requires_grad=True)\n"
        "Safe.apply(w).sum().backward()\nprint(w.grad.sum().item())\n"
    ),
}


@pytest.mark.parametrize("text", HEALTHY.values(), ids=HEALTHY)
def test_nothing_is_said_of_what_is_fine(ends_as_ever: Callable[[str], str], text: str) -> None:
    err = ends_as_ever(HEAD + text)
    assert "nothing found" in err, err


def test_what_a_backward_was_given_is_not_its_fault(run_here: RunHere) -> None:
    text = (
        "w = torch.ones(2, requires_grad=True)\n"
        "y = Log.apply(w)\n"
        "z = (y * 0.0).sqrt().sum()\n"  # log(1) is 0: the gradient of its root is inf
        "z.backward()\n"
        "torch.optim.SGD([w], 0.1).step()\n"
    )
    err = run_here(f"{HEAD}{LOG}{text}").err
    assert "script.py:11" not in err.splitlines()[0], err


def test_gradients_are_those_without_fxguard(ends_as_ever: Callable[[str], str]) -> None:
    """Of functions in functions, differentiated twice, and with hooks."""
    text = (
        "w = torch.rand(4, requires_grad=True)\n"
        "seen = []\n"
        "w.register_hook(lambda g: seen.append(g.sum().item()))\n"
        "y = Log.apply(w * Log.apply(w + 1))\n"
        "(g,) = torch.autograd.grad(y.sum(), w, create_graph=True)\n"
        "(g ** 2).sum().backward()\n"
        "print([x.hex() for x in w.grad.tolist()], seen)\n"
    )
    assert "nothing found" in ends_as_ever(f"{HEAD}{LOG}{text}")


def test_errors_of_a_backward_come_as_they_are(run_here: RunHere) -> None:
    text = (
        "class Wrong(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        return x * 1\n"
        "    @staticmethod\n"
        "    def backward(ctx, grad):\n"
        "        raise KeyError('mine')\n"
        "w = torch.ones(1, requires_grad=True)\n"
        "try:\n    Wrong.apply(w).backward()\n"
        "except KeyError as error:\n    print(error)\n"
    )
    assert run_here(HEAD + text).out == "'mine'\n"
