"""The tensors that backwards begin with, for tools that ask for them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxguard import trees
from fxguard.install import backward_function
from fxguard.install.while_needed import WhileNeeded
from fxguard.source.lines import Place, calling_line

__all__ = ["Hears", "hear_of_backwards"]

# Given the roots, and the line; may return a block in which the backward is to run.
Hears = Callable[[list[Tensor], Place | None], contextlib.AbstractContextManager[None] | None]

_hearers: list[weakref.WeakMethod[Hears]] = []


def hear_of_backwards(hearer: Hears) -> Callable[[], None]:
    """Let a method hear of each backward before it runs; the result ends this."""
    reference = weakref.WeakMethod(hearer)
    _hearers.append(reference)
    _change.begin()

    def end() -> None:
        if reference in _hearers:
            _hearers.remove(reference)
            _change.end()

    return end


def _hearing(torchs: Any) -> Any:
    @functools.wraps(torchs)
    @torch.compiler.disable
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        roots = [x for x in trees.tree_leaves(tensors) if isinstance(x, Tensor)]
        place = calling_line()
        with contextlib.ExitStack() as blocks:
            for reference in tuple(_hearers):
                hearer = reference()
                block = None if hearer is None else hearer(roots, place)
                if block is not None:
                    blocks.enter_context(block)
            return torchs(tensors, *args, **kwargs)

    return backward


_change = WhileNeeded(functools.partial(backward_function.stand_in, _hearing))
