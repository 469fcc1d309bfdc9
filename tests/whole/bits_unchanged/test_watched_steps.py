"""Whole training steps of any model, watched: the same bits, and nothing healthy is reported."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxguard
from support import zoo

OPTIMIZERS = (
    lambda weights: torch.optim.AdamW(weights, 1e-3),
    lambda weights: torch.optim.SGD(weights, 1e-3, momentum=0.9, foreach=True),
    lambda weights: torch.optim.Adam(weights, 1e-3, fused=True),
)
SAMPLE = {"lstm": 1, "in_place": 2, "containers": 1}
VARIANTS = [
    pytest.param(
        name,
        dtype,
        index,
        id=f"{name}-{str(dtype)[6:]}-{index}",
        marks=[] if (dtype, index) == (torch.float32, SAMPLE.get(name)) else [pytest.mark.campaign],
    )
    for name in zoo.ZOO
    for dtype in (torch.float32, torch.bfloat16)
    for index in range(3)
]


def loss_of(output: Any, index: int) -> Tensor:
    """A loss as scripts write them, out of what the model returned."""
    tensors = [x.float() for x in zoo.tensors_in(output) if x.is_floating_point() and x.dim() > 1]
    first = tensors[0].flatten(1)
    if index == 0:
        return zoo.loss_of(output) * 0.5 + F.cross_entropy(first, first.detach().argmax(-1))
    if index == 1:
        target = first.detach().roll(1, 0)
        scale = first.norm(dim=-1, keepdim=True).clamp(min=1e-6)
        return F.huber_loss(first / scale, target) + (1 - F.cosine_similarity(first, target)).mean()
    probabilities = first.log_softmax(-1)
    with torch.no_grad():
        teacher = F.softmax(first.roll(1, -1) / 2, -1)
    loss = F.kl_div(probabilities, teacher, reduction="batchmean")
    loss += sum((x**2).mean() for x in tensors) * 1e-3
    return loss


def trained(model: nn.Module, inputs: Any, index: int) -> list[Tensor]:
    """Two steps: losses, gradients, and the weights after them."""
    args, kwargs = inputs
    torch.manual_seed(2)
    optimizer = OPTIMIZERS[index](model.parameters())
    found = []
    for _ in range(2):
        loss = loss_of(model(*args, **kwargs), index)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found += [loss.detach(), *(x.clone() for x in gradients)]
    return [*found, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize(("name", "dtype", "index"), VARIANTS)
def test_watched_steps_are_bitwise_equal(name: str, dtype: torch.dtype, index: int) -> None:
    """Losses, gradients and weights; and no word."""
    entry = zoo.ZOO[name]
    inputs = entry.inputs(dtype, entry.has_mask)
    plain = torch.compile(entry.model(dtype, train=True), backend="eager")
    expected = trained(plain, inputs, index)
    torch._dynamo.reset()
    model = entry.model(dtype, train=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*gradients are 0.*")
        with fxguard.watch(model) as guard:
            found = trained(model, inputs, index)
    assert guard.last_report is None
    assert not torch.overrides._get_current_function_mode_stack()
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=False)
