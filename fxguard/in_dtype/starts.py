"""Where the backward of a model begins, and the gradients that come in there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fxguard.graph.marks import flatten_call, rows_of
from fxguard.graph.outputs import to_differentiate

__all__ = ["differentiated", "drawn_for", "named_tensors"]


def named_tensors(output: Any) -> list[tuple[str, Tensor]]:
    """All tensors that a model returned, in order: "output", "output['logits']"."""
    labels, tensors = flatten_call((), {}, output)
    return [(label, x) for label, x, _ in rows_of(labels, tensors) if x is not None]


def differentiated(output: Any) -> list[Tensor]:
    """The loss that a model returned, or all its outputs: by name.

    The order decides which gradients come in, and another model may return the same in another one.
    """
    names = {id(x): name for name, x in named_tensors(output)}
    return sorted(to_differentiate(output), key=lambda x: names.get(id(x), ""))


def drawn_for(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The gradient that comes in at each output: 1 at a single number, else random numbers.

    The gradients of a sum would be 0 behind a softmax or a layer norm.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for x in outputs:
        drawn = torch.ones(x.shape, dtype=torch.float64)
        if x.numel() != 1:
            drawn = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        found.append(drawn.to(x.device, x.dtype))
    return found
