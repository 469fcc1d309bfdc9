"""A softmax by hand whose maximum is that of other groups, or other rows, than its sum.

As where the maximum is taken by source nodes, and the sum by targets: then a whole group may lie
far below what is subtracted from it. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxguard.advice.case import Case
from fxguard.advice.one_maximum import GROUPS, MAXIMA, ROWS, differences_behind, made_behind
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.written_operands import titled
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step
from fxguard.records import Source
from fxguard.source.assigned import target_of
from fxguard.source.indexed import Index, index_at, is_maximum_at

__all__ = ["groups_without_maximum", "other_groups", "words_of_groups", "words_of_other_groups"]

MOST_STEPS = 12  # in one walk

_GATHERS = frozenset(["gather", "getitem", "index", "index_select", "take_along_dim"])


@dataclass(frozen=True, slots=True)
class OtherGroups:
    """How a maximum and a sum are grouped, and where."""

    by: str  # the index of the maximum, or its dimension
    at: tuple[Source | None, ...]
    sum_by: str
    sum_at: Source | None


def other_groups(case: Case) -> OtherGroups | None:
    """The maximum of other groups than those that are normalised; None if there is none."""
    for found in differences_behind(case):
        difference, total = found.difference, found.sum
        if plain(difference.kind) != "sub" or len(difference.inputs) != 2:
            continue
        by_group = _by_group(case.around, difference, total)
        by_row = by_group or _by_row(case, difference, total)
        if by_row is not None:
            return by_row
    return None


# Groups.


def _by_group(around: Surroundings, difference: Step, total: Step) -> OtherGroups | None:
    maximum = made_behind(around, difference.inputs[1])
    if maximum is None or maximum.source is None or total.source is None:
        return None
    is_grouped = plain(maximum.kind).rstrip("_") in ("scatter_reduce", "index_reduce")
    if plain(total.kind) not in GROUPS or not is_grouped or not is_maximum_at(maximum.source):
        return None
    of_maximum = _indices(around, maximum, difference.inputs[1])
    of_sum = _indices(around, total, around.culprit)
    pairs = [
        (one, other)
        for one in of_maximum
        for other in of_sum
        if one[0].function == other[0].function  # so that names are those of the same variables
    ]
    odd = [pair for pair in pairs if pair[0][0].meaning != pair[1][0].meaning]
    if not odd or len({other.meaning for _, (other, _) in pairs}) != 1:
        return None
    (one, _), (other, sum_at) = odd[0]
    places = dict.fromkeys(at for (each, at), _ in odd if each == one)
    return OtherGroups(one.text, tuple(places), other.text, sum_at)


def _indices(around: Surroundings, grouped: Step, read: int | None) -> list[tuple[Index, Source]]:
    """The indices by which numbers were grouped, and by which the groups were handed back."""
    steps, of = [(grouped, "")], "" if grouped.source is None else target_of(grouped.source)
    value = read
    for _ in range(MOST_STEPS):
        step = None if value is None else around.maker_of(value)
        if step is None or step is grouped or not step.inputs:
            break
        if plain(step.kind) in _GATHERS:
            steps.append((step, of))
        value = step.inputs[0]
    found: list[tuple[Index, Source]] = []
    for step, name in steps:
        index = None if step.source is None else index_at(step.source, _name(step), name)
        if index is not None and step.source is not None:
            found.append((index, step.source))
    return found


def _name(step: Step) -> str:
    name = plain(step.kind).rstrip("_")
    return "getitem" if name == "index" else name


# Rows.


def _by_row(case: Case, difference: Step, total: Step) -> OtherGroups | None:
    maximum = made_behind(case.around, difference.inputs[1])
    if maximum is None or plain(maximum.kind) not in MAXIMA or plain(total.kind) not in ROWS:
        return None
    dims = 0 if case.evidence is None else case.evidence.dims
    one, other = _dim_of(maximum, dims), _dim_of(total, dims)
    if one is None or other is None or one == other:
        return None
    return OtherGroups(f"dim {one}", (maximum.source,), f"dim {other}", total.source)


def _dim_of(step: Step, dims: int) -> int | None:
    """The dimension that an operation reduces; None if it is not one, or not known."""
    literals = step.literals[:1]
    if not literals or not dims or literals[0] != int(literals[0]):
        return None
    return int(literals[0]) % dims


def words_of_other_groups(case: Case) -> Mapping[str, str]:
    """How both are grouped, and where."""
    found = other_groups(case)
    if found is None:
        return dict.fromkeys(("by", "place", "sum_by", "sum_place"), "it")
    return {
        "by": _quoted(found.by),
        "place": _place(*found.at),
        "sum_by": _quoted(found.sum_by),
        "sum_place": _place(found.sum_at),
    }


def _quoted(text: str) -> str:
    return text if text.startswith("dim ") else f"`{text}`"


def _place(*sources: Source | None) -> str:
    places = [each.place for each in sources if each is not None]
    return f" ({', '.join(places)})" if places else ""


# Groups of which no maximum was subtracted.


def groups_without_maximum(case: Case) -> Step | None:
    """The difference, or another operation, whose exponentials are 0 in all of a group."""
    for found in differences_behind(case):
        step, by = found.difference, None
        if plain(step.kind) == "sub" and len(step.inputs) == 2:
            by = made_behind(case.around, step.inputs[1])
        is_maximum = by is not None and plain(by.kind).rstrip("_") in (
            *GROUPS,
            *MAXIMA,
            "logsumexp",
        )
        if plain(found.sum.kind) in GROUPS and not is_maximum:
            return found.exp
    return None


def words_of_groups(case: Case) -> Mapping[str, str]:
    """``{"exp": "exp (gat.py:12)"}``."""
    step = groups_without_maximum(case)
    return {"exp": "exp" if step is None else titled(step)}
