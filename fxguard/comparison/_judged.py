"""One operation in both models: how far apart the results are, and whether roundings explain it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.comparison._evaluated import at_limit, evaluated, in_float64, spread, with_eps_of
from fxguard.comparison._kernels import rounded_inside
from fxguard.comparison._recorded import Made
from fxguard.comparison._rounding import (
    apart,
    beyond,
    error_of,
    is_same,
    share_of_rounding,
    unit_of,
)
from fxguard.comparison.elements import Apart, Compared
from fxguard.forgiving import theirs
from fxguard.graph.wide_form import NotJudged, Ran, is_float
from fxguard.measure.at_hand import dtype_of

__all__ = ["Judge", "Judged", "Sides", "reason_of_kernel"]

# Tolerance where float64 has no answer, in roundings of the largest magnitude.
WITHOUT_FLOAT64 = 64


@dataclass(frozen=True, slots=True)
class Sides:
    """One operation in both models."""

    made: Made  # in A
    ran: Ran  # in B, on B's own operands
    node: Node  # in B
    exact: tuple[Any, Any]  # arguments of B's operation: A's values, in A's dtypes
    own: tuple[Any, Any]  # the same in B's dtypes, with B's weights
    actual: list[Any]  # what B's operation made of B's own operands
    is_wired_alike: bool  # both read the results of operations that are aligned


@dataclass(frozen=True, slots=True)
class Judged:
    """How far apart an operation's results are."""

    found: Compared
    is_program: bool  # whether the reason is that the two differ on the same operands in float64


class Judge:
    """Compares operations.

    Args:
        tolerance: the largest own error that is not significant, relative to the largest
            magnitude; None: what roundings explain.

    Attributes:
        chose_otherwise: operations whose integers or booleans differ between the two models as they
            ran because roundings decided, as in a router.
    """

    def __init__(self, tolerance: float | None) -> None:
        self.tolerance = tolerance
        self.chose_otherwise = 0

    def compare(self, sides: Sides, weights: tuple[str, ...]) -> Judged | None:
        """How far apart an operation's results are; None if it makes no numbers.

        Args:
            sides: the operation.
            weights: differing weights that it reads, and how they differ.

        Raises:
            NotJudged: when it cannot run on the operands of A.
        """
        made, ran = sides.made, sides.ran
        draws = made.ran.before is not None or ran.before is not None
        others = zip(made.values, sides.actual, strict=True)
        if draws and any(x.dtype != y.dtype for x, y in others if is_float(x) and is_float(y)):
            raise NotJudged(f"{ran.call.kind} draws random numbers, in two dtypes")
        state = made.random_state if draws else None
        if draws:
            ran = replace(ran, before=made.ran.before)
            sides = replace(sides, ran=ran)
        try:
            own = evaluated(ran, sides.node, *sides.own, state)
        except theirs() as error:  # shapes or dtypes that do not go together
            raise NotJudged(f"{ran.call.kind} does not run on A's values") from error
        triples = [
            (a, b, c)
            for a, b, c in zip(made.values, own, sides.actual, strict=True)
            if isinstance(a, Tensor) and isinstance(b, Tensor)
        ]
        if not triples:
            return None
        self.chose_otherwise += sides.is_wired_alike and any(
            not is_float(a) and not torch.equal(a, c) for a, _, c in triples
        )
        floats = [each for each in triples if is_float(each[0])]
        found = Compared("", weights=weights)
        if floats:
            a, _, c = floats[0]
            found = replace(
                found,
                dtypes=(dtype_of(a), dtype_of(c)),
                own=_worst(apart(a, b) for a, b, _ in floats),
                inherited=_worst(apart(b, c) for _, b, c in floats),
                total=_worst(apart(a, c) for a, _, c in floats),
            )
        reason, errors, is_program = self._reason(sides, own, floats, bool(weights))
        if weights:
            reason = f"a weight differs: {'; '.join(weights)}"
            if found.own is not None and found.own.absolute == 0:
                reason += "; on these inputs its result is the same"
            errors = None  # float64 does not know which weight is meant
        if not floats and not reason:
            return None
        found = replace(found, reason=reason, errors=errors)
        return Judged(found, is_program and bool(reason) and not weights)

    def _reason(
        self, sides: Sides, own: list[Any], floats: list[Any], differs: bool
    ) -> tuple[str, tuple[float, float] | None, bool]:
        """Why the results are significantly apart, how far each is from float64, and whether the
        two are different programs.
        """
        reason = "" if differs else self._reason_of_integers(sides, own)
        is_program = bool(reason)
        if self.tolerance is not None and not reason:
            worst = max((apart(a, b).relative for a, b, _ in floats), default=0.0)
            if worst > self.tolerance:
                reason = f"its own error of {worst:.2g} is over the tolerance of {self.tolerance:g}"
        same = all(a.dtype == b.dtype and is_same(a, b) for a, b, _ in floats)
        if same or not floats:
            return reason, None, is_program
        made, ran, node = sides.made, sides.ran, sides.node
        try:
            wide_a = in_float64(made.ran, made.node, made.ran.args, made.ran.kwargs)
            of_a = [x for x in wide_a if is_float(x)]
            in_b = with_eps_of(ran, next((a.dtype for a, _, _ in floats), None))
            exact = [x for x in in_float64(in_b, node, *sides.exact) if is_float(x)]
        except NotJudged as why:
            if not reason and self.tolerance is None and not differs:
                reason = _without_float64(floats, str(why))
                is_program = bool(reason)
            return reason, None, is_program
        pairs = [(a, b) for a, b, _ in floats]
        units = unit_of(*(a for a, _ in pairs)), unit_of(*(b for _, b in pairs))
        reference = of_a  # with the weights that have more digits
        if units[0] > units[1]:
            reference = [x for x in in_float64(ran, node, *sides.own) if is_float(x)]
        errors = _errors(floats, reference)
        programs = [_masked(x, y, a, b) for x, y, (a, b) in zip(of_a, exact, pairs, strict=True)]
        rounded = 0.0 if sides.is_wired_alike else units[0]
        if any(beyond(x, y, max(units), rounded=rounded) for x, y in programs):
            if differs:
                return reason, None, False
            gap = max(apart(x, y).relative for x, y in programs)
            said = f"not roundings: in float64, too, the two results are {gap:.2g} apart"
            return reason or ("" if self.tolerance is not None else said), None, True
        if not reason and not differs and self.tolerance is None:
            reason = self._reason_of_roundings(sides, floats, wide_a)
        return reason, errors, is_program

    def _reason_of_integers(self, sides: Sides, own: list[Any]) -> str:
        """Why integers, booleans or indices differ: on exactly A's operands they must be equal."""
        values = sides.made.values
        places = [
            place
            for place, x in enumerate(values)
            if isinstance(x, Tensor) and not is_float(x) and isinstance(own[place], Tensor)
        ]
        if all(torch.equal(values[place], own[place]) for place in places):
            return ""
        try:  # on A's exact operands, where no rounding of operands decides
            exact = evaluated(sides.ran, sides.node, *sides.exact, None)
        except theirs():  # dtypes that do not go together
            return ""
        for place in places:
            differs = values[place] != exact[place]
            if count := int(differs.sum()):
                return f"{count} of {differs.numel()} integers or booleans differ"
        return ""

    def _reason_of_roundings(self, sides: Sides, floats: list[Any], wide_a: list[Any]) -> str:
        """Why a kernel is further from float64 than its dtype explains; "" if it is not."""
        made, ran, node = sides.made, sides.ran, sides.node
        wide_b = in_float64(ran, node, *sides.own)
        for side, low, args, wide, one, at in (
            ("A", 0, (made.ran.args, made.ran.kwargs), wide_a, made.ran, made.node),
            ("B", 1, sides.own, wide_b, ran, node),
        ):
            results = [each[low] for each in floats]
            if said := reason_of_kernel(side, one, at, args, results, wide):
                return said
        return ""


def reason_of_kernel(
    side: str, ran: Ran, node: Node, args: Any, results: list[Tensor], wide: list[Any]
) -> str:
    """Why a kernel is further from float64 than its dtype explains; "" if it is not.

    Args:
        side: "A" or "B".
        ran: the operation.
        node: its node.
        args: what it read: positional and named.
        results: the floating-point tensors that it made.
        wide: what it leaves in float64 on the same operands.
    """
    wides = [x for x in wide if is_float(x)]
    operands = _floats_in(args)
    unit = unit_of(*results, *operands)
    inside = rounded_inside(ran.call.kind, args[0], args[1], unit, wides[0])
    shares = [
        share_of_rounding(x, y, unit, inside=inside) for x, y in zip(results, wides, strict=True)
    ]
    if max(shares) <= 1:
        return ""
    moved = [
        x
        for x, y in zip(spread(ran, node, args[0], args[1], unit, wide), wide, strict=True)
        if is_float(y)
    ]
    shares = [
        share_of_rounding(x, y, unit, moved=z, inside=inside)
        for x, y, z in zip(results, wides, moved, strict=True)
    ]
    return _said(side, results, wides, max(shares)) if max(shares) > 1 else ""


def _said(side: str, results: list[Tensor], wides: list[Tensor], share: float) -> str:
    dtype = dtype_of(results[0])
    for low, wide in zip(results, wides, strict=True):
        lost = ~low.isfinite() & wide.isfinite()
        if bool(lost.any()):
            if low.is_complex() or bool(low[lost].isnan().any()):
                return f"NaN in {side}, and finite in float64 on the same operands"
            largest = float(wide[lost].abs().max())
            limit = torch.finfo(low.dtype).max
            if largest <= limit:
                return f"inf in {side}, and {largest:.6g} in float64 on the same operands"
            needs = f"needs {largest:.6g}, {dtype} holds {limit:.6g}"
            return f"overflow in {side}: {needs}"
    return (
        f"{side} is further from float64 than {dtype} explains: {share:.2g} times what roundings "
        f"of the result and of the operands may do"
    )


def _without_float64(floats: list[Any], why: str) -> str:
    for a, b, _ in floats:
        unit = unit_of(a, b)
        found = apart(a, b).relative
        if found > WITHOUT_FLOAT64 * unit:
            return f"its own error of {found:.2g} is over {WITHOUT_FLOAT64} roundings; {why}"
    return ""


def _errors(floats: list[Any], wides: list[Tensor]) -> tuple[float, float]:
    """How far the results of both sides are from float64 on A's operands."""
    pairs = [(a, b, x) for (a, b, _), x in zip(floats, wides, strict=True)]
    return (
        max(error_of(a, wide) for a, _, wide in pairs),
        max(error_of(b, wide) for _, b, wide in pairs),
    )


def _masked(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two results in float64, made equal where each holds the largest number of its dtype."""
    if a.dtype == b.dtype or a.is_complex():
        return x, y
    masks = at_limit(x.to(a.dtype)) & (y.abs() >= 0.99 * torch.finfo(b.dtype).max)
    masks = masks & (x.sign() == y.sign())
    return (x, torch.where(masks, x, y)) if bool(masks.any()) else (x, y)


def _worst(found: Any) -> Apart:
    """The largest errors and the smallest cosine of several results."""
    each = list(found)
    cosines = [x.cosine for x in each if x.cosine is not None]
    return Apart(
        max(x.absolute for x in each),
        max(x.relative for x in each),
        min(cosines, default=None),
    )


def _floats_in(args: Any) -> list[Tensor]:
    return [x for x in trees.tree_leaves(args) if is_float(x)]
