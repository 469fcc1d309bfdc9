"""Derivatives of forward mode, as of ``jvp`` and ``jacfwd``: no call has them as its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import forward_ad

from fxguard.graph.operations import name_of
from fxguard.measure.at_hand import range_of
from fxguard.measure.func_levels import has_levels, without_levels
from fxguard.records import Range
from fxguard.script.noted import flat
from fxguard.script.operations import PlainRecord, Record, is_record, pair_of, place_of
from fxguard.torch_names import is_of_vmap, without_func_level

__all__ = ["FORWARD_MODE", "Derived", "Tangents", "derivative_of", "is_not_finite", "pair_inside"]

FORWARD_MODE = "derivative"  # what a derivative of it is called: "derivative of sqrt"
MOST_KNOWN = 4096  # duals of which the derivative is bad


class Derived(NamedTuple):
    """An operation that has made the derivative of its result bad."""

    func: Callable[..., Any]
    place: tuple[str, int]  # of its call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tangent: Tensor  # that derivative


class Tangents:
    """What first made a derivative bad, of those that other operations have carried along since.

    Args:
        derived: is given the record of that.
    """

    def __init__(self, derived: Callable[[PlainRecord, Derived], object]) -> None:
        self._derived = derived
        # By id of the record of a dual: that record, and of what first made its derivative bad.
        self._first: dict[int, tuple[Record, PlainRecord]] = {}
        self._in_backward: PlainRecord | None = None  # of what a backward made, and not yet gave

    def of(self, read: Any) -> PlainRecord | None:
        """What made the derivative of a dual bad, of the records of those that were read."""
        known = (self._first.get(id(each)) for each in flat(read))
        return next((first for _, first in filter(None, known)), None)

    def look(
        self, record: PlainRecord, dual: Tensor, read: Any, args: Any, kwargs: dict[str, Any]
    ) -> None:
        """Look at the derivative of what an operation has made.

        Args:
            record: of the operation.
            dual: what it made.
            read: the records of what it read.
            args: its arguments.
            kwargs: its keywords.
        """
        if forward_ad._current_level < 0:
            return
        first, self._in_backward = self._in_backward, None  # what a backward gives shows none
        tangent = None if is_not_finite(dual) else _tangent_of(dual)
        if first is None and tangent is not None and is_not_finite(tangent):
            first = self.of(read)
            if first is None:
                place = record.code, record.last
                first = derivative_of(FORWARD_MODE, record.func, place, record.args, tangent)
                how = Derived(record.func, place_of(record), args, kwargs, tangent)
                self._derived(first, how)
        if first is not None:
            if len(self._first) > MOST_KNOWN:
                self._first.clear()
            self._first[id(record)] = record, first

    def look_backward(self, of: Record, made: Iterable[Any]) -> None:
        """Look at the derivatives of what the backward of an operation has made.

        Args:
            of: the record of the operation.
            made: its gradients.
        """
        if forward_ad._current_level < 0 or self._in_backward is not None:
            return
        for each in made:
            tangent = _tangent_of(each) if isinstance(each, Tensor) else None
            if tangent is not None and is_not_finite(tangent):
                place = of.code, of.last
                backward = derivative_of("backward", of.func, place, of.args, tangent)
                func = backward.func
                self._in_backward = derivative_of(FORWARD_MODE, func, place, of.args, tangent)
                return


def _tangent_of(tensor: Tensor) -> Tensor | None:
    """The derivative that a tensor carries, of all samples."""
    while has_levels(tensor) and is_of_vmap(tensor):  # `vmap` cannot unpack it
        tensor = without_func_level(tensor)
    try:
        tangent: Tensor | None = forward_ad.unpack_dual(tensor, level=0).tangent
    except RuntimeError:  # of another `vmap`
        tangent = None
    return tangent


def derivative_of(
    kind: str, func: Callable[..., Any], place: tuple[CodeType, int], read: Any, made: Tensor
) -> PlainRecord:
    """The record of a derivative of an operation, which read what that has read.

    Args:
        kind: such as "backward".
        func: the operation.
        place: of its call.
        read: its arguments, as a record keeps them.
        made: the derivative.
    """

    def derivative(*args: Any) -> None:
        """Stands for it: its name is all that is asked for."""

    derivative.__name__ = f"{kind} of {name_of(func)}"
    pair = pair_inside(made)
    assert pair is not None
    depth = max((each.depth for each in flat(read) if is_record(each)), default=-1) + 1
    return PlainRecord(derivative, *place, read, {}, pair, depth, None, made)


def is_not_finite(value: Any) -> bool:
    """Whether a value is a tensor that holds NaN or infinities, inside all levels."""
    pair = pair_inside(value) if isinstance(value, Tensor) else None
    return pair is not None and not math.isfinite(pair[1])


def pair_inside(tensor: Tensor) -> tuple[float, float] | None:
    """The smallest and the largest magnitude of a tensor inside all levels; None if unknown."""
    tensor = without_levels(tensor)
    if (pair := pair_of(tensor)) is not None:
        return pair
    found = range_of(tensor)
    return (found.abs_min, found.abs_max) if isinstance(found, Range) else None
