"""Divisors that are 0 because nothing changes from turn to turn any more.

Such as those of the steps of Barzilai and Borwein, and of a secant. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.records import Source
from fxguard.source.assigned import target_of
from fxguard.source.changes import change_at, quotients_by, quotients_in_turn

__all__ = ["words_of_change", "words_of_residual"]

MOST_VALUES = 16  # from the divisor back to a difference
MOST_LINES = 3  # that are named

_PRODUCTS = names_in("bmm dot inner matmul mm mul mv vdot")
_OF_ONE = frozenset(map(plain, MOVES | SELECTS | CASTS)) | names_in("abs pow square sum")


@dataclass(frozen=True, slots=True)
class Change:
    """A difference that is 0 throughout, and the lines that divide by a product with it."""

    name: str  # as the program has it
    what: str  # has changed
    step: Step
    lines: list[Source]


def words_of_residual(case: Case) -> Mapping[str, str]:
    """A dividend of 0 by which another line of the loop divides, as of conjugate gradients; or {}.

    Source: Hestenes and Stiefel, Methods of Conjugate Gradients for Solving Linear Systems, 1952.
    """
    source, numbers = case.around.step.source, [each.low for each in case.operands]
    is_one = case.evidence is not None and not any(case.evidence.index)
    if source is None or numbers != [0, 0] or not is_one or not case.dividend.isidentifier():
        return {}
    if target_of(source) == case.dividend:
        return {}  # as in k = k / k.sum(), a scaling
    lines = quotients_in_turn(case.dividend, source)
    if not lines:
        return {}
    return {"residual": case.dividend, "divides": _told(lines)}


def words_of_change(case: Case) -> Mapping[str, str]:
    """The change that is 0, its line, and all lines that divide by a product with it; or {}."""
    source = case.around.step.source
    found = max(_changes(case), key=lambda each: len(each.lines), default=None)
    if source is None or found is None or found.step.source is None:
        return {}
    count = len(found.lines[:MOST_LINES])
    is_itself = found.step.outputs[0] == case.around.culprit
    is_here = found.step.source.position == source.position
    return {
        "name": found.name,
        "what": found.what,
        "made": "" if is_here else f" ({found.step.source.place})",
        "divides": _told(found.lines),
        "by": "it" if is_itself else "a product with it",
        "all": "all of them" if count > 2 else "both" if count > 1 else "it",
    }


def _told(lines: Sequence[Source]) -> str:
    """``a.py:3 and a.py:5 divide``."""
    places = [each.place for each in lines[:MOST_LINES]]
    told = " and ".join([", ".join(places[:-1]), places[-1]] if len(places) > 1 else places)
    return f"{told} divide{'' if len(places) > 1 else 's'}"


def _changes(case: Case) -> Iterator[Change]:
    """The differences that are 0 throughout, and because of which the divisor is."""
    around, culprit, source = case.around, case.around.culprit, case.around.step.source
    todo = [] if culprit is None or source is None else [culprit]
    for value in todo:
        step = around.maker_of(value)
        if step is None or source is None or not _is_zero(case, value) or len(todo) > MOST_VALUES:
            continue
        kind = plain(step.kind)
        if kind in ("rsub", "sub") and step.source is not None:
            name, what = change_at(step.source, case.bare if value == culprit else "", case.bare)
            lines = quotients_by(name, source) if name else []
            if any(each.line <= source.line for each in lines):
                yield Change(name, what, step, lines)
        elif kind in _PRODUCTS or kind in _OF_ONE or not step.counts:
            todo += [each for each in dict.fromkeys(step.inputs) if each not in todo]


def _is_zero(case: Case, value: int | None) -> bool:
    found = None if value is None else case.around.range_of(value)
    return found is not None and found.abs_max == 0
