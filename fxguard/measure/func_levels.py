"""``torch.func`` regions: stretches of a graph that run under ``vmap``, ``grad`` or the like.

Tensors computed in them are wrapped in levels of batching and differentiation, which must stay
inside. ``torch.func`` is built on ``torch._C._functorch`` and ``torch._C._autograd``; there is no
public way to ask about levels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from fxguard.torch_names import (
    allow_saved_tensor_hooks,
    forbid_saved_tensor_hooks,
    func_level,
    func_level_count,
    func_level_of,
    func_levels_left,
    is_of_func_level,
    is_of_vmap,
    leave_func_levels,
    vmapped_dim,
    why_saved_tensor_hooks_are_forbidden,
    without_func_level,
)

__all__ = [
    "ENTERS",
    "LEAVES",
    "Sample",
    "are_levels_open",
    "has_levels",
    "levels_left",
    "levels_opened_by",
    "levels_restored",
    "without_levels",
]

KINDS = ("vmap", "grad", "jvp", "func", "functionalize")
ENTERS = frozenset(f"_{kind}_increment_nesting" for kind in KINDS)
LEAVES = frozenset(f"_{kind}_decrement_nesting" for kind in KINDS)


def are_levels_open() -> bool:
    """Whether the current code runs inside a region."""
    return func_level() is not None


def levels_opened_by(target: object) -> int:
    """How many levels a call opens: 1, 0, or -1 if it closes one."""
    name = getattr(target, "__name__", "")
    return (name in ENTERS) - (name in LEAVES)


def has_levels(value: Tensor) -> bool:
    """Whether a tensor was made inside an open region."""
    return bool(is_of_func_level(value))


def without_levels(value: Tensor) -> Tensor:
    """The tensor inside all levels.

    A batched dimension is then an ordinary one, at any position: the range is the same.
    """
    while has_levels(value):
        value = without_func_level(value)
    return value


class Sample:
    """One of the samples over which ``vmap`` maps: the tensors inside all levels, of that sample.

    Where one ``vmap`` runs inside another, it is one sample of each.

    Args:
        bad: a tensor of which the first sample that is not finite is taken; None for the first
            of all.
    """

    def __init__(self, bad: Tensor | None = None) -> None:
        self._indices: dict[int, int] = {}  # by level
        self._sizes: dict[int, int] = {}  # likewise, how many samples there are
        if bad is None:
            return
        whole, dims = self._whole(bad)
        is_bad = ~whole.isfinite()
        if dims and is_bad.any():
            first = is_bad.permute(
                *(dims[level] for level in sorted(dims)),
                *(each for each in range(whole.ndim) if each not in dims.values()),
            ).nonzero()[0]
            self._indices = dict(zip(sorted(dims), first.tolist(), strict=False))

    @property
    def is_mapped(self) -> bool:
        """Whether some tensor was mapped over."""
        return bool(self._sizes)

    def of(self, value: Tensor) -> Tensor:
        """What a tensor is for that sample. Nothing else may be open.

        Raises:
            ValueError: if it has another number of samples than others.
        """
        whole, dims = self._whole(value)
        for level, dim in sorted(dims.items(), key=lambda item: -item[1]):
            whole = whole.select(dim, self._indices.get(level, 0))
        return whole

    def _whole(self, value: Tensor) -> tuple[Tensor, dict[int, int]]:
        """The tensor inside all levels, and the dimension of samples of each level."""
        dims: dict[int, int] = {}
        while has_levels(value):
            if is_of_vmap(value):
                at = vmapped_dim(value)  # further in, it is one more dimension
                dims = {level: dim + (dim >= at) for level, dim in dims.items()}
                dims[func_level_of(value)] = at
            value = without_func_level(value)
        for level, dim in dims.items():
            if self._sizes.setdefault(level, value.shape[dim]) != value.shape[dim]:
                raise ValueError("two transforms, one after the other")
        return value, dims


def levels_left() -> AbstractContextManager[Any]:
    """A block outside of all open regions, for tensors that were made there, or are to last."""
    return func_levels_left() if are_levels_open() else contextlib.nullcontext()


@contextlib.contextmanager
def levels_restored() -> Iterator[None]:
    """Close the regions that are still open when an exception ends this block."""
    depth, dual = func_level_count(), forward_ad._current_level
    # grad regions forbid saved tensor hooks, such as those of activation checkpointing.
    forbidden = why_saved_tensor_hooks_are_forbidden()
    try:
        yield
    finally:
        if forbidden is None:
            allow_saved_tensor_hooks()
        else:
            forbid_saved_tensor_hooks(forbidden)
        while forward_ad._current_level > dual:
            forward_ad.exit_dual_level()
        leave_func_levels(depth)
