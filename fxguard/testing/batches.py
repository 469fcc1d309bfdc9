"""Batches that look like an example, for hypothesis."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from fxguard import trees
from fxguard.testing.strategies import LAYOUTS, tensors

__all__ = ["like"]

DENSE = LAYOUTS[:2]  # layouts for models that call `view` on their inputs


def like(
    example: Any,
    *,
    min_value: float | None = None,
    max_value: float | None = None,
    overrides: Mapping[str, SearchStrategy[Any]] | None = None,
) -> SearchStrategy[Any]:
    """Batches that a model accepts if it accepts this one: other numbers in the same containers.

    - Floating-point tensors are drawn from ``min_value`` to ``max_value``, by default as far from
      zero as the example's own largest magnitude.
    - Integers are drawn from the example's smallest to its largest one, negative ones only from
      those that the example holds (-100 in labels).
    - Booleans, and integers that are all 0 or 1 under a name with "mask" in it, are masks: if no
      row of the example is empty, no drawn row is empty.
    - Anything other than a tensor stays. Tensors are contiguous in memory.

    Args:
        example: a tensor, or nested tuples, lists, dicts and dataclasses that torch's pytree knows.
        min_value: for all floating-point tensors.
        max_value: likewise.
        overrides: strategies for single tensors, by a glob for their place: ``"labels"``,
            ``"images.0"``.

    Example:
        >>> @given(like(batch, overrides={"labels": st.just(batch["labels"])}))
        ... def test_model(inputs):
        ...     assert_finite(model, **inputs)
    """
    if isinstance(example, Mapping):
        example = dict(example)  # tokenizers return their own kinds of mapping
    leaves, spec = trees.tree_flatten_with_path(example)
    drawn = []
    for path, leaf in leaves:
        place = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        chosen = [s for glob, s in (overrides or {}).items() if fnmatchcase(place, glob)]
        drawn.append(chosen[0] if chosen else _varied(leaf, place, min_value, max_value))
    return st.tuples(*drawn).map(lambda values: trees.tree_unflatten(values, spec))


def _varied(
    leaf: Any, place: str, min_value: float | None, max_value: float | None
) -> SearchStrategy[Any]:
    if not isinstance(leaf, Tensor) or leaf.numel() == 0:
        return st.just(leaf)
    shape = tuple(leaf.shape)
    if leaf.is_floating_point() or leaf.is_complex():
        wide = leaf.detach().abs().double()
        bound = float(wide[wide.isfinite()].max()) if bool(wide.isfinite().any()) else 1.0
        low = -bound if min_value is None else min_value
        high = bound if max_value is None else max_value
        drawn = tensors(leaf.dtype, shape, min_value=low, max_value=high, layouts=DENSE)
    elif leaf.dtype is torch.bool or ("mask" in place and set(leaf.unique().tolist()) <= {0, 1}):
        drawn = tensors(leaf.dtype, shape, min_value=0, max_value=1, layouts=DENSE)
        if leaf.dim() and bool(leaf.bool().any(-1).all()):
            drawn = drawn.map(_without_empty_rows)
    else:
        known = leaf.unique().tolist()
        ids = st.integers(max(0, known[0]), known[-1]) if known[-1] >= 0 else st.nothing()
        negative = [value for value in known if value < 0]
        one = st.one_of(ids, st.sampled_from(negative)) if negative else ids
        drawn = tensors(leaf.dtype, shape, elements=one, layouts=DENSE)
    return drawn.map(lambda value: value.to(leaf.device))


def _without_empty_rows(mask: Tensor) -> Tensor:
    empty = ~mask.bool().any(-1, keepdim=True)
    return torch.where(empty, torch.ones_like(mask), mask)
