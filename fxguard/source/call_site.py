"""The variable that a script gave a model as an argument, by the line that calls the model.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

from fxguard.records import Source
from fxguard.source.assigned import statement_node
from fxguard.source.named import variable_in

__all__ = ["variable_given"]


def variable_given(argument: str, forward: Callable[..., Any], called_at: Source) -> str:
    """``xt``: what was given as an argument; "" if that is not certain.

    Args:
        argument: as reports name it, "argument `x` of Net.forward".
        forward: the function that has the argument, with ``self``.
        called_at: the line that calls the model.
    """
    found = re.match(r"argument `(\w+)` of ", argument)
    names = list(inspect.signature(forward).parameters)[1:]
    statement = statement_node(called_at)
    if found is None or found[1] not in names or statement is None:
        return ""
    position = names.index(found[1])
    calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
    given = {
        variable_in(ast.unparse(x)) for call in calls if (x := _given(call, found[1], position))
    }
    given.discard("")
    return given.pop() if len(given) == 1 else ""


def _given(call: ast.Call, name: str, position: int) -> ast.expr | None:
    by_name = [each.value for each in call.keywords if each.arg == name]
    if by_name:
        return by_name[0]
    return call.args[position] if len(call.args) > position else None
