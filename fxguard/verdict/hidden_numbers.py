"""What to do about a bad number that the program hides only after it has computed with it."""

from __future__ import annotations

import math

from torch.fx import Node

from fxguard.findings import Fix
from fxguard.graph.poles import LAWS, plain
from fxguard.records import Source
from fxguard.rerun.backward_evidence import BackwardEvidence
from fxguard.rerun.backward_flow import BackwardFlow
from fxguard.rerun.bad_forward import HiddenAfter, hidden_after
from fxguard.rerun.edges import BackwardOf
from fxguard.source.assigned import assignments_of, in_words, statement_at
from fxguard.source.library_calls import hides_operations, only_argument_in
from fxguard.source.lines import source_of_trace
from fxguard.source.named import argument_text

__all__ = ["MASKS", "fix_of_hidden", "hidden_of"]

TRIANGLES = ("tril", "triu")
MASKS = ("masked_fill", "where", *TRIANGLES)
ZERO_IS_SAFE = frozenset(
    ["acos", "acosh", "add", "asin", "atanh", "erfinv", "exp", "log1p", "mul", "sub"]
)


def hidden_of(
    backward: BackwardFlow, operation: BackwardOf, seen: BackwardEvidence
) -> HiddenAfter | None:
    """The bad number that an operation read, if its result is hidden and its gradient is 0."""
    was_zero = seen.came_in is None or seen.came_in == 0
    ends = [end for x in seen.gradient.operands if x.dtype for end in (x.low, x.high)]
    reads_bad = not all(map(math.isfinite, ends))
    makes_bad = seen.forward is not None and seen.made_by is None
    if seen.inside is not None or not was_zero or not (reads_bad or makes_bad):
        return None
    return hidden_after(backward.kept, operation.place)


def fix_of_hidden(found: HiddenAfter) -> Fix | None:
    """Replace the operand before the arithmetic: ``torch.where(observed, target, 0)``.

    Args:
        found: what was hidden, and where.

    Returns:
        None if the lines are not known.
    """
    at, hides_at = _source(found.reader), _source(found.hides)
    if at is None or hides_at is None:
        return None
    name, hides = plain(found.call.kind), plain(found.hides_call.kind).rstrip("_")
    reader, hider, bad = f"{name} ({at.place})", hides, found.bad.text
    if hides_at.place != at.place:
        hider = f"{hides} ({hides_at.place})"
    what = hides if hides in MASKS else "mask"
    operand = _operand(found, at, name)
    example = _example(found, hides_at, operand, name)
    if found.position is None:
        give = f"give {reader}, which made {bad}, {example or 'a harmless operand'}"
    else:
        example = f", {example}" if example else ""
        give = f"give {reader} a harmless number in place of {bad}{example}"
        give += _comes_from(operand, at)
    give += _other_side(found)
    return Fix(
        "advice",
        f"put a {what} before the arithmetic, too: {give}; {hider} hides only the result: the "
        f"backward is 0 * {bad}",
    )


def _other_side(found: HiddenAfter) -> str:
    """``, and sqrt (a.py:4) of the other side likewise``; "" if that side is good."""
    node, call = found.other or (None, None)
    at = None if node is None else _source(node)
    if call is None or at is None:
        return ""
    return f", and {plain(call.kind)} ({at.place}) of the other side likewise"


def _source(node: Node) -> Source | None:
    return source_of_trace(node.meta.get("stack_trace"))


def _operand(found: HiddenAfter, at: Source, name: str) -> str:
    """The operand as the program has it; "" if its line does not tell."""
    code = statement_at(at)
    if hides_operations(code):
        return only_argument_in(code) if found.position is not None else ""
    operands, position = found.reader.args, 0
    if found.position is not None:
        operand = found.reader.all_input_nodes[found.position]
        if operand not in operands:
            return ""
        position = operands.index(operand)
    elif sum(isinstance(each, Node) for each in operands) != 1:
        return ""
    return _text(at, name, position)


def _comes_from(operand: str, at: Source) -> str:
    """`` (`u` comes from a.py:3: u = atanh(x))``; "" where that may not have made it bad."""
    assigned = assignments_of(operand, at) if operand.isidentifier() else []
    made = [statement_at(source) for _, source in assigned]
    may_be_bad = any(argument_text(code, name, 0) for code in made for name in LAWS)
    return f" ({in_words(assigned)})" if may_be_bad else ""


def _example(found: HiddenAfter, hides_at: Source, x: str, name: str) -> str:
    """``torch.where(observed, target, 0)``; "" if the lines do not tell what to write."""
    if not x or not found.fits:
        return ""
    safe = "0" if name in ZERO_IS_SAFE else "1"
    hides = plain(found.hides_call.kind).rstrip("_")
    if hides == "masked_fill":
        mask = _text(hides_at, hides, 1)
        return f"{_with_parentheses(x)}.masked_fill({mask}, {safe})" if mask else ""
    if hides in TRIANGLES and name in ZERO_IS_SAFE:
        given = [*found.hides.args[1:], *found.hides.kwargs.values()]
        return f"{_with_parentheses(x)}.{hides}({', '.join(map(str, given))})"
    if hides != "where":
        return ""
    is_method = found.hides.op == "call_method"
    mask = _text(hides_at, "where", 1 if is_method else 0)
    sides = (0, 2) if is_method else (1, 2)
    given = [found.hides.args[i] is found.hidden for i in sides if len(found.hides.args) > i]
    if not mask or given not in ([True, False], [False, True]):
        return ""
    return f"torch.where({mask}, {x}, {safe})" if given[0] else f"torch.where({mask}, {safe}, {x})"


def _with_parentheses(text: str) -> str:
    return text if text.replace(".", "_").isidentifier() else f"({text})"


def _text(source: Source, name: str, position: int) -> str:
    return argument_text(source.code, name, position) or argument_text(
        statement_at(source), name, position
    )
