"""Runs fixes before they are said: those that repair the operation, and the rest, come first."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxguard.findings import Fix
from fxguard.forgiving import theirs
from fxguard.graph.evidence import Evidence
from fxguard.graph.nodes import leaves
from fxguard.graph.one_operation import OneOperation
from fxguard.graph.poles import plain
from fxguard.patch._operations import OF_RULES
from fxguard.patch._rewriting import Refused, sides_of
from fxguard.patch._trial import can_be_tried, evaluated, letter_of, tried
from fxguard.report.report import Report
from fxguard.rerun.rest import Rest
from fxguard.torch_names import DisableTorchFunction

__all__ = ["RunRest", "tried_first"]

MOST_ELEMENTS = 2**22  # of an operand that is computed with again
NEAR = 0.1  # how far from float64 a result may be, relative to its largest magnitude

# Runs the rest of a graph with a fix in the operation's place; None if that is not possible.
RunRest = Callable[[Fix], Rest | None]


def tried_first(
    report: Report,
    evidence: Evidence | None,
    operation: OneOperation | None = None,
    rest: RunRest | None = None,
) -> Report:
    """The report, with the fixes of its first origin in the order of what running them has shown.

    A fix is run in the operation's place: on all of its operands where they are known, or else on
    the numbers of the first bad element; forward and backward, in the model's dtype and in float64.
    One that fails there comes last. Of the others, the rest of the graph is run, too: where it is
    finite with one of them, that comes before those with which another operation fails.

    Args:
        report: the report.
        evidence: the operation of its first origin, at the first bad element.
        operation: the same with its operands, if they are known.
        rest: runs the rest of the graph with a fix, if it can run.
    """
    origin, *others = report.origins
    if not origin.fixes or evidence is None:
        return report
    with DisableTorchFunction():  # nobody is to follow what runs here
        failed = [fix for fix in origin.fixes if _fails(fix, evidence, operation)]
        kept = [fix for fix in origin.fixes if fix not in failed]
        kept = kept if rest is None else _with_rest(kept, rest, origin.returned_by)
    return replace(report, origins=(replace(origin, fixes=(*kept, *failed)), *others))


def _with_rest(fixes: Sequence[Fix], run: RunRest, returned_by: str) -> list[Fix]:
    """Fixes with what the rest did; one with which it is finite takes the place of the first.

    A fix that was not run keeps its place: it may be the repair of what the others only bound.
    After one that ends well, no other is run.
    """
    ran = dict[int, Rest]()
    for place, fix in enumerate(fixes):
        if (found := run(fix)) is not None:
            ran[place] = found
            if _is_well(found):
                break
    order = sorted(ran, key=lambda place: not _is_well(ran[place]))
    placed = dict(zip(ran, order, strict=True))
    sources = [placed.get(place, place) for place in range(len(fixes))]
    return [
        replace(fixes[place], then=in_words(ran[place], returned_by))
        if place in ran
        else fixes[place]
        for place in sources
    ]


def _is_well(rest: Rest) -> bool:
    return rest.is_finite and rest.gradients is not False


def in_words(rest: Rest, returned_by: str = "") -> str:
    """What the rest of a graph did with a fix; "" if nothing certain can be said.

    Args:
        rest: what it did.
        returned_by: what returned the bad value, "criterion"; "" for the model.

    Example:
        >>> in_words(Rest(True, None, gradients=True))
        "with it the model's output, its gradients and a step are finite"
    """
    if rest.is_backward:
        of_graph = "" if rest.is_whole else " of its graph"
        are = "are finite" if rest.gradients else "are still not finite"
        return f"with it the gradients{of_graph} {'and a step ' if rest.gradients else ''}{are}"
    output = f"the output of {returned_by}" if returned_by else "the model's output"
    if rest.is_finite and rest.gradients:
        return f"with it {output}, its gradients and a step are finite"
    if rest.is_finite:
        but = "" if rest.gradients is None else ", and its gradients are not"
        return f"with it {output} is finite{but}"
    if rest.next is None:
        return ""
    place = "" if rest.next.source is None else f" ({rest.next.source.place})"
    does = f"makes {rest.next.made}" if rest.next.made else "raises"
    return f"with it {plain(rest.next.kind)}{place} {does} next"


def _fails(fix: Fix, evidence: Evidence, operation: OneOperation | None) -> bool:
    """Whether a fix was run, and its result or its gradient is not finite."""
    if fix.kind == "tried" or fix.at is not None:
        return False
    alone = [*fix.rewrites, *(rule for rule in fix.tries if "..." not in rule)]
    rule = next((rule for rule in alone if can_be_tried(rule, evidence)), None)
    return rule is not None and not _repairs(rule, evidence, operation)


def _repairs(rule: str, evidence: Evidence, operation: OneOperation | None) -> bool:
    try:
        known = None if operation is None else _operands_of(rule, operation)
        if known is None:
            tried(rule, evidence)
            return True
        new = sides_of(rule)[1]
        made = _finite(new, known)
        wide = _finite(new, {letter: _widened(each) for letter, each in known.items()})
        return made is not None and wide is not None and _is_near(made, wide)
    except Refused:
        return False
    except theirs():  # what a rule writes may not exist for these operands: nothing was tried
        return True


def _operands_of(rule: str, operation: OneOperation) -> dict[str, Any] | None:
    """The operands of an operation by the letters that a rule has for them; None if too large."""
    wanted = OF_RULES.operation(sides_of(rule)[0])
    if wanted is None or operation.is_backward:
        return None
    given = [x for x in leaves(operation.args) if isinstance(x, (int, float, Tensor))]
    if any(isinstance(x, Tensor) and x.numel() > MOST_ELEMENTS for x in given):
        return None
    letters = [letter_of(each) for each in wanted.operands[: len(given)]]
    return {letter: x for letter, x in zip(letters, given, strict=False) if letter}


def _widened(operand: Any) -> Any:
    is_float = isinstance(operand, Tensor) and operand.is_floating_point()
    return operand.double() if is_float else operand


def _finite(new: ast.expr, operands: dict[str, Any]) -> Tensor | None:
    """What an expression makes; None if that, or a gradient of it, is not finite."""
    letters = {letter: _leaf(each) for letter, each in operands.items()}
    with torch.enable_grad():
        made = evaluated(new, letters)
    given = [x for x in letters.values() if isinstance(x, Tensor) and x.requires_grad]
    found: Sequence[Tensor | None] = ()
    if made.requires_grad and given:
        ones = torch.ones_like(made)
        found = torch.autograd.grad(made, given, ones, allow_unused=True)
    are_finite = all(x is None or bool(x.isfinite().all()) for x in (made, *found))
    return made.detach() if are_finite else None


def _leaf(operand: Any) -> Any:
    if not isinstance(operand, Tensor) or not operand.is_floating_point():
        return operand
    return operand.detach().clone().requires_grad_()


def _is_near(made: Tensor, wide: Tensor) -> bool:
    if not made.numel():
        return True
    is_complex = made.is_complex() or wide.is_complex()
    dtype = torch.complex128 if is_complex else torch.float64
    difference = (made.to(dtype) - wide.to(dtype)).abs().max()
    return bool(difference <= NEAR * wide.abs().max())
