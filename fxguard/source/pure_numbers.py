"""The part of a function that made a bad number: its arithmetic is done again, in Python.

Only numbers, tables of numbers and functions of ``math`` take part. No code of the user runs: what
else a function does ends the search.
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from fxguard.records import Source
from fxguard.source.lines import source_at
from fxguard.source.named import called_name
from fxguard.source.syntax import tree_of_file

__all__ = ["BadPartError", "bad_part", "bad_part_of"]

MOST_CALLS = 3  # one inside the other
LARGEST_POWER = 1e4

_SIGNS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.Sub: operator.sub,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.NotEq: operator.ne,
}
_BUILTINS: Mapping[str, Any] = {
    each.__name__: each for each in (abs, bool, float, int, len, max, min, pow, round)
}
# Of single numbers.
_OF_NUMPY: Mapping[str, Any] = {
    **{name: getattr(math, name) for name in ("ceil", "cos", "exp", "floor", "log", "sin", "sqrt")},
    "abs": abs,
    "float64": float,
    "maximum": max,
    "minimum": min,
    "pi": math.pi,
    "power": pow,
}
_LEAVES = (ast.Name, ast.Attribute, ast.Constant)


class BadPartError(Exception):
    """An expression that made a bad number of good ones.

    Attributes:
        text: the expression with its numbers, ``(1 - 91 / 90) ** 0.9``.
        number: what it made.
        at: its line.
        table: the variable of which it is an entry; "" if it is none.
        is_power: whether it is a power of a negative number.
        end: of a power of ``1 - step / end`` or of ``1 - step * (1 / end)``, where it is 0.
    """

    def __init__(
        self,
        text: str,
        number: Any,
        at: Source,
        table: str = "",
        *,
        is_power: bool = False,
        end: float | None = None,
    ) -> None:
        super().__init__(text)
        self.text = text
        self.number = number
        self.at = at
        self.table = table
        self.is_power = is_power
        self.end = end


class _UnknownError(Exception):
    """Something else than arithmetic."""


class _ReturnedError(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


_NOT_FOUND = (
    *(_UnknownError, ArithmeticError, AttributeError, LookupError, RecursionError),
    *(SyntaxError, TypeError, ValueError),
)


def bad_part(
    function: Any, *arguments: float, entry: Callable[[Any, int], float | None] = lambda x, i: None
) -> BadPartError | None:
    """The part of a function that made a bad number; None if that is not found.

    Args:
        function: one of Python.
        arguments: what it was called with.
        entry: gives an entry of a table that is no list; None of what is no table.
    """
    try:
        _called(function, arguments, entry, 0)
    except BadPartError as found:
        return found
    except _NOT_FOUND:
        return None
    return None


def bad_part_of(
    body: Sequence[ast.stmt],
    file: str,
    variables: Mapping[str, Any],
    before: Mapping[str, float | None] = MappingProxyType({}),
) -> BadPartError | None:
    """The same of statements that have run, such as of a method, with their variables as they are.

    Args:
        body: what assigns variables is computed again in order; what does anything else is left
            out, as done.
        file: of the statements.
        variables: what the statements read, by name. An object stands for its attributes.
        before: by name, such as ``self.step``, what was added to it after the statements had run;
            None where that is not known.
    """
    run = _Run(file, dict(variables), lambda x, i: None)
    run.before = before
    return _bad_part_in(run, body)


def _bad_part_in(run: _Run, body: Sequence[ast.stmt]) -> BadPartError | None:
    for each in body:
        name = each.targets[0] if isinstance(each, ast.Assign) else None
        try:
            if isinstance(each, ast.If):
                branch = each.body if run.value(each.test) else each.orelse
                if (found := _bad_part_in(run, branch)) is not None:
                    return found
            elif isinstance(each, ast.Assign) and isinstance(name, ast.Name):
                run.assign(name.id, each.value)
            elif isinstance(each, (ast.Assign, ast.Return)) and each.value is not None:
                run.value(each.value)
        except BadPartError as found:
            return found
        except _NOT_FOUND:
            for node in ast.walk(each):  # computed by something else
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    run.variables.pop(node.id, None)
    return None


def _called(function: Any, arguments: tuple[Any, ...], entry: Any, depth: int) -> Any:
    if type(function) is MethodType:
        function, arguments = function.__func__, (function.__self__, *arguments)
    if type(function) is not FunctionType or depth > MOST_CALLS:
        raise _UnknownError
    node = _node_of(function)
    read = inspect.getclosurevars(function)
    names = [each.arg for each in node.args.args]
    defaults = function.__defaults__ or ()
    given = dict(zip(reversed(names), reversed(defaults), strict=False))
    given.update(zip(names, arguments, strict=False))
    run = _Run(function.__code__.co_filename, {**read.globals, **read.nonlocals, **given}, entry)
    run.depth = depth
    if isinstance(node, ast.Lambda):
        return run.value(node.body)
    try:
        run.block(node.body)
    except _ReturnedError as returned:
        return returned.value
    raise _UnknownError


def _method(owner: Any, name: str) -> MethodType:
    """A method of an object, as its class has it: nothing else is asked, which might run code."""
    mro = type(owner).__mro__
    found = next((vars(kind)[name] for kind in mro if name in vars(kind)), None)
    if type(found) is not FunctionType:
        raise _UnknownError
    return MethodType(found, owner)


def _node_of(function: FunctionType) -> ast.Lambda | ast.FunctionDef:
    tree, line = tree_of_file(function.__code__.co_filename), function.__code__.co_firstlineno
    found = [
        node
        for node in (() if tree is None else ast.walk(tree))
        if isinstance(node, (ast.Lambda, ast.FunctionDef)) and node.lineno == line
    ]
    if len(found) != 1:
        raise _UnknownError
    return found[0]


class _Run:
    """The statements of one function, with the variables that it reads."""

    def __init__(self, file: str, variables: dict[str, Any], entry: Any) -> None:
        self.file = file
        self.variables = variables
        self.entry = entry
        self.depth = 0
        self.before: Mapping[str, float | None] = {}
        self.computed: dict[str, ast.expr] = {}  # what gave a variable its value

    def block(self, body: list[ast.stmt]) -> None:
        for each in body:
            if isinstance(each, ast.Return) and each.value is not None:
                raise _ReturnedError(self.value(each.value))
            if isinstance(each, ast.If):
                self.block(each.body if self._number(each.test) else each.orelse)
            elif isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
                self.assign(each.targets[0].id, each.value)
            elif not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)):
                raise _UnknownError

    def assign(self, name: str, node: ast.expr) -> None:
        """Give a variable the value of an expression."""
        self.variables[name], self.computed[name] = self.value(node), node

    def value(self, node: ast.expr) -> Any:
        """What an expression gives.

        Raises:
            BadPartError: it is the first that is bad.
        """
        found = self._computed(node)
        if _is_bad(found) and not isinstance(node, _LEAVES):
            is_power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
            is_power = is_power or (isinstance(node, ast.Call) and called_name(node) == "power")
            table = ast.unparse(node.value) if isinstance(node, ast.Subscript) else ""
            at = source_at((self.file, node.lineno))
            end = self._end(node) if is_power else None
            raise BadPartError(self._text(node), found, at, table, is_power=is_power, end=end)
        return found

    def _end(self, node: ast.expr) -> float | None:
        """Where ``1 - step / end`` is 0, of which a power is taken."""
        base = node.args[0] if isinstance(node, ast.Call) else getattr(node, "left", None)
        while isinstance(base, ast.Call) and len(base.args) == 1:  # np.float64(1 - x)
            base = base.args[0]
        base = self.computed.get(base.id, base) if isinstance(base, ast.Name) else base
        if not isinstance(base, ast.BinOp) or not isinstance(base.op, ast.Sub):
            return None
        part = self.computed.get(base.right.id) if isinstance(base.right, ast.Name) else base.right
        if not isinstance(part, ast.BinOp) or self._number(base.left) != 1:
            return None
        step, by = self._both(part.left, part.right)
        if isinstance(part.op, ast.Mult) and 0 < by < 1 < step:
            by = 1 / by
        elif not isinstance(part.op, ast.Div):
            return None
        return float(by) if step > by > 0 else None

    def _computed(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            found = self.variables[node.id] if node.id in self.variables else _BUILTINS[node.id]
            return self._as_it_was(node, found)
        if isinstance(node, ast.Attribute):
            owner = self._computed(node.value)
            if type(owner) is ModuleType and owner.__name__ == "numpy":
                return _OF_NUMPY[node.attr]
            if owner is math:
                return math.__dict__[node.attr]
            if node.attr in vars(owner):
                return self._as_it_was(node, vars(owner)[node.attr])
            return _method(owner, node.attr)
        if isinstance(node, ast.UnaryOp):
            return _SIGNS[type(node.op)](self._number(node.operand))
        if isinstance(node, ast.BinOp):
            left, right = self._both(node.left, node.right)
            if isinstance(node.op, ast.Pow) and abs(right) > LARGEST_POWER:
                raise _UnknownError
            if isinstance(node.op, ast.Div) and not right:  # numbers of NumPy: others have raised
                return math.copysign(math.inf, left) if left else math.nan
            return _SIGNS[type(node.op)](left, right)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self._number(node.left), self._number(node.comparators[0])
            return _SIGNS[type(node.ops[0])](left, right)
        if isinstance(node, ast.IfExp):
            return self.value(node.body if self._number(node.test) else node.orelse)
        if isinstance(node, ast.Subscript):
            return self._entry(node)
        if isinstance(node, ast.Call) and not node.keywords:
            return self._call(node)
        raise _UnknownError

    def _as_it_was(self, node: ast.expr, found: Any) -> Any:
        """A variable as it was when the statements ran."""
        if not self.before:
            return found
        added = self.before.get(ast.unparse(node), 0)
        if added is None:
            raise _UnknownError
        return found - added if added else found

    def _number(self, node: ast.expr) -> Any:
        found = self.value(node)
        if not _is_number(found):
            raise _UnknownError
        return found if type(found).__module__ == "builtins" else found.item()

    def _both(self, left: ast.expr, right: ast.expr) -> tuple[Any, Any]:
        try:
            first = self._number(left)
        except _NOT_FOUND:
            self._number(right)  # which may be the bad one
            raise
        return first, self._number(right)

    def _entry(self, node: ast.Subscript) -> Any:
        table, index = self._computed(node.value), self.value(node.slice)
        if type(table) in (list, tuple, dict):
            return table[index]
        found = self.entry(table, index) if type(index) is int else None
        if found is None:
            raise _UnknownError
        return found

    def _call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
            return self._number(node.func.value)
        called = self._computed(node.func)
        given = tuple(self.value(each) for each in node.args)
        pure = (*_BUILTINS.values(), *vars(math).values(), *_OF_NUMPY.values())
        is_pure = any(called is each for each in pure)
        if is_pure and all(_is_number(x) or type(x) in (list, tuple) for x in given):
            try:
                return called(*given)
            except ValueError:  # NumPy gives NaN where math raises
                if self._is_of_numpy(node.func):
                    return math.nan
                raise
        return _called(called, given, self.entry, self.depth + 1)

    def _is_of_numpy(self, called: ast.expr) -> bool:
        owner = self._computed(called.value) if isinstance(called, ast.Attribute) else None
        return type(owner) is ModuleType and owner.__name__ == "numpy"

    def _text(self, node: ast.expr) -> str:
        return ast.unparse(_WithNumbers(self).visit(ast.parse(ast.unparse(node)).body[0]))


class _WithNumbers(ast.NodeTransformer):
    """An expression with numbers in place of variables."""

    def __init__(self, run: _Run) -> None:
        self.run = run

    def visit_Name(self, node: ast.Name) -> ast.expr:
        made = self.run.computed.get(node.id)
        if isinstance(made, ast.BinOp) and isinstance(made.op, ast.Div):
            copy = ast.parse(ast.unparse(made), mode="eval").body
            shown: ast.expr = self.visit(copy)
            return shown
        return self._with_number(node, self.run.variables.get(node.id))

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        owner = self.run.variables.get(node.value.id) if isinstance(node.value, ast.Name) else None
        return self._with_number(node, getattr(owner, "__dict__", {}).get(node.attr))

    def _with_number(self, node: ast.Name | ast.Attribute, found: Any) -> ast.expr:
        if not isinstance(found, (int, float)) or isinstance(found, bool):
            return node
        number = self.run._as_it_was(node, found)
        size = ast.Constant(abs(number if type(number) is int else float(f"{number:.6g}")))
        return ast.UnaryOp(ast.USub(), size) if number < 0 else size  # which takes its brackets


def _is_number(value: Any) -> bool:
    """One of Python or NumPy: others may do anything when they are added."""
    return isinstance(value, (int, float)) and type(value).__module__ in ("builtins", "numpy")


def _is_bad(value: Any) -> bool:
    if isinstance(value, complex):
        return True
    return isinstance(value, float) and not math.isfinite(value)
