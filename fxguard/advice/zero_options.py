"""Divisors that are 0 throughout because an option of the program is: ``args.near * ones(n, 1)``.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from fxguard.advice.case import Case
from fxguard.advice.positive import made_at
from fxguard.advice.surroundings import CREATES, is_scaling
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step
from fxguard.records import Source
from fxguard.source.assigned import function_around, statement_node
from fxguard.source.branches import other_branch
from fxguard.source.named import called_name

__all__ = ["words_of_option"]

_FILLS = ("full", "full_like", "new_full", "tensor")


def words_of_option(case: Case) -> Mapping[str, str]:
    """The option, where it is read, and what the program could compute instead; or {}."""
    step = made_at(case.around, case.around.culprit, 0.0)
    if step is None or step.source is None or not _is_constant(case, step):
        return {}
    names = list(dict.fromkeys(_options(step.source)))
    if len(names) != 1 or _is_counted(names[0], step.source):
        return {}
    here = case.around.step.source
    branch = None if here is None else other_branch(here)
    other = "" if branch is None else f", or compute `{branch.statement}` ({branch.place})"
    return {"option": names[0], "place": step.source.place, "other": other}


def _is_constant(case: Case, step: Step) -> bool:
    """Whether it makes 0 of every element: of ones, or by itself."""
    if plain(step.kind) in _FILLS:
        return step.literals[-1:] == (0.0,)
    is_zero = plain(step.kind) == "mul" and is_scaling(step) and step.literals == (0.0,)
    maker = case.around.maker_of(step.inputs[0]) if is_zero else None
    return maker is not None and plain(maker.kind).removesuffix("_like") in CREATES


def _options(source: Source) -> Iterator[str]:
    """The variables that a statement multiplies by, or fills a tensor with."""
    statement = statement_node(source)
    for node in () if statement is None else ast.walk(statement):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            found = [node.left, node.right]
        elif isinstance(node, ast.Call) and called_name(node) in _FILLS:
            found = node.args[-1:]
        else:
            continue
        yield from (ast.unparse(x) for x in found if isinstance(x, (ast.Attribute, ast.Name)))


def _is_counted(name: str, source: Source) -> bool:
    """Whether a loop counts it, from 0 on."""
    loops = (ast.AsyncFor, ast.For, ast.comprehension)
    found = [x.target for x in ast.walk(function_around(source)) if isinstance(x, loops)]
    return any(
        name == ast.unparse(y) for x in found for y in ast.walk(x) if isinstance(y, ast.Name)
    )
