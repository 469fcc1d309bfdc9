"""Which keys the masks of ``multi_head_attention_forward`` hide."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

__all__ = ["KEY_PADDING", "hidden_keys", "hide_a_row", "named_arguments"]

KEY_PADDING = "key_padding_mask"
MASKS = (KEY_PADDING, "attn_mask")
_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)


def named_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``multi_head_attention_forward`` by their names.

    Raises:
        TypeError: if it cannot be called so.
    """
    return _SIGNATURE.bind(*args, **kwargs).arguments


def hidden_keys(named: Mapping[str, Any], mask: str) -> Tensor | None:
    """What one of its masks hides: booleans of shape (samples, heads, queries, keys) or less.

    Dimensions along which nothing differs may have the size 1.

    Args:
        named: the arguments by name.
        mask: the name of one of :data:`MASKS`.

    Returns:
        The keys; None if there is no such mask.
    """
    given = named.get(mask)
    if not isinstance(given, Tensor):
        return None
    hides: Tensor = given == -math.inf if given.dtype.is_floating_point else given.bool()
    if mask == KEY_PADDING:
        return hides.reshape(-1, 1, 1, hides.shape[-1])
    if hides.dim() > 2:
        hides = hides.unflatten(0, (-1, int(named["num_heads"])))
    else:
        hides = hides[None, None]
    return hides


def hide_a_row(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the masks of a call together hide all keys from some query."""
    named = named_arguments(args, kwargs)
    hidden = [each for mask in MASKS if (each := hidden_keys(named, mask)) is not None]
    if not hidden:
        return False
    return bool(functools.reduce(Tensor.logical_or, hidden).all(-1).any())
