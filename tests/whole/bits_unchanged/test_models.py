"""Any model, no edits: results are bitwise those of the unguarded model, nothing healthy raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxguard
from support import zoo
from support.same_results import assert_same, results

pytestmark = pytest.mark.slow_unless_campaign

CAMPAIGN = {"gpt2", "mixtral", "whisper", "cnn-float32-eval-plain", "lstm-float32-eval-plain"}


def in_ci(name: str, variant: str) -> bool:
    """Small models without a mask in every way, others in training, with a mask that they take."""
    if {name, f"{name}-{variant}"} & CAMPAIGN:
        return False
    has_mask = zoo.ZOO[name].has_mask
    is_small = name in zoo.PLAIN and not has_mask
    return is_small or variant == f"float32-train-{'masked' if has_mask else 'plain'}"


VARIANTS = [
    pytest.param(
        name,
        dtype,
        train,
        masked,
        id=f"{name}-{(variant := f'{str(dtype)[6:]}-{mode}-{mask}')}",
        marks=() if in_ci(name, variant) else pytest.mark.campaign,
    )
    for name, entry in zoo.ZOO.items()
    for dtype in (torch.float32, torch.bfloat16)
    for train, mode in ((True, "train"), (False, "eval"))
    for masked, mask in (
        ((False, "plain"), (True, "masked")) if entry.has_mask else ((False, "plain"),)
    )
]


def trace_of(model: nn.Module) -> dict[str, Any]:
    """Everything that instrumenting could leave behind."""
    return {
        name: (
            set(module.__dict__),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            list(module._parameters),
            type(module),
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize(("name", "dtype", "train", "masked"), VARIANTS)
def test_results_are_bitwise_equal(
    name: str,
    dtype: torch.dtype,
    train: bool,
    masked: bool,
    device: torch.device,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A guarded model gives the same bits, prints nothing, checks everything, and is removable."""
    entry = zoo.ZOO[name].on(device)
    inputs = entry.inputs(dtype, masked)
    expected = results(entry.model(dtype, train), inputs, train=train)

    model = entry.model(dtype, train)
    before, keys = trace_of(model), list(model.state_dict())
    assert fxguard.instrument(model) is model
    assert list(model.state_dict()) == keys
    assert_same(expected, results(model, inputs, train=train))

    guard = fxguard.guard_of(model)
    assert capsys.readouterr().out == ""
    assert guard.last_report is None
    assert guard.batch_number == 1
    assert "not checked" not in guard.coverage()
    assert guard.frames()[-1].name == ""  # the root returns last
    assert fxguard.remove(model) is model
    assert trace_of(model) == before
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "cnn", "encoder", "in_place", "containers"),
        *(pytest.param(name, marks=pytest.mark.campaign) for name in ("resnet", "lstm", "twice")),
    ],
)
def test_results_are_bitwise_equal_under_aot_eager(name: str, device: torch.device) -> None:
    """Under AOTAutograd the checks change no bit of outputs and gradients either."""
    entry = zoo.ZOO[name].on(device)
    inputs = entry.inputs(torch.float32, False)
    plain = torch.compile(entry.model(train=True), backend="aot_eager")
    expected = results(plain, inputs, train=True)
    torch._dynamo.reset()

    model = torch.compile(fxguard.instrument(entry.model(train=True)), backend="aot_eager")
    assert_same(expected, results(model, inputs, train=True))
    assert "not checked" not in fxguard.guard_of(model).coverage()


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "dtype", "train", "masked"), VARIANTS)
def test_every_variant_under_aot_eager(
    name: str, dtype: torch.dtype, train: bool, masked: bool, device: torch.device
) -> None:
    """The same bits under AOTAutograd in every dtype and mode, with and without a mask."""
    entry = zoo.ZOO[name].on(device)
    inputs = entry.inputs(dtype, masked)
    plain = torch.compile(entry.model(dtype, train), backend="aot_eager")
    expected = results(plain, inputs, train=train)
    torch._dynamo.reset()

    guarded = fxguard.instrument(entry.model(dtype, train))
    actual = results(torch.compile(guarded, backend="aot_eager"), inputs, train=train)
    assert_same(expected, actual)
    assert fxguard.guard_of(guarded).last_report is None


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("bert", marks=pytest.mark.campaign), "cnn"])
def test_inductor_agrees_to_the_last_bits(name: str, device: torch.device) -> None:
    """Under Inductor extra outputs may change what fuses, and so only the last bits."""
    entry = zoo.ZOO[name].on(device)
    inputs = entry.inputs(torch.float32, False)
    outputs, gradients = results(torch.compile(entry.model(train=True)), inputs, train=True)
    torch._dynamo.reset()

    model = torch.compile(fxguard.instrument(entry.model(train=True)), fullgraph=True)
    actual, actual_gradients = results(model, inputs, train=True)
    assert outputs
    assert gradients
    for one, other in zip(outputs, actual, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(actual_gradients[parameter], gradient, rtol=1e-4, atol=1e-6)
