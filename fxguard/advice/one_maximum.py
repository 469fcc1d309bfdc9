"""A softmax by hand that subtracts one maximum of everything, and normalises rows or groups.

A row whose numbers are all far below that maximum becomes 0. Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.vanished import MASK
from fxguard.advice.written_operands import without_parentheses, written_operand
from fxguard.formats import FORMATS
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.source.assigned import assignment_of, statement_node
from fxguard.source.named import argument_text, called_name, first_argument
from fxguard.source.syntax import tree_of
from fxguard.source.turns import is_divided_in_turn

__all__ = [
    "GROUPS",
    "MAXIMA",
    "ROWS",
    "Difference",
    "differences_behind",
    "made_behind",
    "one_maximum",
    "words_of_maximum",
]

MOST_STEPS = 24  # from a divisor back to a maximum

MAXIMA = names_in("amax max")
_PASSED = frozenset(map(plain, MOVES | SELECTS | CASTS)) | names_in("clone detach index_select")
ROWS = names_in("mean nansum sum")
GROUPS = names_in("index_add index_put put scatter scatter_add scatter_reduce segment_reduce")


@dataclass(frozen=True, slots=True)
class OneMaximum:
    """Where it is subtracted, of what, and of what the sums are."""

    step: Step
    scores: str  # as the program has them; "" if that is not certain
    is_by_group: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """What an exponential reads that became 0 in a sum, by which something is normalised."""

    difference: Step
    exp: Step
    sum: Step


def one_maximum(case: Case) -> OneMaximum | None:
    """The maximum of everything because of which a row or a group is 0; None if there is none."""
    for found in differences_behind(case):
        maximum = _maximum_in(case.around, found.difference)
        if maximum is not None:
            return OneMaximum(found.difference, maximum, plain(found.sum.kind) in GROUPS)
    return None


def differences_behind(case: Case) -> Iterator[Difference]:
    """What the exponentials read whose sum is 0, with the sum."""
    culprit, source = case.around.culprit, case.around.step.source
    if culprit is None or (source is not None and is_divided_in_turn(source)):
        return
    around, seen = case.around, {culprit}
    todo: list[tuple[int, Step | None]] = [(culprit, None)]
    while todo and len(seen) <= MOST_STEPS:
        value, total = todo.pop(0)
        step = around.maker_of(value)
        if step is None or not step.inputs:
            continue
        name = plain(step.kind)
        if name == "exp" and total is not None:
            difference = made_behind(around, step.inputs[0])
            if difference is not None and _made_zeros(case, step):
                yield Difference(difference, step, total)
            continue
        if name in ROWS | GROUPS:
            total = step
        elif not (not step.counts or name in _PASSED or _is_by_positive(around, step)):
            continue
        todo += [(each, total) for each in step.inputs if each not in seen]
        seen.update(step.inputs)


def _is_by_positive(around: Surroundings, step: Step) -> bool:
    """A product, none of whose factors holds a 0, but for the one that vanished."""
    if plain(step.kind) != "mul":
        return False
    found = [around.range_of(value) for value in set(step.inputs)]
    return len(found) == 1 or any(each is not None and each.abs_min > 0 for each in found)


def _made_zeros(case: Case, step: Step) -> bool:
    """It made numbers that are 0 or nearly, and not of a mask; where that is known."""
    around = case.around
    made, read = around.range_of(step.outputs[0]), around.range_of(step.inputs[0])
    form = FORMATS.get(around.values[step.outputs[0]].dtype)
    if made is None or read is None:
        return case.cause == "underflow"
    return form is not None and made.abs_min < form.smallest_normal and read.abs_max < MASK


def made_behind(around: Surroundings, value: int) -> Step | None:
    """What made a value behind moves."""
    for _ in range(MOST_STEPS):
        step = around.maker_of(value)
        if step is None or not step.inputs:
            return step
        if step.counts and plain(step.kind) not in _PASSED and not _is_scaling(step):
            return step
        value = step.inputs[0]
    return None


def _is_scaling(step: Step) -> bool:
    """By a temperature, say."""
    return plain(step.kind) in ("div", "mul") and not step.number_first


def _maximum_in(around: Surroundings, difference: Step) -> str | None:
    """The numbers whose one maximum a difference subtracts; None if it subtracts something else."""
    if plain(difference.kind) != "sub" or difference.number_first:
        return None
    if len(difference.inputs) == 2:
        step = made_behind(around, difference.inputs[1])
        is_one = step is not None and plain(step.kind) in MAXIMA and not step.literals
        if step is None or not is_one or len(step.inputs) != 1 or len(step.outputs) != 1:
            return None
        return without_parentheses(written_operand(step))
    return _maximum_written(difference)


def _maximum_written(difference: Step) -> str | None:
    """The same where the maximum is a number of Python, by the program's text."""
    source = difference.source
    text = "" if source is None else argument_text(source.code, "sub", 1)
    if source is None or not text:
        return None
    made = assignment_of(text, source) if text.isidentifier() else None
    tree = tree_of(text) if made is None else statement_node(made)
    for node in () if tree is None else ast.walk(tree):
        if not isinstance(node, ast.Call) or called_name(node) not in MAXIMA:
            continue
        is_method = isinstance(node.func, ast.Attribute) and not (
            isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        )
        of = first_argument(node)
        if of is not None and not node.keywords and len(node.args) == (0 if is_method else 1):
            return ast.unparse(of)
    return None


def words_of_maximum(case: Case) -> Mapping[str, str]:
    """Where it is subtracted, and what to subtract."""
    found = one_maximum(case)
    if found is None:
        return dict.fromkeys(("what", "place", "instead"), "it")
    source, scores = found.step.source, found.scores or "x"
    scores = scores if scores.replace(".", "_").isidentifier() else f"({scores})"
    row = f"{scores}.amax(dim, keepdim=True)"
    return {
        "what": "group" if found.is_by_group else "row",
        "place": "" if source is None else f" ({source.place})",
        "instead": 'by scatter_reduce(..., "amax")' if found.is_by_group else row,
    }
