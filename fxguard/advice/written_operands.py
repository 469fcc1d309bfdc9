"""The operand in question, as the program has it.

Knows nothing of torch.
"""

from __future__ import annotations

from fxguard.advice.positive import (
    made_at,
)
from fxguard.advice.surroundings import Surroundings
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step
from fxguard.source.assigned import statement_at, target_of
from fxguard.source.named import (
    operand_text,
    operand_texts,
    variables_in,
    without_parentheses,
)

__all__ = ["free_letter", "operand_in", "titled", "without_parentheses", "written_operand"]


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
    return operand_text(step.source.code, name) or operand_text(statement_at(step.source), name)


def operand_in(around: Surroundings) -> str:
    """The operand in question as the program has it, also of a line with several such operations.

    Among these it is the one whose variable is assigned where the operand was made.
    """
    if text := written_operand(around.step):
        return text
    source, step = around.step.source, made_at(around, around.culprit)
    if source is None or step is None or step.source is None:
        return ""
    name = target_of(step.source)
    found = operand_texts(source.code, plain(around.step.kind))
    found = found or operand_texts(statement_at(source), plain(around.step.kind))
    is_elsewhere = step.source.position != source.position
    return name if is_elsewhere and name in found else ""
