"""Data at an end of what a distribution supports, where its density is 0: ``Beta.log_prob(0)``.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from fxguard.advice._patterns import made_by, one_minus_of
from fxguard.advice.case import Case
from fxguard.graph.poles import plain
from fxguard.source.assigned import statement_node
from fxguard.source.named import called_name
from fxguard.source.syntax import tree_of_file

__all__ = ["words_of_density"]

_OTHERS = frozenset(["Chi2", "Dirichlet", "Gamma", "InverseGamma"])  # they read the data alike


def words_of_density(case: Case) -> Mapping[str, str]:
    """``{"repair": "move `y` off 0 and 1 ..."}`` of data that is given to a density; {} of others.

    Smithson and Verkuilen (2006), "A better lemon squeezer?", have the formula for a Beta.
    """
    source, culprit = case.around.step.source, case.around.culprit
    if source is None or culprit is None or case.around.is_differentiated(culprit):
        return {}
    statement = statement_node(source)
    calls = [] if statement is None else [*_calls_of(statement, {"log_prob"})]
    is_zero = bool(case.operands) and case.operands[-1].low == 0
    if len(calls) != 1 or not calls[0].args or not is_zero:
        return {}
    data = ast.unparse(calls[0].args[0])
    if _is_of_beta(case, culprit, source.file):
        return {"repair": f"move `{data}` off 0 and 1, by (y * (n - 1) + 0.5) / n of n samples"}
    return {"repair": f"leave out where `{data}` is 0"}


def _is_of_beta(case: Case, culprit: int, file: str) -> bool:
    """Whether it reads both y and 1 - y; or, where that is not known, what the program calls."""
    step = made_by(case.around, culprit)
    if step is not None and plain(step.kind) == "stack":
        return one_minus_of(case.around.maker_of(step.inputs[-1])) == step.inputs[0]
    tree = tree_of_file(file)
    is_known = step is not None or tree is None
    return not is_known and any(_calls_of(tree, {"Beta"})) and not any(_calls_of(tree, _OTHERS))


def _calls_of(tree: ast.AST | None, names: set[str] | frozenset[str]) -> Iterator[ast.Call]:
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.Call) and called_name(node) in names:
            yield node
