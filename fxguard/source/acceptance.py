"""The probability with which a sampler accepts a proposal, as its program has it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fxguard.records import Source
from fxguard.source.assigned import source_of
from fxguard.source.named import called_name
from fxguard.source.syntax import tree_of_file

__all__ = ["acceptance_in"]

DRAWS = frozenset(["rand", "rand_like", "random", "uniform", "uniform_"])


def acceptance_in(file: str) -> tuple[str, Source] | None:
    """The variable that a uniform random number is compared with, and where it is computed.

    Metropolis' rule: ``if torch.rand(()) < accept_prob``, or with logarithms of both. A rate that
    is no exponential, such as that of noise or of dropout, is none.

    Args:
        file: of the program.

    Returns:
        None if there is no such variable, or several.
    """
    tree = tree_of_file(file)
    if tree is None:
        return None
    names = set(_compared_with_draws(tree))
    made = [
        (name, source_of(each, file))
        for each in ast.walk(tree)
        if isinstance(each, ast.Assign) and len(each.targets) == 1
        for name in [each.targets[0].id if isinstance(each.targets[0], ast.Name) else ""]
        if name in names and _is_ratio(each.value)
    ]
    return made[0] if len(made) == 1 else None


def _compared_with_draws(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.comparators) == 1:
            sides = node.left, node.comparators[0]
            for one, other in (sides, sides[::-1]):
                if _draws(one) and isinstance(other, ast.Name):
                    yield other.id


def _draws(node: ast.AST) -> bool:
    calls = (each for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(called_name(each) in DRAWS for each in calls)


def _is_ratio(value: ast.expr) -> bool:
    """Whether it is ``exp(a - b)``, or a difference of logarithms."""
    nodes = list(ast.walk(value))
    calls = [called_name(each) for each in nodes if isinstance(each, ast.Call)]
    differs = any(isinstance(each, ast.BinOp) and isinstance(each.op, ast.Sub) for each in nodes)
    return "exp" in calls or differs
