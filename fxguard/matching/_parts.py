"""What fused operations compute on the way: scores and probabilities of an attention, statistics.

Another program may compute the same in several operations; then their values are these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fxguard.recording.recorded import Operation
from fxguard.recording.replay import arguments_by_name, operation_named

__all__ = ["parts_of"]

ATTENTION = "_scaled_dot_product_"


def parts_of(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The values inside a fused operation, in the order in which they are computed.

    Args:
        operation: any one.
        args: its arguments, with tensors.
        kwargs: likewise.
    """
    overload = operation_named(operation.name)
    if overload is None:
        return []
    named = arguments_by_name(overload, args, kwargs)
    with torch.no_grad():
        if operation.kind.startswith(ATTENTION):
            return list(_attention(named))
        if operation.kind in ("native_layer_norm", "_fused_rms_norm", "native_group_norm"):
            return list(_norm(operation.kind, named))
    return []


def _attention(named: dict[str, Any]) -> Iterator[Tensor]:
    q, k, v = named["query"], named["key"], named["value"]
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        yield from (k, v)
    scale = named.get("scale") or 1 / math.sqrt(q.shape[-1])
    scores = q @ k.transpose(-1, -2)
    yield from (scores, scores * scale, q * scale, k * scale, q * math.sqrt(scale))
    yield k * math.sqrt(scale)
    scores = scores * scale
    mask = named.get("attn_mask", named.get("attn_bias"))
    if mask is not None:
        yield mask
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        yield scores
    if named.get("is_causal"):
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        yield allowed
        scores = scores.masked_fill(~allowed, -math.inf)
        yield scores
    probabilities = torch.softmax(scores, -1)
    yield from (probabilities, probabilities @ v)


def _norm(kind: str, named: dict[str, Any]) -> Iterator[Tensor]:
    x = named["input"]
    eps = named.get("eps")
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    if kind == "native_group_norm":
        flat = x.reshape(named["N"], named["group"], -1)
        dims = [-1]
    else:
        flat = x
        dims = list(range(-len(named["normalized_shape"]), 0))
    if kind == "_fused_rms_norm":
        squares = (x * x).mean(dims, keepdim=True)
        yield from (x * x, squares, squares + eps, torch.rsqrt(squares + eps))
        yield x * torch.rsqrt(squares + eps)
        return
    mean = flat.mean(dims, keepdim=True)
    centred = flat - mean
    variance = (centred * centred).mean(dims, keepdim=True)
    yield from (mean, centred, variance, variance + eps, torch.rsqrt(variance + eps))
    yield centred * torch.rsqrt(variance + eps)
