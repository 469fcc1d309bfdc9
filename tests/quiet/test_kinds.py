"""Each kind of quiet fault, and what looks like it and is right."""

from __future__ import annotations

import copy
import linecache
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import fxguard
from fxguard.types import QuietFault

STEPS = 50
ROWS = 16


class Net(nn.Module):
    def __init__(self, out: int = 1, p: float = 0.0) -> None:
        super().__init__()
        self.up, self.drop, self.head = nn.Linear(4, 8), nn.Dropout(p), nn.Linear(8, out)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.drop(torch.relu(self.up(x))))
        return found


@dataclass
class Case:
    """A model, its loss, and what a step of its training does."""

    model: nn.Module
    loss: Callable[[nn.Module, Tensor], Tensor]
    optimizer: Callable[[nn.Module], Optimizer] = lambda model: SGD(model.parameters(), 0.01)
    zeroes: bool = True
    after: Callable[[int, nn.Module], object] = field(default=lambda step, model: None)
    before: Callable[[int, nn.Module], object] = field(default=lambda step, model: None)


def faults_of(case: Case, steps: int = STEPS, *, compiles: bool = False) -> list[QuietFault]:
    torch.manual_seed(0)
    optimizer = case.optimizer(case.model)
    model: Any = torch.compile(case.model, backend="aot_eager") if compiles else case.model
    with fxguard.watch(case.model) as guard:
        for step in range(steps):
            case.before(step, case.model)
            if case.zeroes:
                optimizer.zero_grad()
            case.loss(model, torch.randn(ROWS, 4)).backward()
            optimizer.step()
            case.after(step, model)
    return guard.quiet_faults


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(1, keepdim=True)).pow(2).mean()


def classes(model: nn.Module, x: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), (x[:, 0] > 0).long())


def evaluate(step: int, model: nn.Module) -> None:
    """A validation that forgets to go back to training."""
    if step == 10:
        model.eval()
        with torch.no_grad():
            model(torch.randn(ROWS, 4))


# Evaluation mode in training.


def evaluate_first(step: int, model: nn.Module) -> None:
    if step == 0:
        evaluate(10, model)


def back(step: int, model: nn.Module) -> None:
    evaluate(step, model)
    model.train()


def frozen_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model[1].eval()
    return model


# Dropout in evaluation.


class AlwaysDrops(Net):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(functional.dropout(torch.relu(self.up(x)), 0.1))
        return found


class DropsOnPurpose(Net):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(functional.dropout(self.up(x), 0.1, training=True))
        return found


class DropsFromAList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drops = [nn.Dropout(0.1)]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.drops[0](torch.relu(self.up(x))))
        return found


class DropsAttention(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)[:, None]
        found: Tensor = self.head(
            functional.scaled_dot_product_attention(h, h, h, dropout_p=0.1)[:, 0]
        )
        return found


def validate(step: int, model: nn.Module) -> None:
    if step % 20 == 19:
        model.eval()
        with torch.no_grad():
            model(torch.randn(ROWS, 4))
        model.train()


def sample(step: int, model: nn.Module) -> None:
    """Monte Carlo dropout: evaluation mode, but for the dropout."""
    if step % 20 == 19:
        model.eval()
        for each in model.modules():
            if isinstance(each, nn.Dropout):
                each.train()
        with torch.no_grad():
            model(torch.randn(ROWS, 4))
        model.train()


# Never moves.


class Unread(Net):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)


class Detached(Net):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.relu(self.up(x)).detach())
        return found


class Unrecorded(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.relu(self.up(x))
        found: Tensor = self.head(h)
        return found


class TwoZeros(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(8, 2)), nn.Parameter(torch.zeros(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        found: Tensor = self.head(h + h @ self.a @ self.b)
        return found


class Unheard(Net):
    """A branch whose result is multiplied by 0."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x) + 0 * self.branch(x)
        return found


def decaying(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), 1e-2, weight_decay=0.1)


class OneZero(TwoZeros):
    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.a)


class Target(nn.Module):
    """A target network that is not updated yet."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.target = copy.deepcopy(self.online)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.target(x)
        found: Tensor = self.online(x) + 0.1 * wanted
        return found


class Late(Net):
    """A second head, which is used from step 45 on."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.is_on = nn.Linear(4, 1), False

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found + self.late(x) if self.is_on else found


def switch_on(step: int, model: nn.Module) -> None:
    model.is_on = step >= 45


class Teacher(Net):
    """Reads weights that the optimizer does not hold, without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.relu(self.up(x))
        found: Tensor = self.head(h)
        return found


class Experts(nn.Module):
    """One of four experts is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = sum(self.experts[i](x) for i in range(3))
        return found


def frozen() -> nn.Module:
    model = Net()
    model.up.requires_grad_(False)
    return model


def replaced_head(model: nn.Module) -> Optimizer:
    optimizer = SGD(model.parameters(), 0.01)
    model.head = nn.Linear(8, 1)
    return optimizer


class Scaled(nn.Module):
    """Layers with a scale each, and an adapter of a few numbers."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
            self.gamma = nn.Parameter(torch.ones(16))
            self.adapter = nn.Parameter(torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gamma * self.linear(self.norm(x)) + self.adapter

    def __init__(self) -> None:
        super().__init__()
        self.up, self.layers = nn.Linear(4, 16), nn.ModuleList(self.Layer() for _ in range(3))
        self.scale, self.head = nn.Parameter(torch.ones(1)), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.scale * self.head(x)
        return found


def but(*left_out: str, only: bool = False) -> Callable[[nn.Module], Optimizer]:
    """An optimizer without weights of some names, or with these alone."""

    def make(model: nn.Module) -> Optimizer:
        named = model.named_parameters()
        return SGD([x for name, x in named if any(y in name for y in left_out) == only], 0.01)

    return make


def of_a_copy(model: nn.Module) -> Optimizer:
    return SGD(copy.deepcopy(model).parameters(), 0.01)


def head_alone(model: nn.Module) -> Optimizer:
    assert isinstance(model, Net)
    return SGD(model.head.parameters(), 0.01)


# Lost updates.


def bfloat16() -> nn.Module:
    return Net().bfloat16()


def of_bfloat16(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x.bfloat16()).float() - x.sum(1, keepdim=True)).pow(2).mean()


# Losses.


def broadcast(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(1)).pow(2).mean()


def broadcast_in_torch(model: nn.Module, x: Tensor) -> Tensor:
    return functional.smooth_l1_loss(model(x), x.sum(1))


def all_pairs(model: nn.Module, x: Tensor) -> Tensor:
    scores = model(x).squeeze(-1)
    return (scores.unsqueeze(1) - x.sum(1)).abs().mean()


def quantiles(model: nn.Module, x: Tensor) -> Tensor:
    wanted = torch.tensor([0.1, 0.5, 0.9])
    error = x.sum(1, keepdim=True) - model(x)
    return torch.maximum(wanted * error, (wanted - 1) * error).mean()


class Softmaxed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(super().forward(x), dim=-1)


class Committee(nn.Module):
    """The mean of what its members say, as probabilities or as logits."""

    def __init__(self, squashes: bool, stacks: bool = True) -> None:
        super().__init__()
        self.members = nn.ModuleList(Net(3) for _ in range(2))
        self.squashes, self.stacks = squashes, stacks

    def forward(self, x: Tensor) -> Tensor:
        said = [each(x) for each in self.members]
        said = [each.softmax(-1) for each in said] if self.squashes else said
        return torch.stack(said).mean(0) if self.stacks else (said[0] + said[1]) / 2


class Sigmoided(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid()


class LogSoftmaxed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(super().forward(x), dim=-1)


class OverSamples(Net):
    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(super().forward(x), dim=0)
        return (weights * x[:, :3]).sum(1, keepdim=True)


class OverSamplesTurned(Net):
    """The mistake of attention pooling: ``[parts, samples]``, and a softmax over dimension 1."""

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.transpose(super().forward(x), 1, 0)
        weights = torch.softmax(turned, dim=1).transpose(1, 0)
        return (weights * x[:, :3]).sum(1, keepdim=True)


class OverPartsTurned(Net):
    def forward(self, x: Tensor) -> Tensor:
        turned = torch.transpose(super().forward(x), 1, 0)
        weights = torch.softmax(turned, dim=0).transpose(1, 0)
        return (weights * x[:, :3]).sum(1, keepdim=True)


class Attends(nn.Module):
    """``[samples, time, features]`` into an attention that has time, or samples, in front."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(1, 8), nn.Linear(16, 1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x[..., None])
        mixed, _ = self.attention(h, h, h)
        found: Tensor = self.head(torch.cat([mixed.mean(1), h.amax(1)], 1))
        return found


class HalfLow(nn.Module):
    """A small part in bfloat16, beside more weights in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x * self.low.float())
        return found


class Gated(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h * torch.sigmoid(h)


def binary(model: nn.Module, x: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(x), (x[:, :1] > 0).float())


def sums(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).squeeze(-1) - x.sum(1)).pow(2).mean()


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(model, x, use_reentrant=False)
    return (found - x.sum(1, keepdim=True)).pow(2).mean()


def to_none(step: int, model: nn.Module) -> None:
    for weight in model.parameters():
        weight.grad = None


def through_data(step: int, model: nn.Module) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            weight.grad.data.zero_()


def in_turn(step: int, model: nn.Module) -> None:
    """Set to 0 behind a backward whose gradients nobody uses."""
    squares(model, torch.randn(ROWS, 4)).backward()
    model.zero_grad(set_to_none=False)


def small_adam(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), 1e-6)


def large_adam(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), 1e-2)


FAULTY: dict[str, tuple[Callable[[], Case], str, str]] = {
    "stale": (lambda: Case(Net(), squares, zeroes=False), "stale gradients", "zero_grad"),
    "eval after validation": (
        lambda: Case(Net(p=0.1), squares, after=evaluate),
        "evaluation mode in training",
        "since step 12, with Dropout",
    ),
    "eval in all steps": (
        lambda: Case(Net(p=0.1), squares, before=evaluate_first),
        "evaluation mode in training",
        "in every step, with Dropout",
    ),
    "functional dropout": (
        lambda: Case(AlwaysDrops(), squares, after=validate),
        "dropout in evaluation",
        "training=self.training",
    ),
    "dropout in a list": (
        lambda: Case(DropsFromAList(), squares, after=validate),
        "dropout in evaluation",
        "keep it as an attribute or in nn.ModuleList",
    ),
    "dropout of attention": (
        lambda: Case(DropsAttention(), squares, after=validate),
        "dropout in evaluation",
        "dropout_p=p if self.training else 0.0",
    ),
    "unread": (
        lambda: Case(Unread(), squares),
        "never moves",
        "gate.weight and gate.bias: no operation",
    ),
    "detached": (
        lambda: Case(Detached(), squares),
        "never moves",
        "up.weight and up.bias: detach keeps the gradient from it",
    ),
    "no_grad": (
        lambda: Case(Unrecorded(), squares),
        "never moves",
        "up.weight and up.bias: no_grad keeps the gradient from it",
    ),
    "decays": (
        lambda: Case(Unheard(), squares, optimizer=decaying),
        "never moves",
        "branch.weight and branch.bias: its gradient is 0 in every step: weight decay alone",
    ),
    "two zeros": (
        lambda: Case(TwoZeros(), squares),
        "never moves",
        "a and b: its gradient is 0 in every step",
    ),
    "replaced": (
        lambda: Case(Net(), squares, optimizer=replaced_head),
        "never moves",
        "head.weight and head.bias: no optimizer holds it",
    ),
    "forgotten": (
        lambda: Case(Scaled(), squares, optimizer=but("gamma")),
        "never moves",
        "layers.0.gamma, layers.1.gamma and 1 more: no optimizer holds it",
    ),
    "copied": (
        lambda: Case(Net(), squares, optimizer=of_a_copy, after=to_none),
        "never moves",
        "the model that runs is not the one whose weights SGD holds",
    ),
    "lost": (
        lambda: Case(bfloat16(), of_bfloat16, optimizer=small_adam),
        "lost updates",
        "AdamW does not change most elements of 4 of 4 weights",
    ),
    "broadcast": (lambda: Case(Net(), broadcast), "broadcast loss", "sub of [16, 1] and [16]"),
    "broadcast in torch": (
        lambda: Case(Net(), broadcast_in_torch),
        "broadcast loss",
        "smooth_l1_loss of [16, 1] and [16]",
    ),
    "softmax twice": (
        lambda: Case(Softmaxed(3), classes),
        "applied twice",
        "cross_entropy reads the result of softmax",
    ),
    "a mean of softmaxes": (
        lambda: Case(Committee(squashes=True), classes),
        "applied twice",
        "cross_entropy reads the result of softmax",
    ),
    "a sum of softmaxes": (
        lambda: Case(Committee(squashes=True, stacks=False), classes),
        "applied twice",
        "cross_entropy reads the result of softmax",
    ),
    "sigmoid twice": (lambda: Case(Sigmoided(), binary), "applied twice", "result of sigmoid"),
    "over samples": (lambda: Case(OverSamples(3), sums), "mixes samples", "softmax over dim"),
    "over samples, turned": (
        lambda: Case(OverSamplesTurned(3), sums),
        "mixes samples",
        "softmax over dimension 1 of [3, 16]",
    ),
    "attention over samples": (
        lambda: Case(Attends(batch_first=False), sums),
        "mixes samples",
        "attention over dimension 0 of [16, 4, 8]",
    ),
    "lost in a part": (
        lambda: Case(HalfLow(), squares, optimizer=small_adam),
        "lost updates",
        "AdamW does not change most elements of 1 of 5 weights",
    ),
    "stale in a part": (
        lambda: Case(Net(), squares, zeroes=False, after=lambda step, model: model.up.zero_grad()),
        "stale gradients",
        "head",
    ),
}

HEALTHY: dict[str, Callable[[], Case]] = {
    "as it should be": lambda: Case(Net(p=0.1), squares, after=validate),
    "gradients set to None": lambda: Case(Net(), squares, zeroes=False, after=to_none),
    "set to 0 through data": lambda: Case(Net(), squares, zeroes=False, after=through_data),
    "set to 0 behind another backward": lambda: Case(Net(), squares, zeroes=False, after=in_turn),
    "eval and back": lambda: Case(Net(p=0.1), squares, after=back),
    "frozen batch norm": lambda: Case(frozen_norm(), squares),
    "eval on purpose": lambda: Case(Net(p=0.1).eval(), squares),
    "eval without dropout": lambda: Case(Net().eval(), squares),
    "dropout on purpose": lambda: Case(DropsOnPurpose(), squares, after=validate),
    "Monte Carlo dropout": lambda: Case(Net(p=0.1), squares, after=sample),
    "frozen": lambda: Case(frozen(), squares),
    "decays and learns": lambda: Case(Net(), squares, optimizer=decaying),
    "one zero": lambda: Case(OneZero(), squares),
    "idle expert": lambda: Case(Experts(), squares),
    "a target network": lambda: Case(Target(), squares),
    "a late head": lambda: Case(Late(), squares, before=switch_on),
    "a teacher": lambda: Case(Teacher(), squares, optimizer=head_alone),
    "adapters alone": lambda: Case(Scaled(), squares, optimizer=but("adapter", only=True)),
    "without one layer": lambda: Case(Scaled(), squares, optimizer=but("layers.0.")),
    "without one norm": lambda: Case(Scaled(), squares, optimizer=but("layers.0.norm")),
    "without the first part": lambda: Case(Scaled(), squares, optimizer=but("up.")),
    "without one number": lambda: Case(Scaled(), squares, optimizer=but("scale")),
    "matrices left out": lambda: Case(Scaled(), squares, optimizer=but("linear")),
    "head alone": lambda: Case(Net(), squares, optimizer=head_alone),
    "bfloat16 that moves": lambda: Case(bfloat16(), of_bfloat16, optimizer=large_adam),
    "all pairs": lambda: Case(Net(), all_pairs),
    "quantiles": lambda: Case(Net(3), quantiles),
    "log_softmax": lambda: Case(LogSoftmaxed(3), classes),
    "over parts, turned": lambda: Case(OverPartsTurned(3), sums),
    "attention over time": lambda: Case(Attends(batch_first=True), sums),
    "a mean of logits": lambda: Case(Committee(squashes=False), classes),
    "a gate": lambda: Case(Gated(), binary),
    "checkpointed": lambda: Case(Net(p=0.1), checkpointed),
}


@pytest.fixture(autouse=True)
def alone() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("name", FAULTY)
def test_faults_are_told(name: str) -> None:
    make, kind, text = FAULTY[name]
    (fault,) = faults_of(make())
    assert fault.kind == kind
    assert text in fault.line
    assert fault.advice


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_told_of_what_is_right(name: str) -> None:
    assert faults_of(HEALTHY[name]()) == []


@pytest.mark.parametrize(
    "name",
    ["stale", "functional dropout", "detached", "broadcast", "softmax twice", "over samples"],
)
def test_faults_of_a_compiled_model_are_told(name: str) -> None:
    make, kind, text = FAULTY[name]
    (fault,) = faults_of(make(), compiles=True)
    assert fault.kind == kind
    assert text in fault.line


@pytest.mark.parametrize(
    "name", ["as it should be", "dropout on purpose", "all pairs", "a teacher"]
)
def test_nothing_is_told_of_a_compiled_model_that_is_right(name: str) -> None:
    assert faults_of(HEALTHY[name](), compiles=True) == []


def faults_with_a_copy(evaluated: Callable[[nn.Module], object]) -> list[QuietFault]:
    """A training whose averaged weights are validated."""
    torch.manual_seed(0)
    model = Net(p=0.1)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = SGD(model.parameters(), 0.01)
    with fxguard.watch(model) as guard, fxguard.watch(average) as other:
        for _ in range(4):
            optimizer.zero_grad()
            squares(model, torch.randn(ROWS, 4)).backward()
            optimizer.step()
        model.eval()
        evaluated(average)
        with torch.no_grad():
            average(torch.randn(ROWS, 4))
        model.train()
    return [*guard.quiet_faults, *other.quiet_faults]


def test_a_copy_that_drops_in_evaluation() -> None:
    (fault,) = faults_with_a_copy(lambda average: None)
    assert fault.kind == "dropout in evaluation"
    assert "a copy of the trained model drops" in fault.line
    line = int(fault.line.split("test_kinds.py:")[1].split(")")[0])
    assert "average(torch.randn" in linecache.getline(__file__, line)
    assert faults_with_a_copy(lambda average: average.eval()) == []


def test_each_optimizer_is_judged_by_itself() -> None:
    """A model that is trained in float32 first, and then in bfloat16."""
    torch.manual_seed(0)
    model = Net()
    with fxguard.watch(model) as guard:
        for dtype, rate in ((torch.float32, 1e-3), (torch.bfloat16, 1e-6)):
            optimizer = AdamW(model.to(dtype).parameters(), rate)
            for _ in range(60):
                optimizer.zero_grad()
                x = torch.randn(ROWS, 4)
                loss = (model(x.to(dtype)).float() - x.sum(1, keepdim=True)).pow(2).mean()
                loss.backward()
                optimizer.step()
    assert [fault.kind for fault in guard.quiet_faults] == ["lost updates"]


def test_few_steps_show_no_weight_that_never_moves() -> None:
    assert faults_of(Case(Unread(), squares), steps=15) == []


def test_a_rate_of_zero_moves_nothing_rightly() -> None:
    case = Case(Net(), squares, optimizer=lambda model: SGD(model.parameters(), 0.0))
    assert faults_of(case) == []
