"""Tensors without contents, whose memory holds bad numbers by chance: `torch.empty`, until written.

A layer makes its weights in such memory, and fills them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fxguard.graph.operations import name_of
from fxguard.graph.tables import UNINITIALISED
from fxguard.measure.at_hand import version_of
from fxguard.script.because_of import is_bad
from fxguard.torch_names import DisableTorchFunction

__all__ = ["Blanks", "is_blank"]

MOST = 64  # that are kept, before those that were written or are gone are forgotten


def is_blank(func: Callable[..., Any]) -> bool:
    """Whether a function makes tensors without contents."""
    return name_of(func) in UNINITIALISED


class Blanks:
    """Such tensors of one thread that hold bad numbers. It keeps none of them alive."""

    def __init__(self) -> None:
        self._all: list[tuple[weakref.ref[Tensor], int | None]] = []  # with their versions
        self._most = MOST

    def add(self, made: Tensor) -> None:
        """Add one."""
        if len(self._all) >= self._most:
            self.are_any()
            self._most = 2 * len(self._all) + MOST
        self._all.append((weakref.ref(made), version_of(made)))

    def are_any(self) -> bool:
        """Whether one is left that holds bad numbers."""
        with DisableTorchFunction():
            self._all = [each for each in self._all if _is_left(*each)]
        return bool(self._all)


def _is_left(reference: weakref.ref[Tensor], version: int | None) -> bool:
    tensor = reference()
    return tensor is not None and (version_of(tensor) == version or is_bad(tensor))
