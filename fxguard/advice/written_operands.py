"""The operand in question, as the program has it.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxguard.advice.positive import made_at
from fxguard.advice.surroundings import Surroundings
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, LOSSES, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.source.assigned import expressions_on, statement_at, target_of
from fxguard.source.in_statement import Path, operands_with_paths
from fxguard.source.named import (
    OPERATORS,
    given_text,
    operand_text,
    operand_texts,
    variables_in,
    without_parentheses,
)

__all__ = ["free_letter", "operand_in", "titled", "without_parentheses", "written_operand"]

MOST_READERS = 8  # of a result, one after the other
_MOVED = frozenset(map(plain, MOVES | SELECTS | CASTS))


def titled(step: Step) -> str:
    """``relu (model.py:25)``."""
    return plain(step.kind) + (f" ({step.source.place})" if step.source else "")


def free_letter(step: Step, letter: str) -> str:
    """A letter, or a word, for an operand; another letter where the program has such a variable."""
    taken = variables_in("" if step.source is None else statement_at(step.source))
    return letter if letter not in taken else next((x for x in "uvzrst" if x not in taken), letter)


def written_operand(step: Step) -> str:
    """The operand in question as the program has it; "" if that is not certain."""
    if step.source is None:
        return ""
    name = plain(step.kind)
    whole = operand_text(step.source.code, name) or operand_text(statement_at(step.source), name)
    if whole:
        return whole
    # One line of a statement of several.
    texts = [operand_texts(each, name) for each in expressions_on(step.source)]
    found = set[str]().union(*texts)
    return found.pop() if len(found) == 1 else ""


def operand_in(around: Surroundings) -> str:
    """The operand in question as the program has it, also of a line with several such operations.

    Among these it is the one whose variable is assigned where the operand was made.
    """
    position = _position(around)
    if position:
        return _written_at(around.step, position)
    if text := written_operand(around.step) or _by_readers(around):
        return text
    source, step = around.step.source, made_at(around, around.culprit)
    if source is None or step is None or step.source is None:
        return ""
    name = target_of(step.source)
    found = operand_texts(source.code, plain(around.step.kind))
    found = found or operand_texts(statement_at(source), plain(around.step.kind))
    is_elsewhere = step.source.position != source.position
    return name if is_elsewhere and name in found else ""


def _by_readers(around: Surroundings) -> str:
    """The same by what reads its result: ``p`` of ``a / p - a / q`` if it is lessened."""
    source = around.step.source
    if source is None:
        return ""
    known = _readers(around)
    pairs = operands_with_paths(statement_at(source), plain(around.step.kind))
    found = {text for text, path in pairs if _may_be(known, path)}
    return found.pop() if len(found) == 1 else ""


def _readers(around: Surroundings) -> list[tuple[str, int | None]]:
    """What reads its result in the same statement; None where a place is not known."""
    found: list[tuple[str, int | None]] = []
    value, source = around.made, around.step.source
    while len(found) < MOST_READERS:
        readers = [each for each in around.readers_of(value) if each.source == source]
        if len(readers) != 1 or not readers[0].outputs:
            break
        step = readers[0]
        if step.counts and plain(step.kind) not in _MOVED:
            place = step.inputs.index(value) if len(step.inputs) > 1 else None
            found.append((plain(step.kind), place))
        value = step.outputs[0]
    return found


def _may_be(known: Sequence[tuple[str, int | None]], path: Path) -> bool:
    path = tuple(pair for pair in path if pair[0] not in _MOVED)
    if len(known) > len(path):
        return False
    pairs = zip(known, path, strict=False)
    return all(name == of and place in (None, at) for (name, place), (of, at) in pairs)


def _position(around: Surroundings) -> int:
    """The place of the operand in question among several, where it is not told by the operation."""
    inputs, name = around.step.inputs, plain(around.step.kind)
    if name in OPERATORS or len(inputs) < 2:
        return 0
    value = around.culprit if name in LOSSES else around.bad_operand
    return inputs.index(value) if value in inputs else 0


def _written_at(step: Step, position: int) -> str:
    """The operand at a place of the call; "" if the line does not give all operands in a row."""
    if step.source is None:
        return ""
    name, count = plain(step.kind), len(step.inputs)
    texts = (step.source.code, statement_at(step.source))
    return next((x for each in texts if (x := given_text(each, name, position, count))), "")
