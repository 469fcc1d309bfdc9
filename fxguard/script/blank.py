"""Tensors without contents, whose memory holds bad numbers by chance: `torch.empty`, until written.

A layer makes its weights in such memory, and fills them. Nothing is bad before somebody reads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from fxguard.graph import nodes
from fxguard.graph.operations import name_of
from fxguard.graph.tables import UNINITIALISED
from fxguard.measure.at_hand import version_of

__all__ = ["Blank", "Blanks"]

MOST = 64  # that are kept, before those that were written or are gone are forgotten


class Blank(NamedTuple):
    """What a call has made."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reference: weakref.ref[Tensor]
    version: int | None

    @property
    def tensor(self) -> Tensor | None:
        """The tensor, if nobody has written it."""
        tensor = self.reference()
        return None if tensor is None or version_of(tensor) != self.version else tensor


class Blanks:
    """The tensors without contents that one thread has made. It keeps none of them alive."""

    def __init__(self) -> None:
        self._all: list[Blank] = []
        self._most = MOST

    def add(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], made: Tensor
    ) -> bool:
        """Add what a call has made, if that has no contents; returns whether it was added."""
        if name_of(func) not in UNINITIALISED:
            return False
        if any(isinstance(each, Tensor) for each in nodes.leaves((args, kwargs))):
            return False  # it would be kept alive
        if len(self._all) >= self._most:
            self.are_any()
            self._most = 2 * len(self._all) + MOST
        self._all.append(Blank(func, args, kwargs, weakref.ref(made), version_of(made)))
        return True

    def are_any(self) -> bool:
        """Whether any is left that nobody has written."""
        if self._all:
            self._all = [each for each in self._all if each.tensor is not None]
        return bool(self._all)

    def are_among(self, values: Iterable[Any]) -> bool:
        """Whether one of these objects is such a tensor."""
        return not {id(each.tensor) for each in self._all}.isdisjoint(map(id, values))

    def take(self) -> list[Blank]:
        """All that are left, and let them go."""
        found, self._all = self._all, []
        return found
