"""Variables that a program advances by steps, ``u = u + dt * rate``: which, and of what length.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from fxguard.records import Source
from fxguard.source.assigned import holds, source_of
from fxguard.source.flows import Flows, flows_of
from fxguard.source.syntax import tree_of_file

__all__ = ["Advanced", "advanced_behind", "updated_at"]

STEPS = re.compile(r"(^|[._])(dt|h|tau|step|step_size|timestep|time_step|delta_t|dtau)\d?$", re.I)
FRACTIONS = (0.5, 1.0)  # of the way to a boundary that a program takes on purpose

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_BOUNDS = frozenset(["abs", "clamp", "clamp_min", "clip", "max", "maximum", "relu"])
_LEAST = frozenset(["amin", "min", "minimum"])


@dataclass(frozen=True, slots=True)
class Advanced:
    """A variable that a program advances.

    Attributes:
        name: of the variable.
        source: the statement that adds a step to it.
        step: what the change is multiplied with, ``dt``.
        change: the change that is multiplied with it, ``rate``.
        made: where the length of the step is computed; None where that is not known.
        is_to_boundary: whether that is the way to where something becomes 0, a least ratio.
        divisor: what a length divides by, such as a speed; "" if it does not.
        divisor_at: where that is computed.
        is_speed_whole: whether that adds several speeds up.
        is_proportional: whether each part of the change has the variable as a factor.
        decay: ``dt * k`` of ``y - dt * k * y``; "" of others.
        is_of_neighbours: whether the change is made of differences along a row.
    """

    name: str
    source: Source
    step: str
    change: str
    made: Source | None
    is_to_boundary: bool
    divisor: str
    divisor_at: Source | None
    is_speed_whole: bool
    is_proportional: bool
    decay: str
    is_of_neighbours: bool


def advanced_behind(source: Source, name: str = "") -> list[Advanced]:
    """What a program advances, and a line reads.

    Args:
        source: the line.
        name: of a variable that it reads; "" for any.
    """
    tree, flows = tree_of_file(source.file), flows_of(source.file)
    if tree is None or flows is None:
        return []
    found: list[Advanced] = []
    for statement, sum_, target in _sums(tree):
        at = source_of(statement, source.file)
        if flows.reaches(at, source, name):
            found += _steps_in(sum_, target, at, flows)
    return found


def updated_at(source: Source) -> str:
    """The variable that a statement adds a change to, again and again; "" if it adds none."""
    tree = tree_of_file(source.file)
    sums = () if tree is None else _sums(tree)
    return next((name for each, _, name in sums if holds(each, source.line)), "")


def _sums(tree: ast.Module) -> Iterator[tuple[ast.stmt, ast.BinOp, str]]:
    """Sums of a variable and a change, which become the variable: their statements, its name."""
    looped = [x for loop in ast.walk(tree) if isinstance(loop, _LOOPS) for x in ast.walk(loop)]
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub)):
            target = _whole(node.target)
            if _is_again(node, target, looped):
                yield node, ast.BinOp(node.target, node.op, node.value), _text(target)
            continue
        value = getattr(node, "value", None)
        inner = _unbounded(value) if isinstance(node, (ast.Assign, ast.Return)) else None
        if not isinstance(inner, ast.BinOp) or not isinstance(inner.op, (ast.Add, ast.Sub)):
            continue
        if isinstance(node, ast.Assign):
            targets = {_text(_whole(each)) for each in node.targets}
            again = targets | (_later_names(tree, targets) if node in looped else set())
            own = _whole(inner.left)
            if _text(own) in again and _is_again(node, own, looped):
                yield node, inner, _text(own)
        elif isinstance(node, ast.Return) and _is_repeated(tree, node, inner.left, looped):
            yield node, inner, _text(inner.left)


def _whole(node: ast.expr) -> ast.expr:
    """A variable of which an expression is a part: ``self.h`` of ``self.h[1:-1]``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def _is_again(node: ast.stmt, target: ast.expr, looped: list[ast.AST]) -> bool:
    """Whether a statement runs many times: in a loop, or as an attribute's in a method."""
    return isinstance(target, ast.Attribute) or any(node is each for each in looped)


def _later_names(tree: ast.Module, names: set[str]) -> set[str]:
    """The variables that become one of some others: ``u`` of ``u = new``."""
    return {
        _text(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _text(_unbounded(node.value)) in names
        for target in node.targets
    }


def _is_repeated(tree: ast.Module, node: ast.Return, name: ast.expr, looped: list[ast.AST]) -> bool:
    """Whether a loop gives a variable what a function makes of it: ``q = advance(q, dt)``."""
    around = [x for x in ast.walk(tree) if isinstance(x, _FUNCTIONS) and holds(x, node.lineno)]
    if not around or _text(name) not in {each.arg for each in around[-1].args.args}:
        return False
    for each in looped:
        value = each.value if isinstance(each, ast.Assign) else None
        called = getattr(value, "func", None)
        is_it = str(getattr(called, "attr", "") or _text(called)) == around[-1].name
        if isinstance(value, ast.Call) and is_it and isinstance(each, ast.Assign):
            given = {_text(x) for x in value.args}
            if given & {_text(x) for target in each.targets for x in ast.walk(target)
                        if isinstance(x, ast.expr)}:  # fmt: skip
                return True
    return False


def _unbounded(node: ast.expr | None) -> ast.expr | None:
    """An expression without what bounds it: ``u + d`` of ``(u + d).clamp(min=0)``."""
    while isinstance(node, ast.Call):
        function = node.func
        name = getattr(function, "attr", "") or getattr(function, "id", "")
        owner = function.value if isinstance(function, ast.Attribute) else None
        is_library = _text(owner) in ("", "F", "torch")
        if name not in _BOUNDS:
            return node
        node = next(iter(node.args), None) if is_library else owner
    return node


def _steps_in(sum_: ast.BinOp, target: str, at: Source, flows: Flows) -> Iterator[Advanced]:
    """The steps that a sum adds, of which the length is known to be one."""
    above, below = _factors(sum_.right)
    if any(isinstance(x, ast.Constant) and _is_fraction(x) for x in above):
        return
    for each in above:
        step = _text(each)
        if not isinstance(each, (ast.Name, ast.Attribute)) or step == target:
            continue
        behind = list(flows.behind(at, step))
        is_to_boundary = _is_least_ratio(behind)
        if not (is_to_boundary or STEPS.search(step)):
            continue
        made = _last_quotient(behind)
        divisor = None if made is None else made.right
        name = _text(divisor) if isinstance(divisor, ast.Name) else ""
        computed = (x for x in behind if not isinstance(x, (ast.Name, ast.Attribute)))
        made_at = _place(made or next(computed, None), at.file)
        speeds = [] if not name or made_at is None else list(flows.behind(made_at, name, 1))
        others = [x for x in above if x is not each]
        yield Advanced(
            target,
            at,
            step,
            " * ".join(map(_text, others)),
            made_at,
            is_to_boundary,
            name if len(speeds) == 1 else "",
            _place(speeds[0], at.file) if len(speeds) == 1 else None,
            any(map(_adds_up, speeds)),
            _is_proportional(others, target),
            _decay(sum_, each, above, below, target),
            any(map(_is_of_neighbours, [*others, *_changes(others, at, flows)])),
        )


def _changes(others: list[ast.expr], at: Source, flows: Flows) -> Iterator[ast.expr]:
    """What gave the variables of a change, and the functions that it calls, their values."""
    names = {x.id for each in others for x in ast.walk(each) if isinstance(x, ast.Name)}
    for name in sorted(names):
        yield from flows.behind(at, name, 2)
    for each in others:
        yield from flows.behind_expression(each)


def _adds_up(node: ast.expr) -> bool:
    """Whether a speed is a sum of speeds, and not one and an eps."""
    sums = (x for x in ast.walk(node) if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Add))
    return any(not isinstance(y, ast.Constant) for x in sums for y in (x.right,))


def _is_proportional(others: list[ast.expr], target: str) -> bool:
    """Whether a change has a variable as a factor: what it changes so does not cross 0."""
    if any(_text(each) == target for each in others):
        return True
    terms = [term for each in others if isinstance(each, ast.BinOp) for term in _terms(each)]
    factors = [[_text(x) for x in _factors(term)[0]] for term in terms]
    return bool(factors) and all(target in each for each in factors)


def _terms(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        yield from _terms(node.left)
        yield from _terms(node.right)
    else:
        yield node


def _is_of_neighbours(node: ast.expr) -> bool:
    """Whether an expression subtracts elements that are next to each other."""
    for each in ast.walk(node):
        name = _text(each.func).rpartition(".")[2] if isinstance(each, ast.Call) else ""
        if name in ("roll", "diff", "conv1d", "conv2d"):
            return True
        sides = [each.left, each.right] if isinstance(each, ast.BinOp) else []
        slices = [
            {
                _text(x)
                for y in ast.walk(side)
                if isinstance(y, ast.Slice)
                for x in (y.lower, y.upper)
            }
            for side in sides
        ]
        is_shifted = len(slices) == 2 and any("-" in x for x in slices[0] ^ slices[1])
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Sub) and is_shifted:
            return True
    return False


def _factors(node: ast.expr) -> tuple[list[ast.expr], list[ast.expr]]:
    """What a product multiplies, and what it divides by."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
        left, right = _factors(node.left), _factors(node.right)
        right = right if isinstance(node.op, ast.Mult) else right[::-1]
        return left[0] + right[0], left[1] + right[1]
    return [node], []


def _decay(
    sum_: ast.BinOp, step: ast.expr, above: list[ast.expr], below: list[ast.expr], target: str
) -> str:
    """``dt * k`` of ``y - dt * k * y``; "" of others."""
    others = [_text(x) for x in above if x is not step]
    is_simple = all(isinstance(x, (ast.Name, ast.Attribute, ast.Constant)) for x in above + below)
    if not isinstance(sum_.op, ast.Sub) or others.count(target) != 1 or not is_simple:
        return ""
    others.remove(target)
    divided = "".join(f" / {_text(x)}" for x in below)
    return " * ".join([_text(step), *others]) + divided


def _is_fraction(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, float) and FRACTIONS[0] <= value < FRACTIONS[1]


def _is_least_ratio(values: list[ast.expr]) -> bool:
    """Whether a length is the least of ratios, ``(-z / dz).min()``, and all of it is taken."""
    nodes = [node for value in values for node in ast.walk(value)]
    products = [x for x in nodes if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Mult)]
    if any(_is_fraction(y) for x in products for y in (x.left, x.right)):
        return False
    if any(map(_is_fraction, values)):
        return False  # a variable that is one
    calls = (_text(x.func).rpartition(".")[2] for x in nodes if isinstance(x, ast.Call))
    return not _LEAST.isdisjoint(calls) and any(map(_is_negated_ratio, nodes))


def _is_negated_ratio(node: ast.AST) -> bool:
    inner = ast.walk(node) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) else ()
    return any(isinstance(x, ast.UnaryOp) and isinstance(x.op, ast.USub) for x in inner)


def _last_quotient(values: list[ast.expr]) -> ast.BinOp | None:
    """The quotient that a length is: ``cfl * dx / speed``."""
    for value in values:
        for node in ast.walk(value):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                return node
    return None


def _place(node: ast.expr | None, file: str) -> Source | None:
    return None if node is None else Source(file, node.lineno, "")


def _text(node: ast.AST | None) -> str:
    return "" if node is None else ast.unparse(node)
