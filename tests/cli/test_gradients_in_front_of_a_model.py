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


# The same where no model takes part, or only its weights do.
APART = {
    "a penalty of a model's weights before its loss": (
        "nn.init.zeros_(net[0].bias)\n"
        "penalty = net[0].bias.pow(2).sum().sqrt()\n"
        "(net(torch.rand(8, 4)).mean() + penalty).backward()\n",
        8,
    ),
    "a penalty of a model's weights with a backward of its own": (
        "nn.init.zeros_(net[0].bias)\n"
        "net(torch.rand(8, 4)).mean().backward()\n"
        "net[0].bias.grad = None\n"
        "net[0].bias.pow(2).sum().sqrt().backward()\n",
        10,
    ),
    "a second backward": (
        "loss = net(torch.rand(8, 4) + z).mean()\n"
        "penalty = (z * z).sqrt().sum()\n"
        "loss.backward()\n"
        "penalty.backward()\n",
        8,
    ),
    "a closure of a step": (
        "opt = torch.optim.LBFGS([z])\n"
        "def closure():\n"
        "    opt.zero_grad()\n"
        "    loss = ((z * z).sqrt() - 1).pow(2).sum()\n"
        "    loss.backward()\n"
        "    return loss\n"
        "opt.step(closure)\n",
        10,
    ),
    "a closure by its name": (
        "opt = torch.optim.SGD([z], 0.1)\n"
        "def closure():\n"
        "    loss = ((z * z).sqrt() - 1).pow(2).sum()\n"
        "    loss.backward()\n"
        "    return loss\n"
        "opt.step(closure=closure)\n",
        9,
    ),
    "written to a part of a tensor": (
        "s = torch.ones(4)\n"
        "s[:2] = (z[:2] * z[:2]).sqrt()\n"
        "net(torch.rand(8, 4) * s).mean().backward()\n",
        8,
    ),
    "outputs of a model that fill a tensor": (
        "for layer in (net[0], net[2]):\n"
        "    nn.init.zeros_(layer.weight)\n"
        "    nn.init.zeros_(layer.bias)\n"
        "out = torch.zeros(3)\n"
        "for t in range(3):\n"
        "    out[t] = net(torch.rand(4)).pow(2).sqrt()[0]\n"
        "(out - 1).pow(2).mean().backward()\n",
        12,
    ),
    "beside a branch that is not taken and is NaN": (
        "x = torch.tensor([0.0, 1.0])\n"
        "w = torch.ones(2, requires_grad=True)\n"
        "r = torch.where(x > 0, x / x, 1.0)\n"
        "s = (w * 0 * r).sqrt()\n"
        "s.sum().backward()\n",
        10,
    ),
}


SQUARE = (
    "class Square(torch.autograd.Function):\n"
    "    @staticmethod\n"
    "    def forward(ctx, x):\n"
    "        ctx.save_for_backward(x)\n"
    "        return x * x\n"
    "    @staticmethod\n"
    "    def backward(ctx, g):\n"
    "        (x,) = ctx.saved_tensors\n"
    "        return g * 2 * x / (x - x)\n"
)


@pytest.mark.parametrize("step", ["", "torch.optim.SGD([z], 0.1).step()\n"])
def test_a_backward_of_the_scripts_own_is_not_passed_over(run_here: RunHere, step: str) -> None:
    """Nobody sees inside; that the gradient is bad is said all the same, and where it came from."""
    ran = run_here(
        HEAD + SQUARE + f"net(torch.rand(8, 4) * Square.apply(z + 1)).mean().backward()\n{step}"
    )
    assert ran.status == 3
    first, why, *_ = ran.err.splitlines()
    assert first.startswith("gradient of z is ")
    assert "Square, an autograd function of the script, computes its own backward" in why


@pytest.mark.parametrize("name", WRONG | APART)
def test_the_operation_of_the_script_is_named(run_here: RunHere, name: str) -> None:
    """Wherever the backward begins, and also where it reaches parameters that no model has."""
    text, line = (WRONG | APART)[name]
    ran = run_here(HEAD + text)
    assert ran.status == 3
    first, place, *_ = ran.err.splitlines()
    assert first.startswith("backward of sqrt made "), ran.err
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
    "a closure": "opt = torch.optim.LBFGS([z], max_iter=5)\n"
    "calls = []\n"
    "def closure():\n"
    "    opt.zero_grad()\n"
    "    loss = (z - 1).pow(2).sum()\n"
    "    loss.backward()\n"
    "    calls.append(loss.item())\n"
    "    return loss\n"
    "print(opt.step(closure).item(), calls, z.tolist())\n",
    "a step that is skipped": "opt = torch.optim.SGD([z], 0.1)\n"
    "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**120)\n"
    "for i in range(3):\n"
    "    loss = (net(torch.rand(8, 4) * (z + 1)).mean() * 1e6) ** 2\n"
    "    opt.zero_grad()\n"
    "    scaler.scale(loss).backward()\n"
    "    scaler.step(opt)\n"
    "    scaler.update()\n"
    "print(z.tolist(), scaler.get_scale())\n",
    "gradients that are put right before the step": SQUARE + "opt = torch.optim.SGD([z], 0.1)\n"
    "for i in range(2):\n"
    "    big = net(torch.rand(8, 4) * Square.apply(z + 1)).mean()\n"
    "    opt.zero_grad()\n"
    "    big.backward()\n"
    "    print(z.grad.isfinite().any().item())\n"
    "    z.grad.nan_to_num_(0.0, 0.0, 0.0)\n"
    "    opt.step()\n"
    "print(z.tolist())\n",
    "a tensor that is filled": "out = torch.zeros(3)\n"
    "for t in range(3):\n"
    "    out[t] = net(torch.rand(4))[0] * (z + 1).sum()\n"
    "out.mean().backward()\n"
    "print(z.grad.tolist())\n",
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


STEPS = {
    "an eps that the dtype does not hold": (
        "codes = (0.1 * torch.randn(3, 4)).half().requires_grad_()\n"
        "opt = torch.optim.Adam([codes])\n"
        "net(codes[:2].float()).mean().backward()\n"
        "opt.step()\n",
        "Adam's step made parameter `codes` NaN: division by zero",
    ),
    "a rate that is too large": (
        "theta = torch.ones(3, requires_grad=True)\n"
        "opt = torch.optim.SGD([theta], lr=1e30)\n"
        "for i in range(3):\n"
        "    opt.zero_grad()\n"
        "    (theta * 1e10).sum().backward()\n"
        "    opt.step()\n",
        "SGD's step made parameter `theta` -inf: overflow",
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_what_no_model_has(run_here: RunHere, name: str) -> None:
    """The optimizer is named where it was given finite gradients."""
    text, verdict = STEPS[name]
    ran = run_here(HEAD + text)
    assert ran.status == 3
    assert ran.err.splitlines()[0] == verdict


def test_a_tensor_that_is_gone_leaves_no_name(ends_as_ever: EndsAsEver) -> None:
    """Its place in memory may be that of another one."""
    ends_as_ever(
        HEAD + "import gc, weakref\n"
        "for i in range(3):\n"
        "    w = torch.ones(3, requires_grad=True)\n"
        "    opt = torch.optim.SGD([w], lr=0.1)\n"
        "    (w * 2).sum().backward()\n"
        "    opt.step()\n"
        "    print(w.tolist())\n"
        "    reference = weakref.ref(w)\n"
        "    del w, opt\n"
        "    gc.collect()\n"
        "    print(reference() is None)\n"
    )
