"""Steps of optimizers that a script wrote itself: which operation made a weight bad, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.advice.averaged import repair_of_variance
from fxguard.records import Source
from fxguard.steps import own_step

Loss = Callable[[Tensor], Tensor]


class Own(torch.optim.Optimizer):
    """A script's own optimizer; ``update`` is made for each weight."""

    def __init__(self, weights: Iterable[Tensor], **settings: Any) -> None:
        super().__init__(weights, {"lr": 0.01, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, weight.grad, self.state[weight], group)

    def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
        raise NotImplementedError


class Lars(Own):
    def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
        decay = 0.0
        ratio = w.norm() / (g.norm() + decay * w.norm())
        w.add_((g + decay * w) * ratio, alpha=-group["lr"])


class Lamb(Own):
    def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
        update = g / (g.abs() + 1e-6)
        trust_ratio = w.norm() / update.norm()
        w.add_(update * trust_ratio, alpha=-group["lr"])


class SafeLamb(Own):
    def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
        update = g / (g.abs() + 1e-6)
        a, b = w.norm(), update.norm()
        trust_ratio = torch.where((a > 0) & (b > 0), a / b, 1.0)  # the fix that is told
        w.add_(update * trust_ratio, alpha=-group["lr"])


class AdamWithoutEps(Own):
    def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if not state:
            state["m"], state["v"], state["t"] = torch.zeros_like(w), torch.zeros_like(w), 0
        state["t"] += 1
        state["m"].mul_(0.9).add_(g, alpha=0.1)
        state["v"].mul_(0.99).addcmul_(g, g, value=0.01)
        w.data.addcdiv_(state["m"], state["v"].sqrt(), value=-group["lr"])


class Normalized(Own):
    def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
        w -= 0.1 * g * (g**2).mean().rsqrt()


class Variance(Own):
    def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
        w.sub_(g / (torch.sqrt(g**2 - 2 * g.abs().mean() ** 2) + 1e-8), alpha=0.01)


class Exponential(Own):
    def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
        w.data = w.data - 1e-3 * torch.exp(g * 1e6)


class ByNumber(Own):
    def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
        share = (g.abs().max() / g.abs().min()).item() * 0.0
        w.add_(g, alpha=-share)


class WritesGradients(Own):
    def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
        d = g.data
        d.add_(w.data, alpha=0.01)
        d.div_(d.norm() * 0)
        w.data.add_(d, alpha=-0.1)


class Foreach(torch.optim.Optimizer):
    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__(weights, {})
        self.moments: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        weights = self.param_groups[0]["params"]
        gradients = [weight.grad for weight in weights]
        for weight in weights:
            self.moments.setdefault(weight, torch.zeros_like(weight)).add_(weight.grad)
        shares = torch._foreach_div(gradients, [self.moments[weight] for weight in weights])
        torch._foreach_add_(weights, shares, alpha=-0.01)


def one_column(out: Tensor) -> Tensor:
    """The gradients of the other columns are 0."""
    return out[:, 0].sum()


def nothing(out: Tensor) -> Tensor:
    """All gradients are 0."""
    return out.sum() * 0


CASES: dict[type[torch.optim.Optimizer], tuple[Loss, str, str, str, str]] = {
    Lamb: (nothing, "trust_ratio = w.norm() / update.norm()", "zero divisor", " / 0.0",
           "where a norm is 0: torch.where((a > 0) & (b > 0), a / b, 1.0)"),
    Lars: (nothing, "ratio = w.norm() / (", "zero divisor", " / 0.0",
           "where a norm is 0: torch.where((a > 0) & (b > 0), a / b, 1.0)"),
    AdamWithoutEps: (one_column, 'state["v"].sqrt(), value', "zero divisor", "+ 0.0 / 0.0", "eps"),
    Normalized: (nothing, "rsqrt()", "zero divisor", "rsqrt(0.0)", "rsqrt((g ** 2).mean() + 1e-12"),
    Variance: (torch.sum, "torch.sqrt(g**2", "domain", "sqrt(-", "sqrt(x.clamp(min=1e-12))"),
    Exponential: (torch.sum, "torch.exp(g * 1e6)", "overflow", "exp(", "up to exp(88)"),
    ByNumber: (one_column, "g.abs().max() / g.abs().min()", "zero divisor", " / 0.0", "eps"),
    WritesGradients: (torch.sum, "d.div_(d.norm() * 0)", "zero divisor", " / 0.0", "eps"),
    Foreach: (one_column, "torch._foreach_div", "zero divisor", "0.0 / 0.0", "eps"),
}  # fmt: skip


def model_with_a_gate() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.bias.zero_()
    return model


def stepped(make: Any, loss: Loss, **options: Any) -> tuple[nn.Module, fxguard.types.Report | None]:
    """The model after one step, and the report."""
    model = model_with_a_gate()
    found: list[fxguard.types.Report] = []
    with fxguard.watch(model, on_detect=found.append, **options):
        loss(model(torch.ones(2, 4))).backward()
        make(model.parameters()).step()
    return model, found[0] if found else None


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_the_operation_inside_the_step_is_named(kind: type[torch.optim.Optimizer]) -> None:
    """Its line in the script, its numbers, its cause: the first bad number of the step."""
    loss, code, cause, numbers, fix = CASES[kind]
    model, report = stepped(kind, loss)
    assert report is not None
    [origin] = report.origins
    bad = [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]
    assert report.message.startswith(f"batch 0: {kind.__name__}'s step made weight {bad[0]} ")
    assert origin.frame.source is not None
    assert code in origin.frame.source.code
    assert origin.frame.source.file == __file__
    assert (origin.cause, report.phase) == (cause, "optimizer")
    assert numbers in origin.operands
    assert fix in str(report.fix)


class Half(Own):
    """Moments in float16, which does not hold the eps."""

    def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
        m, v = g.half(), (g * g).half()
        w.add_(self.ratio(m, v, group["eps"]).to(w.dtype), alpha=-group["lr"])

    @staticmethod
    def ratio(m: Tensor, v: Tensor, eps: float) -> Tensor:
        return m / v.sqrt().add_(eps)


class HalfBelowRoot(Half):
    @staticmethod
    def ratio(m: Tensor, v: Tensor, eps: float) -> Tensor:
        return m * torch.rsqrt(eps + v)


class HalfBounded(Half):
    @staticmethod
    def ratio(m: Tensor, v: Tensor, eps: float) -> Tensor:
        return m / (2 * v.sqrt().clamp(min=eps))


class HalfForeach(Half):
    @staticmethod
    def ratio(m: Tensor, v: Tensor, eps: float) -> Tensor:
        denominators = torch._foreach_sqrt([v])
        torch._foreach_add_(denominators, eps)
        return torch._foreach_div([m], denominators)[0]


@pytest.mark.parametrize("kind", [Half, HalfBelowRoot, HalfBounded, HalfForeach])
def test_an_eps_that_the_moments_do_not_hold(kind: Any) -> None:
    """One is there: the advice is not to add one. With one that float16 holds the step is good."""
    model, report = stepped(lambda weights: kind(weights, eps=1e-8), nothing)
    assert report is not None
    [origin] = report.origins
    assert origin.operands.endswith("; eps 1e-08 is 0 in float16")
    assert report.fix == (
        "keep the optimizer's state and this division in float32, or take an eps that float16 "
        "holds (1e-4) (advice)"
    )
    model, report = stepped(lambda weights: kind(weights, eps=1e-4), nothing)
    assert report is None
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())


def test_an_eps_of_another_tensor_is_not_the_divisors() -> None:
    class Other(Half):
        @staticmethod
        def ratio(m: Tensor, v: Tensor, eps: float) -> Tensor:
            return (m + eps) / v.sqrt()

    report = stepped(lambda weights: Other(weights, eps=1e-8), nothing)[1]
    assert report is not None
    assert "eps" not in report.origins[0].operands


VARIANCES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda sq, mean: (sq - mean**2).sqrt(),
    lambda sq, mean: (sq - mean * mean).rsqrt(),
    lambda sq, mean: (sq - mean.square() + 1e-8) ** 0.5,
    lambda sq, mean: sq.addcmul(mean, mean, value=-1).sqrt_(),
    lambda sq, mean: sq.clone().sub_(mean.pow(2)).sqrt(),
    lambda sq, mean: torch._foreach_sqrt(torch._foreach_sub([sq], [mean**2]))[0],
]
OTHERS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda sq, mean: (mean**2 - 4 * sq.abs() - 9).sqrt(),
    lambda sq, mean: (sq - 2).sqrt(),
    lambda sq, mean: (sq**2 - mean**2 - 9).sqrt(),
    lambda sq, mean: (sq - mean**2).clamp(min=0).sub(1).sqrt(),
]


@pytest.mark.parametrize("root", VARIANCES + OTHERS)
def test_a_root_of_a_difference_of_averages_has_a_cause(root: Any) -> None:
    """The averages decay differently: a bound alone hides that. Other roots are bounded."""

    class Centred(Own):
        def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
            w.sub_(root(0.01 * g**2, 0.5 * g), alpha=group["lr"])

    _, report = stepped(Centred, torch.sum)
    assert report is not None
    fixes = [str(fix) for fix in report.origins[0].fixes]
    assert report.origins[0].cause == "domain"
    told = [fix.startswith("average x and x² with one decay") for fix in fixes]
    assert told == [root in VARIANCES]


@pytest.mark.parametrize("root", VARIANCES)
def test_roundings_of_averages_with_one_decay(root: Any) -> None:
    """Nothing is said of two decays: the averages of numbers that are all alike have one."""

    class Centred(Own):
        def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
            mean = g + 2
            w.sub_(root(mean.square() * (1 - 2.4e-7), mean), alpha=group["lr"])

    _, report = stepped(Centred, torch.sum)
    assert report is not None
    first = str(report.origins[0].fixes[0])
    assert "before the root: by roundings this difference of averages is negative" in first
    assert not any("decay" in str(fix) for fix in report.origins[0].fixes)


def test_a_centred_step_as_it_is_written() -> None:
    """One decay, and a gradient that stays the same: the line's own difference is bounded."""

    class Centred(Own):
        def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
            state.setdefault("n", torch.zeros_like(w)).mul_(0.8).addcmul_(g, g, value=1 - 0.8)
            state.setdefault("g", torch.zeros_like(w)).mul_(0.8).add_(g, alpha=1 - 0.8)
            spread = (state["n"] - state["g"] ** 2).sqrt() + 1e-3  # eps
            w.addcdiv_(g, spread, value=-group["lr"])

    model = model_with_a_gate()
    optimizer = Centred(model.parameters())
    found: list[fxguard.types.Report] = []
    with fxguard.watch(model, on_detect=found.append):
        for _ in range(400):
            optimizer.zero_grad()
            (model(torch.full((2, 4), 0.7)) * 0.37).sum().backward()
            optimizer.step()
    report = found[0]
    assert str(report.origins[0].fixes[0]).startswith(
        "take (state['n'] - state['g'] ** 2).clamp(min=0) before the root"
    )


@pytest.mark.parametrize("eps", ["eps", "1e-06"])
def test_an_eps_is_added_behind_the_bound(eps: str) -> None:
    """Who bounds the sum at 0 divides by a root of 0."""
    source = Source("own.py", 3, f"w -= g / torch.sqrt(var + {eps})")
    found = repair_of_variance(source, is_of_roundings=True)
    assert found.startswith(f"take var.clamp(min=0) + {eps} before the root")
    source = Source("own.py", 3, f"w -= g / torch.sqrt(sq - mean**2 + {eps})")
    found = repair_of_variance(source, is_of_roundings=True)
    assert found.startswith(f"take (sq - mean ** 2).clamp(min=0) + {eps} before the root")


def test_the_same_decay_and_a_bound_are_a_repair() -> None:
    """As the fix has it: the step is finite, and nothing is said."""

    class Centred(Own):
        def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
            sq, mean = 0.5 * g**2, 0.5 * g
            w.sub_(g / ((sq - mean**2).clamp(min=0).sqrt() + 1e-8), alpha=group["lr"])

    model, report = stepped(Centred, torch.sum)
    assert report is None
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())


def test_the_step_is_the_one_that_ran_without_fxguard() -> None:
    """Looking inside changes neither weights nor states, and calls no line of the script twice."""
    for kind, (loss, *_) in CASES.items():
        plain = model_with_a_gate()
        loss(plain(torch.ones(2, 4))).backward()
        kind(plain.parameters()).step()  # type: ignore[call-arg]
        model, _ = stepped(kind, loss)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


def test_the_fix_that_is_told_is_one() -> None:
    """A zero weight is healthy then, and a ratio that a where leaves out is no fault."""
    model, report = stepped(SafeLamb, nothing)
    assert report is None
    assert all(bool(p.isfinite().all()) for p in model.parameters())


class Talkative(Own):
    """Its second run must not be heard, nor change what it shares with the script."""

    steps = 0

    def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
        print("update")
        self.count = getattr(self, "count", 0) + 1
        w.div_(g * 0 + torch.rand(1) * 0)


def test_nothing_of_the_second_run_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    """What the step prints, counts and draws is there once."""
    model = model_with_a_gate()
    optimizer = Talkative(model.parameters())
    with fxguard.watch(model, on_detect=lambda report: None):
        model(torch.ones(2, 4)).sum().backward()
        torch.manual_seed(3)
        optimizer.step()
    drawn = torch.rand(1)
    torch.manual_seed(3)
    torch.rand(1), torch.rand(1)
    assert torch.equal(drawn, torch.rand(1))
    assert capsys.readouterr().out.count("update") == 2
    assert optimizer.count == 2


class Around(torch.optim.Optimizer):
    """An optimizer around another one."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__(weights, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.base.step()
        for weight in self.param_groups[0]["params"]:
            weight.div_(weight.norm() * 0)


KEPT = torch.ones(3)


class WritesGlobals(Own):
    def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
        KEPT.add_(1)
        w.div_(g.norm() * 0)


class SetsGlobals(WritesGlobals):
    """What is set is a flag, and no tensor of the step."""

    def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
        KEPT.requires_grad = False
        super().update(w, g, state, group)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Around, "it holds a model or another optimizer"),
        (WritesGlobals, "it writes a tensor that was not copied"),
        (SetsGlobals, "it writes a tensor that was not copied"),
    ],
)
def test_a_step_that_may_reach_outside_is_not_run_again(kind: Any, why: str) -> None:
    """Then there is no cause, and it is said why."""
    KEPT.fill_(1)
    _, report = stepped(kind, torch.sum)
    assert report is not None
    assert report.origins[0].cause == "unknown"
    assert report.origins[0].operands.endswith(f"the step was not looked into: {why}")
    assert report.fix == ""
    assert kind is Around or float(KEPT[0]) == 3  # once for each weight


def test_a_large_step_is_looked_into_at_the_beginning_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies cost time, so later steps of large models have no more than their numbers."""
    monkeypatch.setattr(own_step, "FEW_BYTES", 8)
    monkeypatch.setattr(own_step, "FIRST_STEPS", 1)
    model = model_with_a_gate()
    optimizer = Normalized(model.parameters())
    found: list[fxguard.types.Report] = []
    with fxguard.watch(model, on_detect=found.append):
        for factor in 1.0, 0.0:
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).sum() * factor).backward()
            optimizer.step()
    [report] = found
    assert report.origins[0].cause == "unknown"
    assert own_step.TOO_LATE in report.origins[0].operands


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_learning_rate_that_is_not_finite(bad: float) -> None:
    """It is named before any operation that it spoils."""
    _, report = stepped(lambda weights: SafeLamb(weights, lr=bad), torch.sum)
    assert report is not None
    text = f"the learning rate was {bad:g} when the step began; SafeLamb was made with it"
    assert report.origins[0].operands == text
    assert report.origins[0].cause == "unknown"
    assert "how the learning rate is computed" in str(report.fix)


class Bounded(Own):
    def update(self, w: Tensor, g: Tensor, state: Any, group: Any) -> None:
        w.add_(g.clamp(-group["most"], group["most"]), alpha=-0.1)


def test_a_bound_may_be_infinite() -> None:
    """An own setting that is infinite on purpose is nothing to speak of."""
    _, report = stepped(lambda weights: Bounded(weights, most=math.inf), torch.sum)
    assert report is None


def test_a_step_whose_copies_cannot_be_made_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for copies: the step is the script's own affair, and is made."""

    def no_memory(*args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(own_step, "_tensors_in", no_memory)
    model, report = stepped(SafeLamb, torch.sum)
    assert report is None
    assert not torch.equal(model.weight, model_with_a_gate().weight)
    _, report = stepped(Lamb, nothing)
    assert report is not None
    assert own_step.NOT_COPIED in report.origins[0].operands
