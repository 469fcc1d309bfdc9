"""Plain operations of a loss that C has run: what is written down of them is what Python writes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from fxguard.batch import loss as losses
from fxguard.batch.loss import Loss
from fxguard.batch.plain_operations import LossBatch
from fxguard.errors import FxguardError
from fxguard.measure import native

pytestmark = pytest.mark.skipif(
    native.bind_losses is None, reason="the C extension is not built, or was built before"
)

RunHere = Callable[[str], Any]

HEAD = (
    "import torch\n"
    "from torch import nn\n"
    "from torch.nn import functional as F\n"
    "torch.manual_seed(0)\n"
    "net = nn.Linear(5, 3)\n"
    "x, y = torch.randn(4, 5), torch.tensor([0, 2, 1, 1])\n"
    "out = net(x)\n"
)

# What follows that; `loss` is what the backward begins with.
PROGRAMS = {
    "a policy": (
        "drawn = torch.distributions.Categorical(logits=out)\n"
        "loss = -drawn.log_prob(drawn.sample()).sum() - 0.01 * drawn.entropy().sum()\n"
    ),
    "lists, keywords and numbers": (
        "logits = out - out.logsumexp(dim=-1, keepdim=True)\n"
        "p = F.softmax(input=logits, dim=-1)\n"
        "both = torch.stack([p, 1 - p], dim=0) + torch.cat(tensors=(p[None], p[None]))\n"
        "loss = both.clamp(min=0.1, max=torch.tensor(2.0)).mean() + (out * out).sum() / 4\n"
    ),
    "moves": (
        "z = out.reshape(-1).view(3, 4).t().contiguous().to(torch.float64).double()\n"
        "loss = z.squeeze().expand(4, 3).float().sum()\n"
    ),
    "several results": (
        "one, two = torch.broadcast_tensors(out, out[:1])\n"
        "values, places = out.max(dim=1)\n"
        "rows = out.unbind(0)\n"
        "parts = list(out.split([1, 2], dim=1))\n"
        "only, = out.chunk(1)\n"
        "loss = (one * two).sum() + values.sum() + rows[1].sum() + parts[1].mean() + only.sum()\n"
        "loss = loss + out.gather(1, places[:, None]).sum()\n"
    ),
    "what is drawn": (
        "p = out.sigmoid()\n"
        "taken = torch.bernoulli(p.detach()) + torch.poisson(p.detach())\n"
        "places = torch.multinomial(p.detach(), 1)\n"
        "loss = (p * taken).sum() + p.gather(1, places).sum() + F.dropout(p, 0.5).sum()\n"
    ),
    "weights and leaves": (
        "scale = torch.ones(3, requires_grad=True)\n"
        "loss = (out * scale.exp()).sum() + net.weight.square().sum() + net.bias.abs().sum()\n"
    ),
    "integers and masks": (
        "right = out.argmax(1) == y\n"
        "weight = torch.tensor([1.0, 2.0, 0.5])\n"
        "loss = torch.where(right, out.mean(1), out.sum(1)).mean()\n"
        "loss = loss + F.cross_entropy(out, y, weight=weight) + right.float().mean() + y.sum()\n"
    ),
    "writes between": (
        "z = out * 2\n"
        "z[0] = 3.0\n"
        "z.add_(out).mul_(0.5)\n"
        "kept = torch.zeros(4, 3)\n"
        "kept += out.square()\n"
        "loss = z.detach().sum() + (z * kept).sum()\n"
    ),
    "a function": (
        "class Mine(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        return x * 2\n"
        "    @staticmethod\n"
        "    def backward(ctx, g):\n"
        "        return g * 2\n"
        "loss = (Mine.apply(out * 3) + 1).square().sum()\n"
    ),
    "many operands": "loss = torch.stack([out * i for i in range(20)]).sum()\n",
    "complex numbers": (
        "loss = torch.complex(out, out).abs().sum() + torch.fft.fft(out).real.sum()\n"
    ),
    "without gradients": (
        "with torch.no_grad():\n"
        "    scale = out.abs().max() + 1\n"
        "with torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "    low = out @ torch.ones(3, 2)\n"
        "loss = (out / scale).half().float().mean() + low.float().sum()\n"
    ),
    "a module of the model": "loss = net(x * 2).sum() + F.linear(x, net.weight, net.bias).sum()\n",
    "a scaler": (
        "scaler = torch.amp.GradScaler('cpu')\nloss = scaler.scale(out.square().mean())\n"
    ),
    "twice": (
        "out.square().sum().backward(retain_graph=True)\n"
        "out = net(x)\n"
        "loss = (out * 2).tanh().sum()\n"
    ),
    "many values": "loss = out\nfor i in range(300):\n    loss = loss * 0.99\nloss = loss.sum()\n",
}

BAD = {
    "in the forward": "loss = (out - out).log().mean()\n",
    "in one of several results": (
        "loss = torch.stack(((out - out).log(), out)).unbind(0)[0].sum()\n"
    ),
    "infinities that are meant": (
        "loss = out.masked_fill(y[:, None] == 1, float('-inf')).softmax(0).nan_to_num().sum()\n"
    ),
    "in the backward": "loss = (out - out).abs().sqrt().sum() + out.square().mean()\n",
    "beside it": "loss = (out * (torch.zeros(3) / torch.zeros(3))).sum()\n",
    "a function of numbers": "loss = out.mean() * float((out - out).sum().log())\n",
    "an operation that raises": "loss = (out * 2) @ out\n",
    "one that raises because of NaN": (
        "loss = torch.linalg.cholesky(torch.full((2, 2), float('nan')) * out[0, 0]).sum()\n"
    ),
}


def heard(text: str, run_here: RunHere, monkeypatch: pytest.MonkeyPatch, form: str) -> Any:
    """What batch and tape of a loss hold when the last backward begins, and how the script ends."""
    found: dict[str, Any] = {}
    begins, follows = Loss.backward_comes, Loss.followed

    def hear(self: Loss, roots: Any) -> None:
        batch = self.batch
        found["events"] = list(batch.events)
        found["values"], found["pairs"] = list(batch.values), repr(batch.pairs)
        found["root"] = [batch.live.key_of(root) for root in roots]
        found["autocast"], found["scalers"] = batch.autocast, len(self.scalers)
        found["gaps"] = self.tape.has_noted
        made = [value for x in roots if (value := self.tape.value_of(x)) is not None]
        for each in (*made, *(value.call for value in made)):
            assert all(hasattr(each, part.name) for part in dataclasses.fields(each))
        found["at nodes"] = [self.tape.value_at(x.grad_fn, x.output_nr) is not None for x in roots]
        with contextlib.suppress(FxguardError):  # an input was written
            run, _ = self.tape.run(made)
            found["tape"] = run.graph_module.code, [tuple(x.shape) for x in run.args or ()]
            found["lines"] = [each.meta.get("stack_trace") for each in run.graph_module.graph.nodes]
        begins(self, roots)

    with monkeypatch.context() as patch:
        patch.setattr(Loss, "backward_comes", hear)
        if form != "C":
            patch.setattr(Loss, "followed", lambda *args: follows(*args)[:3])
        if form == "full":
            patch.setattr(losses, "is_plain", lambda func: False)
        ran = run_here(HEAD + text + "loss.backward()\nprint(net.weight.grad, torch.rand(2))\n")
    return found, ran.status, ran.out, ran.err


@pytest.mark.parametrize("form", ["Python", "full"])
@pytest.mark.parametrize("name", [*PROGRAMS, *BAD])
def test_c_writes_what_python_writes(
    name: str, form: str, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events, values, magnitudes, what runs again, what is printed, and how it ends."""
    text = (PROGRAMS | BAD)[name]
    in_c = heard(text, run_here, monkeypatch, "C")
    assert in_c == heard(text, run_here, monkeypatch, form)
    assert in_c[1] == (0 if name in PROGRAMS or name == "infinities that are meant" else in_c[1])


def test_python_runs_none_of_a_policy(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """All operations of its loss are plain, or draw, or make two tensors, and C runs them."""
    seen: list[Any] = []
    observe = Loss.observe
    monkeypatch.setattr(Loss, "observe", lambda *args: seen.append(args[1]) or observe(*args))
    assert run_here(HEAD + PROGRAMS["a policy"] + "loss.backward()\n").status == 0
    assert seen == []
    assert run_here(HEAD + "loss = out.mul_(2).sum()\nloss.backward()\n").status == 0
    assert len(seen) == 1


def test_what_is_dropped_is_gone(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is never differentiated keeps no tensor, however long it goes on."""
    sizes: list[int] = []
    keep = Loss._keep

    def kept(self: Loss, wanted: Any) -> None:
        sizes.append(len(self.batch.pairs))
        keep(self, wanted)

    monkeypatch.setattr(Loss, "_keep", kept)
    text = (
        "import gc, weakref\n"
        "gc.disable(), gc.collect(), gc.freeze()\n"  # a collection looks at what is new alone
        "for _ in range(200):\n"
        "    out = net(x)\n"
        "    middle = out.square() + torch.ones(4, 1)\n"
        "    one, two = torch.broadcast_tensors(middle, middle[:1])\n"
        "    gone = [weakref.ref(each) for each in (out, middle, one, two)]\n"
        "    del out, middle, one, two\n"
        "    gc.enable(), gc.collect(), gc.disable()\n"
        "    print(sum(each() is not None for each in gone))\n"
        "gc.enable(), gc.unfreeze()\n"
    )
    ran = run_here(HEAD + text)
    assert ran.status == 0, ran.err
    assert set(ran.out.split()) == {"0"}
    assert sizes
    assert max(sizes) < 1000


def test_a_batch_that_is_asked_for_its_events_goes_on(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written down in brief has become events, and what comes then is added to them."""
    seen: list[int] = []

    def module_begins(self: Loss, module: Any) -> None:
        seen.append(len(self.batch.events))

    monkeypatch.setattr(Loss, "module_begins", module_begins)
    text = "loss = nn.Tanh()(out * 2)\nloss = nn.Tanh()(loss + 1).sum()\nloss.backward()\n"
    assert run_here(HEAD + text).status == 0
    assert seen[-1] > seen[0]


def test_a_fine_loss_is_not_read(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers are known to be finite before anything is made of them."""
    read: list[Any] = []
    reads = Loss.read

    def hear(self: Loss, *, given: bool = False) -> Any:
        read.append(self)
        return reads(self, given=given)

    monkeypatch.setattr(Loss, "read", hear)
    assert run_here(HEAD + PROGRAMS["a policy"] + "loss.backward()\n").status == 0
    assert read == []
    assert run_here(HEAD + BAD["in the forward"] + "loss.backward()\n").status == 3
    assert read


def test_types_have_to_fit() -> None:
    """What C is given is looked at."""
    assert native.bind_losses is not None
    with pytest.raises(TypeError):
        native.bind_losses(LossBatch)
