"""Runs the rest of a graph as the model would if some of its values were different.

There are two forms. :class:`Repaired` gives an operation that failed because of precision its
float64 result. :class:`Perturbed` puts finite numbers in place of NaN.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.forgiving import theirs
from fxguard.graph.tables import SATURATES, SEES_NAN
from fxguard.graph.wide_form import NotJudged, Ran, is_float, wide_result, widened
from fxguard.plan.plan import Check, Place
from fxguard.rerun.differences import are_close, are_equal
from fxguard.rerun.two_forms import same_leaves
from fxguard.rerun.walk import SecondForm, Walk

__all__ = ["AsTheModel", "Perturbed", "RaisedOnOther", "Repaired", "perturbed", "rounded"]


class RaisedOnOther(Exception):  # noqa: N818 - an answer, not an error
    """An operation raised on other values but not on the model's, so it depends on them."""


class AsTheModel(SecondForm):
    """Runs operations as the model does, on other values."""

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return differs

    def copy_of(self, memory: Tensor) -> Tensor:
        return memory.clone()

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        if ran.before is not None:
            ran.before.restore()
        try:
            result = ran.run(*args, **kwargs)
        except theirs() as error:  # an index out of range, a matrix that is singular
            raise RaisedOnOther(f"{ran.call.kind} raised {type(error).__name__}") from error
        return trees.tree_map(_where_other, ran.result, result)


class Perturbed(AsTheModel):
    """Replaces NaN in results of some operations by numbers below or above all finite ones.

    Operations that test for NaN see the NaN.

    Args:
        starts: places of the operations, and what is measured of each.
        below: whether the new numbers are below the others.

    Attributes:
        always: whether everything that differed has ended in operations that test for NaN: then
            nothing depends on the NaN, whatever the numbers are.
    """

    def __init__(self, starts: Mapping[Place, Check], *, below: bool) -> None:
        self.starts = starts
        self.below = below
        self.always = True

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        if walk.place(node) in self.starts:
            return True
        return differs and not _tests_for_nan(walk, node)

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        check = self.starts.get(walk.place(node))
        if check is None:
            result = super().follow(walk, node, ran, args, kwargs)
            self.always = self.always and not same_leaves(result, ran.result)
            return result
        if ran.call.written:
            for operand in ran.call.written:  # everything that shares its memory is materialized
                low = walk.env[operand]
                if is_float(low):
                    walk.others[operand].copy_(perturbed(low, self.below))
            return walk.others[ran.call.in_place[0]] if ran.call.in_place else ran.result

        def at(path: tuple[int, ...], value: Any) -> Any:
            if not path:
                return perturbed(value, self.below)
            items = list(value)
            items[path[0]] = at(path[1:], items[path[0]])
            return type(value)(items)

        return at(check.path, ran.result)


def perturbed(value: Tensor, below: bool) -> Tensor:
    """A tensor with its NaN replaced by a number below or above all its finite elements."""
    finite = value[value.isfinite()]
    if value.is_complex() or not finite.numel():
        number = -1.0 if below else 1.0
    else:
        edge = float(finite.min() if below else finite.max())
        number = edge - (abs(edge) + 1) if below else edge + abs(edge) + 1
        limit = torch.finfo(value.dtype).max
        number = max(-limit, min(limit, number))
    return torch.where(value.isnan(), number, value).to(value.dtype)


def _tests_for_nan(walk: Walk, node: Node) -> bool:
    call = walk.call_of(node)
    compares_itself = call.kind in ("ne", "eq") and len(set(node.args[:2])) == 1
    return call.kind in SEES_NAN or compares_itself


class Repaired(AsTheModel):
    """Gives operations that failed because of precision their results in a wide dtype.

    Such a value stays wide from operation to operation until a result is finite in both forms, or
    fits into the model's dtype. It is then rounded, and the rest runs as in the model.

    Args:
        starts: places of the operations, and their results; None if to be computed from the model's
            operands.
        extends: whether operations that fail later are repaired as well.
        harmless: places of failing operations that are not to be repaired.
        dtype: the wide one.

    Attributes:
        island: the operations that ran in the wide dtype, in order.
        always: whether everything that differed has ended in operations that saturate: then nothing
            would be different, whatever the numbers are.
    """

    def __init__(
        self,
        starts: Mapping[Place, Tensor | None],
        *,
        extends: bool = False,
        harmless: Collection[Place] = (),
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.starts = starts
        self.extends = extends
        self.harmless = harmless
        self.dtype = dtype
        self.island: dict[Place, None] = {}
        self.always = True

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return differs or walk.place(node) in self.starts or self.extends

    def copy_of(self, memory: Tensor) -> Tensor:
        copied: Tensor = widened(memory, self.dtype).clone()
        return copied

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        place = walk.place(node)
        low = (ran.args, ran.kwargs)
        wide = place in self.starts or _is_wide((args, kwargs), low)
        if wide and not self.writes_wide(walk, ran):
            args, kwargs = rounded((args, kwargs), low)
            wide = False
        if not wide:
            result = ran.result
            if any(read in walk.others for read in node.all_input_nodes):
                result = super().follow(walk, node, ran, args, kwargs)
                self.always = self.always and not same_leaves(result, ran.result)
            may_start = self.extends and not ran.call.written and place not in self.harmless
            if not (may_start and self.fails(place, ran, result, args, kwargs)):
                return result
        if not ran.has_floats and not ran.call.written:
            self.always = False
            return self.integers(ran, args, kwargs)
        result = self.starts.get(place)
        if result is None:
            wide_args, wide_kwargs = widened((args, kwargs), self.dtype)
            result = wide_result(ran, wide_args, wide_kwargs, self.dtype)
        elif ran.call.written:
            raise NotJudged(f"{ran.call.kind} writes in place")
        if ran.call.written:  # others read the same memory, so it stays wide
            self.island[place] = None
            return result
        found = trees.tree_map(self.settled, ran.result, result)
        if same_leaves(found, ran.result):
            self.always = self.always and ran.call.kind in SATURATES
        else:
            self.island[place] = None
        return found

    def fails(self, place: Place, ran: Ran, result: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operation is to be repaired.

        Args:
            place: its place.
            ran: the operation.
            result: its result in the model's dtype.
            args: its arguments in the model's dtype.
            kwargs: likewise.
        """

        def is_bad(values: Any) -> bool:
            tensors = (x for x in trees.tree_leaves(values) if is_float(x))
            return not all(bool(x.isfinite().all()) for x in tensors)

        return is_bad(result) and not is_bad((args, kwargs))

    def writes_wide(self, walk: Walk, ran: Ran) -> bool:
        """Whether what it writes is wide; True if it writes nothing."""
        written = (each for each in ran.call.written if is_float(walk.env[each]))
        return all(walk.others[each].dtype != walk.env[each].dtype for each in written)

    def settled(self, low: Any, wide: Any) -> Any:
        """The result to continue with: the model's own, the wide one rounded, or the wide one."""
        if not is_float(low) or low.numel() == 0:
            return low
        rounded, is_exact = wide.to(low.dtype), ~wide.isfinite()
        close = are_close(low, rounded) & (low.isfinite() | is_exact)
        if bool(close.all()):
            return low
        fits = bool((rounded.isfinite() | is_exact).all())
        is_hidden = not self.extends and bool((low.isfinite() | is_exact).all())
        if fits or is_hidden:
            return torch.where(close, low, rounded)
        return torch.where(close, widened(low, self.dtype), wide)

    def integers(self, ran: Ran, args: Any, kwargs: Any) -> Any:
        """Integer results, if an operand that was bad in the model is not bad here."""

        def mixed(low: Any, other: Any) -> Any:
            if not is_float(low) or other is low:
                return widened(low, self.dtype)
            other = widened(other, self.dtype)
            return torch.where(low.isfinite(), widened(low, self.dtype), other)

        args, kwargs = trees.tree_map(mixed, (ran.args, ran.kwargs), (args, kwargs))
        result = ran.run(*args, **kwargs)
        return trees.tree_map(_where_other, ran.result, result)


def _is_wide(values: Any, low: Any) -> bool:
    """Whether an operand is still wide."""
    pairs = zip(trees.tree_leaves(values), trees.tree_leaves(low), strict=True)
    return any(is_float(x) and x.dtype != y.dtype for x, y in pairs)


def rounded(values: Any, low: Any) -> Any:
    """Operands rounded to the dtypes of the model."""
    return trees.tree_map(lambda y, x: x.to(y.dtype) if is_float(x) else x, low, values)


def _where_other(low: Any, other: Any) -> Any:
    """The other result, or the model's own if they are equal."""
    if not isinstance(low, Tensor):
        return other
    return low if _is_same(low, other) else other


def _is_same(low: Tensor, other: Tensor) -> bool:
    if low.shape != other.shape or low.dtype != other.dtype:
        return False
    return bool(are_equal(low, other).all()) if is_float(low) else torch.equal(low, other)
