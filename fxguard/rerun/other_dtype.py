"""A captured graph in a dtype: which of its operations fail for what that dtype holds.

Each operation runs in the dtype, on what earlier ones left, and in float64 on the same operands.
What fails is replaced by what float64 gives, so that one run finds all of them: the next operation
does not fail for the one before it. What is bad in both, as log(0) is, failed for the roundings
before it where a run in float64 from the beginning finds nothing bad there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Node

from fxguard.formats import FORMATS
from fxguard.graph.nodes import leaves
from fxguard.graph.tables import VANISHES
from fxguard.graph.wide_form import NotJudged, Ran, is_float, wide_result, widened
from fxguard.measure.at_hand import dtype_of
from fxguard.plan.plan import Place
from fxguard.rerun.differences import relative_error
from fxguard.rerun.lockstep import Lockstep
from fxguard.rerun.other_values import AsTheModel, Repaired, rounded
from fxguard.rerun.wide_run import WideForm

__all__ = ["ROUNDINGS", "Failure", "InDtype", "Reference", "failure_of"]

ROUNDINGS = 32  # in units of the dtype's eps: an error from here on is none of one operation alone
SHARE = 0.5  # of elements that are not 0 in float64, and 0 in the dtype


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a result is not what it should be, in numbers."""

    problem: str  # "overflow", "underflow", "rounding" or "nan"
    dtype: str  # that of the result
    # The largest magnitude in float64; of an underflow the largest one that is lost.
    needed: float
    share: float  # of elements
    error: float  # the largest, relative to the largest magnitude; inf where one is not finite

    @property
    def severity(self) -> tuple[int, float]:
        """Sorts failures: the worst has the largest."""
        rank = ("rounding", "underflow", "nan", "overflow").index(self.problem)
        return rank, self.needed if self.problem == "overflow" else self.share


class Reference(WideForm):
    """The graph in float64 from its beginning: what is bad there is bad by right.

    Attributes:
        bad: where operations stand, and how many elements of their results are not finite.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bad: dict[Place, int] = {}

    def follow(self, step: Lockstep, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        result = super().follow(step, node, ran, args, kwargs)
        place = step.place(node)
        if place in self.taken_over and not ran.call.written:
            # What the model made there may be bad for what it was given.
            low = rounded((args, kwargs), (ran.args, ran.kwargs))
            result = widened(_AS_THE_MODEL.follow(step, node, ran, *low), self.dtype)
        self.bad[place] = max(_count_of_bad(result), self.bad.get(place, 0))
        return result


_AS_THE_MODEL = AsTheModel()


class InDtype(Repaired):
    """The graph once more, with what fails in the dtype of its tensors as it is in float64.

    Args:
        by_right: where operations stand, and how many bad elements of their results are no fault
            of the dtype.

    Attributes:
        failures: where operations stand that fail, and why, in order of execution.
        not_judged: where operations stand that have no float64 form, and why.
        kinds: the name of each operation that is in one of the two.
    """

    def __init__(self, by_right: Mapping[Place, int]) -> None:
        super().__init__({}, extends=True, dtype=torch.float64)
        self.by_right = by_right
        self.failures: dict[Place, Failure] = {}
        self.not_judged: dict[Place, str] = {}
        self.kinds: dict[Place, str] = {}
        self._was_lost = False  # what runs now has an underflow

    def wants(self, step: Lockstep, node: Node, differs: bool) -> bool:
        return True

    def follow(self, step: Lockstep, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        place = step.place(node)
        self._was_lost = False
        try:
            result = super().follow(step, node, ran, args, kwargs)
        except NotJudged as reason:
            if ran.call.written:
                raise
            self.skip(place, ran, str(reason))
            args, kwargs = rounded((args, kwargs), (ran.args, ran.kwargs))
            return AsTheModel.follow(self, step, node, ran, args, kwargs)
        self.note(place, ran, _too_large(ran.result, result))
        return result

    def fails(self, place: Place, ran: Ran, result: Any, args: Any, kwargs: Any) -> bool:
        if not ran.has_floats:
            return False
        try:
            wide_args, wide_kwargs = widened((args, kwargs), self.dtype)
            wide = wide_result(ran, wide_args, wide_kwargs, self.dtype)
        except NotJudged as reason:
            self.skip(place, ran, str(reason))
            return False
        pairs = zip(leaves(result), leaves(wide), strict=True)
        found = [
            failure_of(low, high, ran.call.kind, ran.call.literals)
            for low, high in pairs
            if is_float(low)
        ]
        failures = [failure for failure in found if failure is not None]
        for failure in failures:
            self.note(place, ran, failure)
            self._was_lost = self._was_lost or failure.problem == "underflow"
        count = _count_of_bad(result)
        is_bad = not failures and super().fails(place, ran, result, args, kwargs)
        if is_bad and count > self.by_right.get(place, count):
            made = next(x for x in leaves(result) if _count_of_bad(x))
            share = _count_of_bad(made) / made.numel()
            self.note(place, ran, Failure("rounding", dtype_of(made), math.inf, share, math.inf))
        return bool(failures)

    def settled(self, low: Any, wide: Any) -> Any:
        """Also wide where the dtype would make it 0."""
        result = super().settled(low, wide)
        if not is_float(low) or result.dtype != low.dtype or low.is_complex():
            return result
        share = _share((result == 0) & (wide != 0), wide != 0)
        stays = share > 0 if self._was_lost else share >= SHARE
        return wide if stays else result

    def note(self, place: Place, ran: Ran, failure: Failure | None) -> None:
        """Keep the worst failure of an operation; in a loop it runs many times."""
        if failure is not None:
            known = self.failures.get(place, failure)
            self.failures[place] = max(known, failure, key=lambda each: each.severity)
            self.kinds[place] = ran.call.kind

    def skip(self, place: Place, ran: Ran, reason: str) -> None:
        """Note that an operation has no float64 form."""
        self.not_judged[place] = reason
        self.kinds[place] = ran.call.kind


def failure_of(
    low: Tensor, wide: Tensor, kind: str = "", literals: tuple[float, ...] = ()
) -> Failure | None:
    """Why a tensor is not what it is in float64; None where it is, but for roundings.

    Args:
        low: in its dtype.
        wide: the same in float64.
        kind: of the operation that made it: a softmax may make small numbers 0.
        literals: Python numbers that it was given: an eps that is 0 in the dtype makes one element
            that becomes 0 an underflow.

    Example:
        >>> failure_of(torch.tensor([math.inf]).half(), torch.tensor([1e5]).double())
        Failure(problem='overflow', dtype='float16', needed=100000.0, share=1.0, error=inf)
    """
    if low.is_complex() or not low.numel():
        return None
    dtype, is_meant = dtype_of(low), wide.isfinite()
    sizes = wide.abs().where(is_meant, 0.0)
    bad = is_meant & ~low.isfinite()
    if bool(bad.any()):
        problem = "nan" if bool((bad & low.isnan()).any()) else "overflow"
        needed = float(sizes.where(bad, 0.0).max())
        return Failure(problem, dtype, needed, _share(bad, is_meant), math.inf)
    error = relative_error(low, wide)
    if kind not in VANISHES:
        lost = (low == 0) & (sizes > 0)
        share = _share(lost, sizes > 0)
        has_no_eps = dtype in FORMATS and any(map(FORMATS[dtype].loses, literals))
        if share >= SHARE or (share and has_no_eps):
            return Failure("underflow", dtype, float(sizes.where(lost, 0.0).max()), share, error)
    if error > ROUNDINGS * torch.finfo(low.dtype).eps:
        return Failure("rounding", dtype, float(sizes.max()), 1.0, error)
    return None


def _too_large(low: Any, result: Any) -> Failure | None:
    """The failure of a result that stays wide because its dtype does not hold it."""
    for one, other in zip(leaves(low), leaves(result), strict=True):
        if not is_float(one) or other.dtype == one.dtype or one.is_complex():
            continue
        sizes = other.detach().abs().where(other.isfinite(), 0.0)
        beyond = other.isfinite() & ~other.to(one.dtype).isfinite()
        if bool(beyond.any()):
            share = _share(beyond, other.isfinite())
            return Failure("overflow", dtype_of(one), float(sizes.max()), share, math.inf)
    return None


def _count_of_bad(values: Any) -> int:
    tensors = (x for x in pytree.tree_leaves(values) if is_float(x))
    return sum(x.numel() - int(x.isfinite().sum()) for x in tensors)


def _share(some: Tensor, of: Tensor) -> float:
    return float(some.sum()) / max(1, int(of.sum()))
