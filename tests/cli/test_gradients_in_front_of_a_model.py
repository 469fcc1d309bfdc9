"""``fxguard run`` of scripts whose own operations, in front of a model, get bad gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("form_of_operations")

RunHere = Callable[[str], Any]
EndsAsEver = Callable[[str], str]

HEAD = (
    "import torch\nfrom torch import nn\nfrom torch.func import functional_call\n"
    "torch.manual_seed(0)\n"
    "net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))\n"
    "z = nn.Parameter(torch.zeros(4))\n"
)

# What is wrong, and the line of the root whose derivative is infinite.
WRONG = {
    "an argument": (
        "s = (z * z).sqrt() + 1.0\nnet(torch.rand(8, 4) * s).mean().backward()\n",
        7,
    ),
    "after healthy steps": (
        "with torch.no_grad():\n"
        "    z += 1\n"
        "for i in range(3):\n"
        "    s = (z * z).sqrt() + 1.0\n"
        "    net(torch.rand(8, 4) * s).mean().backward()\n"
        "    with torch.no_grad():\n"
        "        z -= 0.5\n"
        "    z.grad = None\n",
        10,
    ),
    "a tensor that the model holds": (
        "class Scaled(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = nn.Linear(4, 4)\n"
        "        self.scale = None\n"
        "    def forward(self, x):\n"
        "        return self.inner(x) * self.scale\n"
        "net = Scaled()\n"
        "net.scale = (z * z).sqrt() + 1.0\n"
        "net(torch.rand(8, 4)).mean().backward()\n",
        15,
    ),
    "a tensor of the script that the model's code finds": (
        "class Scaled(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) * scale\n"
        "net = Scaled(4, 4)\n"
        "scale = (z * z).sqrt() + 1.0\n"
        "net(torch.rand(8, 4)).mean().backward()\n",
        11,
    ),
    "weights made by another model": (
        "hyper = nn.Linear(3, 16)\n"
        "nn.init.zeros_(hyper.weight)\n"
        "nn.init.zeros_(hyper.bias)\n"
        "net = nn.Linear(4, 4)\n"
        "del net._parameters['weight']\n"
        "w = hyper(torch.rand(3)).view(4, 4)\n"
        "net.weight = w / (w.square().sum(1, keepdim=True).sqrt() + 1e-6)\n"
        "net(torch.rand(8, 4)).mean().backward()\n",
        13,
    ),
    "a penalty of the script": (
        "penalty = (z * z).sum().sqrt()\n"
        "loss = net(torch.rand(8, 4) + z).mean() + 0.01 * penalty\n"
        "loss.backward()\n",
        7,
    ),
    "a gradient that is asked for": (
        "s = (z * z).sqrt() + 1.0\n"
        "loss = net(torch.rand(8, 4) * s).mean()\n"
        "(g,) = torch.autograd.grad(loss, z)\n",
        7,
    ),
    "a gradient that is differentiated": (
        "x = torch.zeros(8, 4, requires_grad=True)\n"
        "r = (x * x).sqrt()\n"
        "(g,) = torch.autograd.grad(net(r).sum(), x, create_graph=True)\n"
        "g.square().mean().backward()\n",
        8,
    ),
    "a step inside a step": (
        "x, y = torch.rand(8, 4), torch.rand(8, 1)\n"
        "params = dict(net.named_parameters())\n"
        "for _ in range(2):\n"
        "    inner = (functional_call(net, params, (x,)) - y).square().mean()\n"
        "    grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)\n"
        "    pairs = zip(params.items(), grads)\n"
        "    params = {k: p - 0.1 * g / ((g * g).sqrt() + 1e-6) for (k, p), g in pairs}\n"
        "(functional_call(net, params, (x,)) - y).square().mean().backward()\n",
        13,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_operation_of_the_script_is_named(run_here: RunHere, name: str) -> None:
    """Its gradients come from the model, and reach parameters that no model has."""
    text, line = WRONG[name]
    ran = run_here(HEAD + text)
    assert ran.status == 3
    first, place, *_ = ran.err.splitlines()
    assert first.startswith("backward of sqrt made ")
    assert place.strip().startswith(f"script.py:{line}: ")


def test_a_fix_is_run_at_each_run_of_its_line(run_here: RunHere) -> None:
    """The line computes each weight: whoever changes it changes them all."""
    ran = run_here(HEAD + WRONG["a step inside a step"][0])
    fix = next(line for line in ran.err.splitlines() if "fix: " in line)
    assert fix.endswith("a step are finite")


def test_what_the_model_itself_made_is_blamed_on_it(run_here: RunHere) -> None:
    """A gradient that comes bad to what the script computed is not of its making."""
    ran = run_here(
        HEAD + "class Root(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.gain = nn.Parameter(torch.ones(4))\n"
        "    def forward(self, x):\n"
        "        return (x * self.gain).sqrt()\n"
        "s = z.exp() - 1\n"
        "Root()(s).sum().backward()\n"
    )
    assert ran.status == 3
    assert ran.err.splitlines()[1].strip().startswith("script.py:12: ")


RIGHT = {
    "a learned scale": "opt = torch.optim.SGD([z, *net.parameters()], lr=0.1)\n"
    "for i in range(3):\n"
    "    s = (z * z + 1e-12).sqrt() + 1.0\n"
    "    loss = net(torch.rand(8, 4) * s).mean() + 0.1 * z.norm()\n"
    "    opt.zero_grad(); loss.backward(); opt.step()\n"
    "    print(loss.item(), torch.rand(1).item())\n",
    "a bad gradient that is put right": "s = (z * z).sqrt() + 1.0\n"
    "s.register_hook(lambda g: g * 0 + 1)\n"
    "z.register_hook(lambda g: g.nan_to_num(0.0, 0.0, 0.0))\n"
    "net(torch.rand(8, 4) * s).mean().backward()\n"
    "print(z.grad.tolist())\n",
    "an adversary": "x = torch.rand(8, 4, requires_grad=True)\n"
    "for i in range(3):\n"
    "    loss = net(x * 2 + z).sum()\n"
    "    (g,) = torch.autograd.grad(loss, x)\n"
    "    x = (x + 0.1 * g.sign()).detach().requires_grad_()\n"
    "print(x.sum().item())\n",
    "a retained graph": "s = (z + 1).sqrt()\n"
    "loss = net(torch.rand(8, 4) * s).mean()\n"
    "loss.backward(retain_graph=True)\n"
    "loss.backward()\n"
    "print(z.grad.tolist())\n",
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_script_that_is_right_ends_as_ever(ends_as_ever: EndsAsEver, name: str) -> None:
    """With the same numbers and the same random numbers."""
    assert "nothing found" in ends_as_ever(HEAD + RIGHT[name])


def test_nothing_is_kept_of_what_a_model_has_read(ends_as_ever: EndsAsEver) -> None:
    """What a script has computed in front of it is gone with the script's own names."""
    ends_as_ever(
        HEAD + "import gc, weakref\n"
        "class Held:\n"
        "    pass\n"
        "for i in range(3):\n"
        "    s = (z + 1).sqrt()\n"
        "    s.grad_fn.metadata['held'] = held = Held()\n"
        "    loss = net(torch.rand(8, 4) * s).mean()\n"
        "    loss.backward()\n"
        "    reference = weakref.ref(held)\n"
        "    del s, loss, held\n"
        "    print(reference() is None)\n"
    )
