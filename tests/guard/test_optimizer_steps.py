"""An optimizer's step that makes weights bad though gradients were finite."""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.optim.optimizer as optimizers
from torch import Tensor, nn

import fxguard
from support.programs import run_python

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def net(dtype: torch.dtype = torch.float16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)


def faint(out: Tensor) -> Tensor:
    """Its gradients are small, and some of them are 0."""
    return out[0, 0] * 1e-3


def steep(out: Tensor) -> Tensor:
    return out.float().square().sum() * 100


def report_of(make: Make, loss: Callable[[Tensor], Tensor], **options: Any) -> fxguard.types.Report:
    """What is said of the first step of an optimizer."""
    model = net()
    optimizer = make(model.parameters())
    with fxguard.watch(model, **options):
        loss(model(torch.ones(2, 4, dtype=torch.float16))).backward()
        with pytest.raises(fxguard.NonFiniteError) as raised:
            optimizer.step()
    return raised.value.report


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda weights: torch.optim.Adam(weights, foreach=True),
        lambda weights: torch.optim.Adam(weights, amsgrad=True),
        torch.optim.NAdam,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
    ],
)
def test_an_eps_that_the_dtype_does_not_hold(make: Make) -> None:
    """The commonest: 1e-8 is 0 in float16, and so is the second moment of a small gradient."""
    report = report_of(make, faint)
    name = type(make(net().parameters())).__name__
    assert report.message == f"batch 0: {name}'s step made weight 0.weight NaN"
    (origin,) = report.origins
    assert (report.phase, origin.cause) == ("optimizer", "zero divisor")
    assert "divides by sqrt(0.0) + eps, and eps 1e-" in origin.operands
    assert report.fix.startswith("keep the weights in float32")
    assert "or take eps=1e-4" in report.fix
    assert origin.frame.source is not None
    assert origin.frame.source.code == "optimizer.step()"
    labels = [row.label for row in origin.frame.rows]
    assert (labels[0], labels[-1]) == ("grad", "output")


def test_the_element_that_is_shown_is_of_the_kind_that_the_headline_names() -> None:
    """-0.1 / 0 comes first, and the weight is said to be NaN: that is 0 / 0, at another index."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x

    model = Gate()
    optimizer = torch.optim.Adam(model.parameters())
    with fxguard.watch(model):
        (model(torch.tensor([1e-4, 1e-4, 0.0, 1.0], dtype=torch.float16))).sum().backward()
        with pytest.raises(fxguard.NonFiniteError) as raised:
            optimizer.step()
    (origin,) = raised.value.report.origins
    assert weight.isnan().tolist() == [False, False, True, False]
    assert raised.value.report.message.endswith(" NaN")
    assert origin.operands.startswith("at [2]: ")
    assert origin.operands.endswith("gradient 0")
    assert "output: 1 NaN, 0 +inf, 2 -inf of 4 elements" in str(raised.value)


def test_weights_that_one_step_made_bad_have_not_spread() -> None:
    """Each was made by itself, and the dtype of the forward is not guessed."""
    report = report_of(torch.optim.Adam, faint)
    assert report.origins[0].spread
    text = str(report).partition("Detected")[0]
    assert "  likewise bad: weight 0.bias, weight 2.weight" in text
    assert "spread" not in text
    assert "that autocast casts" not in text


def test_a_learning_rate_that_throws_weights_over_the_limit() -> None:
    """The gradient was finite, and their product is not."""
    report = report_of(lambda weights: torch.optim.SGD(weights, 6e4), steep)
    assert report.one_line.startswith(
        "batch 0: SGD's step made weight 0.weight inf and -inf: overflow"
    )
    assert "]: learning rate 60000, gradient " in report.origins[0].operands
    assert report.fix == "a smaller learning rate: it is 60000 (advice)"


def test_what_the_page_and_the_trace_show(tmp_path: Any) -> None:
    """The frame of the step, with what the optimizer had."""
    report = report_of(torch.optim.AdamW, faint, trace_to=tmp_path / "traces")
    report.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "AdamW" in page
    assert "exp_avg_sq" in page
    (file,) = (tmp_path / "traces").iterdir()
    (batch,) = fxguard.load_trace(file).batches
    assert batch.verdict[0].startswith("AdamW's step made weight 0.weight NaN")


def test_gradients_that_were_spoilt_between_backward_and_step() -> None:
    """They were finite when their backward ended, and the lines that wrote them are named."""
    model = net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fxguard.watch(model):
        model(torch.ones(2, 4)).sum().backward()
        weight = model.get_parameter("2.bias")
        assert weight.grad is not None
        weight.grad[1] = torch.inf
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(fxguard.NonFiniteError) as raised:
            optimizer.step()
    report = raised.value.report
    assert report.message == "batch 0: SGD's step made weight 2.bias NaN"
    [origin] = report.origins
    text = "the gradient was nan when the step began; it was finite when its backward ended"
    assert origin.operands.startswith(f"at [1]: {text}, and setitem (test_optimizer_steps.py:")
    assert " and mul_ (test_optimizer_steps.py:" in origin.operands
    assert origin.frame.source is not None
    assert origin.frame.source.code == "weight.grad[1] = torch.inf"
    assert origin.cause == "unknown"


def by_hand(model: nn.Module, factor: float) -> None:
    """Clip as many scripts do."""
    for weight in model.parameters():
        assert weight.grad is not None
        weight.grad.mul_(factor / weight.grad.norm())


def test_clipping_by_hand_with_a_norm_of_zero() -> None:
    """The line of the script is named; the same line is healthy with a norm above 0."""
    for loss_factor in 1.0, 0.0:
        model = net(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        found: list[fxguard.types.Report] = []
        with fxguard.watch(model, on_detect=found.append):
            (model(torch.ones(2, 4)).sum() * loss_factor).backward()
            by_hand(model, 1.0)
            optimizer.step()
        assert len(found) == (loss_factor == 0)
    [origin] = found[0].origins
    assert origin.frame.source is not None
    assert origin.frame.source.code == "weight.grad.mul_(factor / weight.grad.norm())"
    assert origin.operands.endswith("wrote it since")


@pytest.mark.parametrize("attribute", ["", "data"])
def test_an_update_by_hand_is_named_by_its_line(attribute: str) -> None:
    """No step of an optimizer did it: the script's own line wrote the weights."""
    model = net(torch.float32)
    found: list[fxguard.types.Report] = []
    with fxguard.watch(model, on_detect=found.append):
        for rate in 0.1, math.nan, 0.1:
            model.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            assert not found or rate == 0.1
            with torch.no_grad():
                for weight in model.parameters():
                    assert weight.grad is not None
                    if attribute:
                        weight.data -= rate * weight.grad
                    else:
                        weight -= rate * weight.grad
    report, *_ = found
    assert report.verdict[0].startswith("all 4 weights turned NaN between batch 1 and batch 2")
    line = f"weight{'.data' if attribute else ''} -= rate * weight.grad"
    assert report.fix.endswith(f", which writes it after the backward: {line} (advice)")


@pytest.mark.parametrize("own", [False, True])
def test_gradients_that_clipping_made_zero(own: bool) -> None:
    """Each fits float16, and their norm does not: the step does nothing, which is a warning."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fxguard.watch(model) as guard:
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.ones(16, 4, dtype=torch.float16)).float() * 3000).sum().backward()
            if own:
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
                for gradient in gradients:
                    gradient.mul_(1.0 / norm)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            said = [str(warning.message) for warning in caught]
            assert len(said) == (guard.batch_number == 1)
            told = ": mul_ (test_optimizer_steps.py:"
            assert all(told in line and "wrote them since; a norm" in line for line in said)
    assert said == []
    assert guard.last_report is None


def test_healthy_steps_are_what_they_were() -> None:
    """Zero gradients without a clip, a weight without one, a closure: no word, the same bits."""

    def trained(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure() -> float:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            return loss.item()

        optimizer.step(closure)  # type: ignore[arg-type] # a number is one, too
        others = torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        others.step()
        next(model.parameters()).grad = None
        others.step()
        return [p.detach() for p in model.parameters()]

    plain = net(torch.float32)
    watched = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = trained(plain)
        with fxguard.watch(watched) as guard:
            found = trained(watched)
    assert guard.last_report is None
    assert all(map(torch.equal, expected, found))


def test_weights_that_were_bad_before_are_not_the_optimizers() -> None:
    """It is accused of what it did."""
    model = net(torch.float32)
    unread = nn.Parameter(torch.tensor([torch.nan]))
    model.register_parameter("unread", unread)
    unread.grad = torch.zeros(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fxguard.watch(model) as guard:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert guard.last_report is None


def test_what_was_reported_in_the_backward_is_not_reported_again() -> None:
    """The step writes the bad gradient into the weight: that follows from it."""
    model = net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: list[fxguard.types.Report] = []
    with fxguard.watch(model, on_detect=found.append):
        (model(torch.ones(2, 4)) * 0).square().sum().sqrt().backward()
        optimizer.step()
    assert [report.phase for report in found] == ["backward"]


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 3,
    loss: Callable[[Tensor, int], Tensor] = lambda out, step: out.square().mean(),
    between: Callable[[int], object] = lambda step: None,
    after: Callable[[int], object] = lambda step: None,
) -> list[fxguard.types.Report]:
    """What is said of a few steps of training, in which nothing raises."""
    found: list[fxguard.types.Report] = []
    with fxguard.watch(model, on_detect=found.append):
        for step in range(steps):
            optimizer.zero_grad()
            loss(model(torch.ones(2, 4)), step).backward()
            between(step)
            optimizer.step()
            after(step)
    return found


def test_a_learning_rate_that_a_schedule_made_nan() -> None:
    """The schedule is named, with its step; a warm-up that begins at 0 is healthy."""
    model = net(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: [0.0, 1.0, math.nan][n])
    [report] = trained(model, optimizer, after=lambda step: step < 2 and schedule.step())
    assert report.message == "batch 2: AdamW's step made weight 0.weight NaN"
    [origin] = report.origins
    assert origin.cause == "unknown"
    assert origin.operands == (
        "the learning rate was nan when the step began; LambdaLR set it, at its step 2, "
        f"by `lambda` (test_optimizer_steps.py:{schedule.lr_lambdas[0].__code__.co_firstlineno})"
    )
    assert report.fix.startswith("look at how the learning rate is computed (")


def test_zeros_that_a_schedule_reads_are_named() -> None:
    """A warm-up of no steps, as data of the program; numbers that are not 0 are left out."""
    warmup, total = 0, 100
    model = net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def rate(step: int) -> float:
        return float(torch.tensor(step + total - 100) / warmup) if step else 1.0

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    [report] = trained(model, optimizer, steps=2, after=lambda step: step < 1 and schedule.step())
    [origin] = report.origins
    line = rate.__code__.co_firstlineno
    assert origin.operands == (
        "the learning rate was inf when the step began; LambdaLR set it, at its step 1, "
        f"by `rate` (test_optimizer_steps.py:{line}), which reads warmup = 0"
    )


def test_a_learning_rate_that_the_script_gave() -> None:
    """No schedule is spoken of: the optimizer was made with it."""
    model = net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), math.inf)
    [report] = trained(model, optimizer, steps=1)
    assert report.origins[0].operands.endswith("; SGD was made with it")
    assert "schedule" not in str(report)
    assert "warm-up" not in str(report)


LINE_OF_THE_SCRIPT = """
import torch, fxguard
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rates = 0.1 * torch.arange(4.0).rsqrt()
with fxguard.watch(model, on_detect=lambda report: print(report.origins[0].operands)):
    for step in range(2):
        for group in optimizer.param_groups:
            {line}
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("group['lr'] = rates[step].item()", "; it is set at script.py:9: group['lr'] = "),
        ("group['lr'] *= rates[step].item()", "; it is set at script.py:9: group['lr'] *= "),
        ("group.update(lr=rates[step].item())", ""),
        ("group['lr'] = 0.1; group['lr'] *= rates[step].item()", ""),
    ],
)
def test_the_only_line_that_sets_it_is_named(line: str, said: str, tmp_path: Path) -> None:
    """Of two lines either may be the one; a method's call is not looked for."""
    script = tmp_path / "script.py"
    script.write_text(LINE_OF_THE_SCRIPT.format(line=line))
    first = run_python(tmp_path, script.name).stdout.splitlines()[0]
    begin = "the learning rate was inf when the step began"
    assert first.startswith(begin + said)
    assert said or first == begin


@pytest.mark.parametrize(
    ("kind", "setting", "text"),
    [
        (torch.optim.Adam, {"lr": torch.tensor(math.nan)}, "the learning rate was nan"),
        (torch.optim.SGD, {"lr": math.inf}, "the learning rate was inf"),
        (torch.optim.SGD, {"weight_decay": math.nan}, "the weight decay was nan"),
        (torch.optim.AdamW, {"betas": (0.9, math.nan)}, "the second beta was nan"),
    ],
)
def test_a_setting_that_is_not_finite(
    kind: type[torch.optim.Optimizer], setting: dict[str, Any], text: str
) -> None:
    """A number or a tensor, in the second group: the first one's weights are healthy."""
    model = net(torch.float32)
    first, _, second = model.children()
    groups = [{"params": first.parameters()}, {"params": second.parameters()}]
    optimizer = kind(groups, 0.1)  # type: ignore[call-arg]
    optimizer.param_groups[1].update(setting)
    [report] = trained(model, optimizer, steps=1)
    assert report.message == f"batch 0: {kind.__name__}'s step made weight 2.weight NaN"
    assert report.origins[0].operands == f"{text} when the step began"
    assert report.origins[0].cause == "unknown"


def test_a_state_that_an_earlier_step_spoilt() -> None:
    """Weights were set back after bad gradients, and the moments were not."""
    model = net(torch.float32)
    healthy = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters())

    def loss(out: Tensor, step: int) -> Tensor:
        return (out * 0).sqrt().sum() if step == 0 else out.sum()

    def after(step: int) -> None:
        if step == 0:
            model.load_state_dict(healthy)

    first, second = trained(model, optimizer, steps=2, loss=loss, after=after)
    assert first.phase == "backward"
    assert second.message == "batch 1: Adam's step made weight 0.weight NaN"
    assert second.origins[0].operands.endswith(
        "exp_avg was nan before this step; the gradient is finite. The step after batch 0 wrote it"
    )
    assert second.origins[0].cause == "unknown"
    optimizer.state.clear()  # the fix
    model.load_state_dict(healthy)
    assert trained(model, optimizer) == []


def test_a_step_is_not_accused_of_what_was_written_before_it() -> None:
    """The weight was bad when the step began; one that is bounded there is healthy."""
    model = net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    bias = model.get_parameter("2.bias")

    @torch.no_grad()
    def between(step: int) -> None:
        bias.clamp_(-1, 1)
        if step == 1:
            bias.div_(bias * 0)

    report, *_ = trained(model, optimizer, steps=2, between=between)
    assert report.message.startswith("batch 1: something before SGD's step made weight 2.bias ")
    assert "clamp_ (test_optimizer_steps.py:" in report.origins[0].operands
    assert " and div_ (test_optimizer_steps.py:" in report.origins[0].operands
    assert report.origins[0].cause == "unknown"
    model = net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    bias = model.get_parameter("2.bias")
    assert trained(model, optimizer, steps=1, between=between) == []


def test_finite_gradients_whose_sum_is_not() -> None:
    """Accumulated in float16: no backward alone has done it, and no one is said to have."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with fxguard.watch(model):
        for _ in range(4):
            (model(torch.ones(8, 4, dtype=torch.float16)).float().sum() * 4000).backward()
        with pytest.raises(fxguard.NonFiniteError) as raised:
            optimizer.step()
    report = raised.value.report
    assert "each of 4 backwards brought finite gradients" in report.origins[0].operands
    assert report.fix.endswith("look at whether their sum overflows (advice)")


def is_made_negative(gradient: float) -> bool:
    """Whether RMSprop's arithmetic makes the variance of a constant gradient negative before 0."""
    weight = torch.zeros(1, 1, requires_grad=True)
    optimizer = torch.optim.RMSprop([weight], 0.01, alpha=0.5, eps=1.0, centered=True)
    for _ in range(40):
        weight.grad = torch.full((1, 1), gradient)
        optimizer.step()
        state = optimizer.state[weight]
        variance = state["square_avg"].addcmul(state["grad_avg"], state["grad_avg"], value=-1)
        if variance <= 0:
            return bool(variance < 0)
    return False


def test_a_variance_that_roundings_made_negative() -> None:
    """A centered RMSprop with constant gradients, against its own arithmetic."""
    gradient = next(x / 100 for x in range(1, 100) if is_made_negative(x / 100))
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.RMSprop(model.parameters(), 0.01, alpha=0.5, eps=0.0, centered=True)
    found: list[fxguard.types.Report] = []
    with fxguard.watch(model, on_detect=found.append):
        for _ in range(40):
            optimizer.zero_grad()
            model(torch.full((1, 1), gradient)).sum().backward()
            optimizer.step()
            if found:
                break
    [report] = found
    [state] = optimizer.state.values()
    assert state["square_avg"].addcmul(state["grad_avg"], state["grad_avg"], value=-1) < 0
    assert report.origins[0].cause == "rounding"
    assert report.fix.startswith("centered=False")


def test_weight_decay_that_multiplies_weights() -> None:
    """The gradient is small: it is not the gradient's doing."""
    model = net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 1e20, weight_decay=1e20)
    [report] = trained(model, optimizer, steps=1)
    assert report.origins[0].cause == "overflow"
    assert "each step multiplies the weight by -1e+40" in report.origins[0].operands
    assert report.fix == "a smaller weight decay or learning rate (advice)"


def test_a_step_that_calls_the_model_is_named_there() -> None:
    """LBFGS writes weights and calls its closure; the step has not ended then."""
    model = net(torch.float32)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=math.inf)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    with fxguard.watch(model), pytest.raises(fxguard.NonFiniteError) as raised:
        optimizer.step(closure)
    assert raised.value.report.fix == (
        "look at what LBFGS's step, which calls the model, writes into these weights: its "
        "learning rate is inf (advice)"
    )


def test_a_watched_step_that_wrote_a_bad_gradient_is_not_denied() -> None:
    """The next batch finds the weights bad, and says which report has the reason."""
    model = net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(out: Tensor, step: int) -> Tensor:
        return (out - out.detach()).sum().sqrt() if step == 0 else out.sum()

    first, second, *_ = trained(model, optimizer, steps=2, loss=loss)
    assert first.phase == "backward"
    assert second.fix == (
        "fix what the report of batch 0 names: SGD's step wrote it into these weights (advice)"
    )


def test_no_hook_is_left_and_none_keeps_a_model_alive() -> None:
    """Also where nobody leaves the block."""
    before = {*optimizers._global_optimizer_pre_hooks, *optimizers._global_optimizer_post_hooks}
    model = net()
    gone = weakref.ref(model)
    watching = fxguard.watch(model)
    watching.__enter__()
    del model, watching
    gc.collect()
    assert gone() is None
    after = {*optimizers._global_optimizer_pre_hooks, *optimizers._global_optimizer_post_hooks}
    assert after <= before
