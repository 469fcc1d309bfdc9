"""What a program could have taken in place of a line: the other branch of the ``if`` around it.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from fxguard.records import Source
from fxguard.source.assigned import function_around, holds

__all__ = ["Branch", "other_branch"]

LONGEST = 60  # characters of a statement that is quoted


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch of an ``if``."""

    statement: str
    place: str  # ``nerf.py:61``


def other_branch(source: Source) -> Branch | None:
    """The branch that did not run, if it is one statement which assigns what the line assigns.

    Args:
        source: a line in one branch of an ``if``.

    Example:
        Of the second line in ``if inverse:``, ``z = 1 / x``, ``else:``, ``z = x`` it is ``z = x``.
    """
    for node in ast.walk(function_around(source)):
        if not isinstance(node, ast.If) or len(node.body) != 1 or len(node.orelse) != 1:
            continue
        pair = [node.body[0], node.orelse[0]]
        is_here = [holds(each, source.line) for each in pair]
        if any(is_here):
            taken, other = pair if is_here[0] else reversed(pair)
            statement = ast.unparse(other)
            if _targets(taken) == _targets(other) != [] and len(statement) <= LONGEST:
                return Branch(statement, Source(source.file, other.lineno, "").place)
    return None


def _targets(node: ast.stmt) -> list[str]:
    return [ast.unparse(each) for each in node.targets] if isinstance(node, ast.Assign) else []
