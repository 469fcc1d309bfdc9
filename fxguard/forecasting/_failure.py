"""Why a result in a dtype differs from its float64 result, in numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxguard.formats import FORMATS
from fxguard.graph.poles import plain
from fxguard.graph.tables import VANISHES
from fxguard.graph.wide_form import Ran, is_float
from fxguard.measure.at_hand import dtype_of
from fxguard.plan.plan import Place
from fxguard.rerun.differences import relative_error

__all__ = [
    "ROUNDINGS",
    "SHARE",
    "Failure",
    "Failures",
    "failure_of",
    "lost_operand",
    "share_of",
]

ROUNDINGS = 32  # in units of the dtype's eps: a single operation should have a smaller error
SHARE = 0.5  # of elements that are not 0 in float64, and 0 in the dtype

# Operations whose result is one operand if the other one is lost.
SUMS = frozenset({"add", "sub"})
SCALES = frozenset({"mul", "div", "true_divide"})


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a result is wrong, in numbers."""

    problem: str  # "overflow", "underflow", "rounding" or "nan"
    dtype: str  # of the result
    # The largest magnitude in float64; for an underflow, the largest one that is lost.
    needed: float
    share: float  # of elements
    error: float  # the largest, relative to the largest magnitude; inf if one is not finite
    operand: str = ""  # what is lost, "input[1]" or a number; "" if the result fails

    @property
    def severity(self) -> tuple[int, float]:
        """A sort key: the worst failure has the largest."""
        rank = ("rounding", "underflow", "nan", "overflow").index(self.problem)
        return rank, self.needed if self.problem == "overflow" else self.share


@dataclass(eq=False)
class Failures:
    """Which operations of a graph fail, in order of execution, and which are not judged."""

    found: dict[Place, Failure] = field(default_factory=dict)
    not_judged: dict[Place, str] = field(default_factory=dict)  # and why
    kinds: dict[Place, str] = field(default_factory=dict)  # of each operation in one of the two

    def note(self, place: Place, ran: Ran, failure: Failure | None) -> None:
        """Keep the worst failure of an operation, which may run many times in a loop."""
        if failure is not None:
            known = self.found.get(place, failure)
            self.found[place] = max(known, failure, key=lambda each: each.severity)
            self.kinds[place] = ran.call.kind

    def skip(self, place: Place, ran: Ran, reason: str) -> None:
        """Note that an operation has no float64 form."""
        self.not_judged[place] = reason
        self.kinds[place] = ran.call.kind


def failure_of(
    low: Tensor, wide: Tensor, kind: str = "", literals: tuple[float, ...] = ()
) -> Failure | None:
    """Why a tensor differs from its float64 value; None if only by roundings.

    Args:
        low: the tensor in its dtype.
        wide: the same in float64.
        kind: kind of its operation: a softmax may make small numbers 0.
        literals: Python numbers among the operation's arguments: with an eps that is 0 in the
            dtype, a single element that becomes 0 is an underflow.

    Example:
        >>> failure_of(torch.tensor([math.inf]).half(), torch.tensor([1e5]).double())
        Failure(problem='overflow', dtype='float16', needed=100000.0, share=1.0, error=inf, ...)
    """
    if low.is_complex() or not low.numel():
        return None
    dtype, is_meant = dtype_of(low), wide.isfinite()
    sizes = wide.abs().where(is_meant, 0.0)
    bad = is_meant & ~low.isfinite()
    if bool(bad.any()):
        problem = "nan" if bool((bad & low.isnan()).any()) else "overflow"
        needed = float(sizes.where(bad, 0.0).max())
        return Failure(problem, dtype, needed, share_of(bad, is_meant), math.inf)
    error = relative_error(low, wide)
    if kind not in VANISHES:
        lost = (low == 0) & (sizes > 0)
        share = share_of(lost, sizes > 0)
        has_no_eps = dtype in FORMATS and any(map(FORMATS[dtype].loses, literals))
        if share >= SHARE or (share and has_no_eps):
            return Failure("underflow", dtype, float(sizes.where(lost, 0.0).max()), share, error)
    if error > ROUNDINGS * torch.finfo(low.dtype).eps:
        return Failure("rounding", dtype, float(sizes.max()), 1.0, error)
    return None


def lost_operand(ran: Ran, args: Any, kwargs: Any, low: Any, wide: Any) -> Failure | None:
    """An addend or a factor that the result does not depend on; None if there is none.

    Wherever it is not 0 (for a factor, not 1), the result is exactly the other operand. In float32
    at least half of it would count. An added Python number is an eps, which may be lost.

    Args:
        ran: the operation.
        args: its arguments in the dtype.
        kwargs: likewise; an addition with ``alpha`` is ignored.
        low: its result in the dtype.
        wide: its result in float64.
    """
    kind = plain(ran.call.kind)
    if kind not in SUMS | SCALES or kwargs or len(args) != 2 or ran.call.written:
        return None
    if not is_float(low) or low.is_complex() or not low.numel():
        return None
    wide_of = [x.to(torch.float64) if isinstance(x, Tensor) else x for x in args]
    for position in (1, 0):
        lost, other = wide_of[position], wide_of[1 - position]
        is_sum = kind in SUMS
        if not isinstance(lost, Tensor) and (is_sum or not isinstance(lost, float)):
            continue
        if not position and kind not in (*SUMS, "mul"):
            continue  # 1 / x is not x
        kept = torch.as_tensor(-other if kind == "sub" and not position else other)
        lost = torch.as_tensor(lost)
        counts = (lost != 0 if is_sum else (lost != 1) & (kept != 0)) & low.isfinite()
        is_kept = low == kept.to(low.dtype)
        if not bool(counts.any()) or not bool(is_kept.where(counts, True).all()):
            continue
        in_float32 = wide.to(torch.float32) != kept.to(torch.float32)
        if share_of(counts & in_float32, counts) >= SHARE:
            size = float(lost.abs().max())
            error = relative_error(low, wide)
            before = sum(isinstance(x, Tensor) for x in args[:position])
            name = f"input[{before}]" if isinstance(args[position], Tensor) else str(args[position])
            return Failure("rounding", dtype_of(low), size, 1.0, error, name)
    return None


def share_of(some: Tensor, of: Tensor) -> float:
    """The number of elements in ``some``, as a share of those in ``of``."""
    return float(some.sum()) / max(1, int(of.sum()))
