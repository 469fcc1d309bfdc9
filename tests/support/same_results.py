"""Outputs and gradients of one step, and whether those of two models agree in every bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from support import zoo


def results(
    model: nn.Module, inputs: Any, *, train: bool
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and, when training, gradients of one seeded step."""
    args, kwargs = inputs
    torch.manual_seed(7)
    with torch.set_grad_enabled(train):
        output = model(*args, **kwargs)
    if train:
        zoo.loss_of(output).backward()
    gradients = {
        name.removeprefix("_orig_mod."): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    assert gradients or not train
    return [tensor.detach() for tensor in zoo.tensors_in(output)], gradients


def assert_same(expected: Any, actual: Any) -> None:
    """Two results of `results` agree in every bit."""
    outputs, gradients = expected
    assert len(actual[0]) == len(outputs) > 0
    for one, other in zip(outputs, actual[0], strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)
    assert actual[1].keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(actual[1][name], gradient, rtol=0, atol=0, msg=name)
