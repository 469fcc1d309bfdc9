"""An optimizer's step that makes weights bad though gradients were finite."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.optim.optimizer as optimizers
from torch import Tensor, nn

import fxguard

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def net(dtype: torch.dtype = torch.float16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)


def faint(out: Tensor) -> Tensor:
    """Its gradients are small, and some of them are 0."""
    return out[0, 0] * 1e-3


def steep(out: Tensor) -> Tensor:
    return out.float().square().sum() * 100


def report_of(make: Make, loss: Callable[[Tensor], Tensor], **options: Any) -> fxguard.Report:
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
    assert report.fix.startswith("eps=1e-4")
    assert origin.frame.source is not None
    assert origin.frame.source.code == "optimizer.step()"
    labels = [row.label for row in origin.frame.rows]
    assert (labels[0], labels[-1]) == ("grad", "output")


def test_a_learning_rate_that_throws_weights_over_the_limit() -> None:
    """The gradient was finite, and their product is not."""
    report = report_of(lambda weights: torch.optim.SGD(weights, 6e4), steep)
    assert report.one_line.startswith("batch 0: SGD's step made weight 0.weight inf: overflow")
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
    """They were finite when their backward ended, and that is said."""
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
    assert report.origins[0].operands == (
        "at [1]: the gradient was nan when the step began; it was finite when its backward ended"
    )


def test_gradients_that_clipping_made_zero() -> None:
    """Each fits float16, and their norm does not: the step does nothing, which is a warning."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fxguard.watch(model) as guard:
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.ones(16, 4, dtype=torch.float16)).float() * 3000).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            said = [str(warning.message) for warning in caught]
            assert len(said) == (guard.batch_number == 1)
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
    found: list[fxguard.Report] = []
    with fxguard.watch(model, on_detect=found.append):
        (model(torch.ones(2, 4)) * 0).square().sum().sqrt().backward()
        optimizer.step()
    assert [report.phase for report in found] == ["backward"]


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
