"""Learning rates in the program's own updates: ``w -= lr * g``. Knows nothing of torch."""

from __future__ import annotations

import ast
import re

from fxguard.records import Source
from fxguard.source.assigned import statement_node
from fxguard.source.iterated import iterated_at
from fxguard.source.named import last_name

__all__ = ["rate_in"]

RATE = re.compile(r"(^|_)(lr|eta|rate|step_size|stepsize)(_|\d*$)|learning")
GRADIENT = re.compile(r"(^|_)(d?grads?|gradient)(_|\d*$)")
LONGEST = 20  # characters


def rate_in(source: Source) -> str | None:
    """The learning rate of the update at a line; None if it is no update.

    Returns:
        As the program has it, ``hp.lr``; "" where it is a number beside a gradient.
    """
    statement = statement_node(source)
    if statement is None:
        return None
    called = [x.func for x in ast.walk(statement) if isinstance(x, ast.Call)]
    nodes = [x for x in ast.walk(statement) if isinstance(x, (ast.Name, ast.Attribute))]
    nodes = [x for x in nodes if x not in called]
    rates = [ast.unparse(node) for node in nodes if RATE.search(last_name(node))]
    rates = [each for each in rates if not _is_derivative(each, source)]
    if rates:
        return rates[0] if len(rates[0]) <= LONGEST else ""
    return "" if any(GRADIENT.search(last_name(node)) for node in nodes) else None


def _is_derivative(name: str, source: Source) -> bool:
    """Whether a ``rate`` is what the loop computes of the variable: ``u = u + dt * rate``."""
    found = iterated_at(source) if name.split("_")[-1] == "rate" else None
    return found is not None and name in found.made_of_it
