"""Runs a captured graph in another dtype to find the operations that fail there.

Each operation runs in the dtype on the results of earlier ones, and in float64 on the same
operands. A failing result is replaced by the float64 result, so that one run finds all failures: an
operation does not fail because of an earlier one. A result that is bad in both, such as log(0),
failed because of earlier roundings if a run in float64 throughout finds nothing bad there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from fxguard import trees
from fxguard.forecasting._failure import (
    SHARE,
    Failure,
    Failures,
    failure_of,
    lost_operand,
    share_of,
)
from fxguard.forecasting._ranges import rows_of, tensors_in
from fxguard.graph.nodes import elements_of, leaves
from fxguard.graph.wide_form import NotJudged, Ran, is_float, wide_result, widened
from fxguard.measure.at_hand import dtype_of
from fxguard.plan.plan import Place
from fxguard.records import Row
from fxguard.rerun.other_values import AsTheModel, Repaired, rounded
from fxguard.rerun.walk import Walk
from fxguard.rerun.wide_run import WideForm

__all__ = ["InDtype", "Reference"]


class Reference(WideForm):
    """The graph in float64 throughout: results that are bad there are rightly bad.

    Attributes:
        bad: places of operations, with how many elements of their results are not finite.
        rows: rows of each operation, with the ranges here and the dtypes of the graph; in a loop,
            those of its last turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bad: dict[Place, int] = {}
        self.rows: dict[Place, tuple[Row, ...]] = {}

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        place = walk.place(node)
        read = tensors_in((args, kwargs))  # before anything writes it
        inputs = rows_of("input", read, tensors_in((ran.args, ran.kwargs)).values())
        result = super().follow(walk, node, ran, args, kwargs)
        if place in self.taken_over and not ran.call.written:
            # The model's result may be bad because of its operands.
            low = rounded((args, kwargs), (ran.args, ran.kwargs))
            result = widened(_AS_THE_MODEL.follow(walk, node, ran, *low), self.dtype)
        self.bad[place] = max(_count_of_bad(result), self.bad.get(place, 0))
        made = (x for _, x in elements_of(ran.result))
        outputs = rows_of("output", dict(elements_of(result)), made)
        self.rows[place] = (*inputs, *outputs)
        return result


_AS_THE_MODEL = AsTheModel()


class InDtype(Repaired):
    """The graph in the dtype of its tensors, with failing results replaced by float64 ones.

    Args:
        by_right: places of operations, with how many bad elements of their results are not due to
            the dtype.

    Attributes:
        failures: which operations fail, and why.
    """

    def __init__(self, by_right: Mapping[Place, int]) -> None:
        super().__init__({}, extends=True, dtype=torch.float64)
        self.by_right = by_right
        self.failures = Failures()
        self._was_lost = False  # whether the running operation has an underflow

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return True

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        place = walk.place(node)
        self._was_lost = False
        try:
            result = super().follow(walk, node, ran, args, kwargs)
        except NotJudged as reason:
            if ran.call.written:
                raise
            self.failures.skip(place, ran, str(reason))
            args, kwargs = rounded((args, kwargs), (ran.args, ran.kwargs))
            return AsTheModel.follow(self, walk, node, ran, args, kwargs)
        self.failures.note(place, ran, _too_large(ran.result, result))
        return result

    def fails(self, place: Place, ran: Ran, result: Any, args: Any, kwargs: Any) -> bool:
        if not ran.has_floats:
            return False
        try:
            wide_args, wide_kwargs = widened((args, kwargs), self.dtype)
            wide = wide_result(ran, wide_args, wide_kwargs, self.dtype)
        except NotJudged as reason:
            self.failures.skip(place, ran, str(reason))
            return False
        pairs = zip(leaves(result), leaves(wide), strict=True)
        found = [
            failure_of(low, high, ran.call.kind, ran.call.literals)
            for low, high in pairs
            if is_float(low)
        ]
        failures = [failure for failure in found if failure is not None]
        if not failures and (lost := lost_operand(ran, args, kwargs, result, wide)) is not None:
            self.failures.note(place, ran, lost)
        for failure in failures:
            self.failures.note(place, ran, failure)
            self._was_lost = self._was_lost or failure.problem == "underflow"
        count = _count_of_bad(result)
        is_bad = not failures and super().fails(place, ran, result, args, kwargs)
        if is_bad and count > self.by_right.get(place, count):
            made = next(x for x in leaves(result) if _count_of_bad(x))
            share = _count_of_bad(made) / made.numel()
            failure = Failure("rounding", dtype_of(made), math.inf, share, math.inf)
            self.failures.note(place, ran, failure)
        return bool(failures)

    def settled(self, low: Any, wide: Any) -> Any:
        """Stays wide also if the dtype would make it 0."""
        result = super().settled(low, wide)
        if not is_float(low) or result.dtype != low.dtype or low.is_complex():
            return result
        share = share_of((result == 0) & (wide != 0), wide != 0)
        stays = share > 0 if self._was_lost else share >= SHARE
        return wide if stays else result


def _too_large(low: Any, result: Any) -> Failure | None:
    """The failure of a result that stays wide because its dtype cannot hold it."""
    for one, other in zip(leaves(low), leaves(result), strict=True):
        if not is_float(one) or other.dtype == one.dtype or one.is_complex():
            continue
        sizes = other.detach().abs().where(other.isfinite(), 0.0)
        beyond = other.isfinite() & ~other.to(one.dtype).isfinite()
        if bool(beyond.any()):
            share = share_of(beyond, other.isfinite())
            return Failure("overflow", dtype_of(one), float(sizes.max()), share, math.inf)
    return None


def _count_of_bad(values: Any) -> int:
    tensors = (x for x in trees.tree_leaves(values) if is_float(x))
    return sum(x.numel() - int(x.isfinite().sum()) for x in tensors)
