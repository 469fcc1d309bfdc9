"""A parameter that an optimizer has moved out of the range in which what is computed has a value.

That range is found by computing: the operand is a function of that one parameter, element by
element. Knows nothing of torch.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping

from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.numbers import DOMAINS
from fxguard.advice.positive import OWN_LAYERS
from fxguard.advice.surroundings import is_scaling
from fxguard.advice.written_operands import titled
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES
from fxguard.plan.plan import Step
from fxguard.records import Role, Source
from fxguard.source.assigned import target_of
from fxguard.source.named import SIGNS
from fxguard.source.scalar_functions import FUNCTIONS, NO_NUMBER, OPERATORS, number_in, variables_of
from fxguard.source.syntax import expression_of

__all__ = ["words_of_learned"]

MOST_STEPS = 32  # between the parameter and the operand
END = 20.0  # numbers beyond this are not tried
STEPS = 4000
HALVINGS = 40

Function = Callable[[float], float]

_KEPT = MOVES | CASTS
_TAKEN = _KEPT | names_in("chunk getitem narrow select slice split squeeze tensor_split unbind")


class _NotOfOneError(Exception):
    """The operand is no function of one parameter."""


def words_of_learned(case: Case) -> Mapping[str, str]:
    """``{"learned": "the learned `ecc`", "range": "inside (-1, 1)", "by": "tanh(raw)"}``.

    Returns:
        {} if the operand is no function of one parameter, or of what one layer makes.
    """
    for find in (_in_graph, _in_text):
        try:
            name, is_parameter, function = find(case)
            found = _range(case, function)
            if found is not None and not is_parameter and math.inf in map(abs, found):
                continue  # a layer's result is made positive, not above 9
        except _NotOfOneError:
            continue
        if found is not None:
            return {"learned": name, **_in_words(*found, is_parameter=is_parameter)}
    return {}


def _in_graph(case: Case) -> tuple[str, bool, Function]:
    """The parameter of a model or the result of a layer, which, and the operand as its function."""
    value = case.around.culprit
    leaf = _leaf(case, value)
    if value is None or leaf is None:
        raise _NotOfOneError
    layer = case.around.maker_of(leaf)
    name = f"the learned `{case.around.values[leaf].name}`"
    if layer is not None:
        names = variables_of(_node(case.bare))
        known = f"`{names.pop()}`, which" if len(names) == 1 else "what"
        name = f"{known} {titled(layer)} makes,"
    return name, layer is None, _function(case, value, leaf, MOST_STEPS)


def _in_text(case: Case) -> tuple[str, bool, Function]:
    """The same of a tensor of a script, which is in no graph: as the line has the operand."""
    text, value = case.bare, case.around.culprit
    step = None if value is None else case.around.maker_of(value)
    if not case.operands or not case.operands[0].needs_gradient or value is None:
        raise _NotOfOneError
    if step is not None and step.source is not None and text == target_of(step.source):
        text = step.source.code.partition("=")[2].strip()
    lines = _lines(case, value)
    node = _node(text)
    names = variables_of(node)
    if len(lines) > 1 or len(names) != 1:
        raise _NotOfOneError
    return f"the learned `{names.pop()}`", True, lambda x: number_in(node, lambda name: x)


def _lines(case: Case, value: int) -> set[Source | None]:
    """Where what is behind a value was computed."""
    todo, steps = [value], dict[int, Step]()
    while todo and len(steps) <= MOST_STEPS:
        step = case.around.maker_of(todo.pop())
        if step is None:
            raise _NotOfOneError  # given by something else, such as a model
        if id(step) not in steps:
            steps[id(step)] = step
            todo += step.inputs
    return {each.source for each in steps.values()}


def _node(text: str) -> ast.AST:
    node = expression_of(text)
    if node is None:
        raise _NotOfOneError
    return node


def _leaf(case: Case, value: int | None) -> int | None:
    """The only parameter or layer that is behind a value; None if there are others, or none."""
    around = case.around
    todo, seen, leaves = [value], set[int](), set[int]()
    while todo and len(seen) <= MOST_STEPS:
        each = todo.pop()
        if each is None or each in seen:
            continue
        seen.add(each)
        step = around.maker_of(each)
        if step is not None and _is_of_layer(case, step):
            leaves.add(each)
        elif step is None:
            if around.values[each].role is not Role.WEIGHT:
                raise _NotOfOneError
            leaves.add(each)
        else:
            todo += step.inputs
    return leaves.pop() if len(leaves) == 1 and not todo else None


def _is_of_layer(case: Case, step: Step) -> bool:
    """Whether it is a layer, or takes entries of a layer's result, perhaps scaled."""
    found: Step | None = step
    for _ in range(MOST_STEPS):
        if found is None or plain(found.kind) in OWN_LAYERS:
            return found is not None
        is_taken = not found.counts or plain(found.kind) in _TAKEN
        if not (is_taken or (found is not step and is_scaling(found))) or not found.inputs:
            return False
        found = case.around.maker_of(found.inputs[0])
    return False


def _function(case: Case, value: int, leaf: int, depth: int) -> Function:
    """What is computed of the parameter."""
    if value == leaf:
        return lambda x: x
    step = case.around.maker_of(value)
    if step is None or not depth:
        raise _NotOfOneError
    of = [_function(case, each, leaf, depth - 1) for each in step.inputs]
    name = plain(step.kind)
    if len(of) == 1 and (not step.counts or step.kind in _KEPT or name in _KEPT):
        return of[0]
    if len(of) == 1 and not step.literals and name in FUNCTIONS:
        return lambda x: FUNCTIONS[name](of[0](x))
    return _of_two(step, of)


def _of_two(step: Step, of: list[Function]) -> Function:
    name = plain(step.kind)
    sign = SIGNS.get("sub" if name == "rsub" else name)
    compute = None if sign is None else OPERATORS.get(sign)
    numbers: list[Function] = [lambda x, n=n: n for n in step.literals]  # type: ignore[misc]
    both = [*numbers, *of] if step.number_first else [*of, *numbers]
    both = both[::-1] if name == "rsub" else both
    if compute is None or len(both) != 2:
        raise _NotOfOneError
    return lambda x: compute(both[0](x), both[1](x))


def _range(case: Case, function: Function) -> tuple[float, float] | None:
    """Where the operand has a value; None if that is no single interval, or everywhere."""
    low, high = DOMAINS.get(case.name, (0.0, math.inf))

    def is_inside(x: float) -> bool:
        try:
            found = function(x)
        except NO_NUMBER:
            return False
        return low < found < high

    grid = [END * (2 * i + 1 - STEPS) / STEPS for i in range(STEPS)]  # not 0, which may be a pole
    inside = [is_inside(x) for x in grid]
    ends = [i for i in range(1, STEPS) if inside[i] != inside[i - 1]]
    if not 0 < len(ends) <= 2:
        return None
    borders = [_border(is_inside, grid[i - 1], grid[i]) for i in ends]
    if borders == [0]:
        return None  # positive, of which another rule tells
    if len(ends) == 1:
        return (borders[0], math.inf) if inside[-1] else (-math.inf, borders[0])
    return (borders[0], borders[1]) if not inside[0] else None


def _border(is_inside: Callable[[float], bool], one: float, other: float) -> float:
    first = is_inside(one)
    for _ in range(HALVINGS):
        middle = (one + other) / 2
        one, other = (middle, other) if is_inside(middle) == first else (one, middle)
    return round(one, 6) + 0.0


def _in_words(low: float, high: float, *, is_parameter: bool) -> dict[str, str]:
    after = ", or clamp it after each step of the optimizer, under no_grad" if is_parameter else ""
    return {"range": _range_text(low, high), "by": _by(low, high) + after}


def _range_text(low: float, high: float) -> str:
    if math.isinf(high):
        return f"above {low:g}"
    return f"below {high:g}" if math.isinf(low) else f"inside ({low:g}, {high:g})"


def _by(low: float, high: float) -> str:
    """What makes such numbers of any."""
    if math.isinf(high):
        return f"{low:g} + softplus(raw)"
    if math.isinf(low):
        return f"{high:g} - softplus(raw)"
    if -low == high:
        scale = "" if high == 1 else f"{high:g} * "
        return f"{scale}tanh(raw), or {scale}sigmoid(raw) if it is never negative"
    size = f"{high - low:g} * " if high - low != 1 else ""
    start = f"{low:g} + " if low else ""
    return f"{start}{size}sigmoid(raw)"
