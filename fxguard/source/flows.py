"""Where numbers go in a program, by its text: from a statement to others, also through functions.

What a statement reads goes to what it writes, an argument to a parameter, and what a function
returns to its calls. Several names of one tensor are one: what is written in place through one of
them is read through the others. It is told what may go where, in any order of the statements.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from fxguard.records import Source
from fxguard.source.syntax import tree_of_file

__all__ = ["Flows", "flows_of"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Function = ast.FunctionDef | ast.AsyncFunctionDef
# Attributes of tensors that are no numbers of theirs, and those that are the tensor.
_NO_NUMBERS = frozenset(["device", "dtype", "grad", "grad_fn", "is_cuda", "ndim", "shape"])
_THE_SAME = frozenset(["H", "T", "bias", "data", "imag", "mT", "real", "weight"])
_SIZES = frozenset(["dim", "len", "numel", "size"])
_ADDS = frozenset(["append", "extend", "insert", "update"])
# Calls that hand on tensors as they are: what is written into the result is written into them.
_HANDS_ON = frozenset(
    [
        *("children", "enumerate", "items", "iter", "list", "modules", "parameters", "reshape"),
        *("squeeze", "tuple", "unsqueeze", "values", "view", "zip"),
    ]
)


def flows_of(file: str) -> Flows | None:
    """Where numbers go in a file; None if it cannot be read."""
    tree = tree_of_file(file)
    return None if tree is None else Flows(tree)


class Flows:
    """Where numbers go in a program: from one variable, attribute or function to others.

    Args:
        tree: of the program.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._to: dict[str, set[str]] = {}
        self._functions: dict[str, list[_Function]] = {}
        self._classes: dict[str, ast.ClassDef] = {}
        self._scopes: dict[ast.AST, _Function | None] = {}
        self._bound: dict[ast.AST, frozenset[str]] = {}
        self._place(tree, None)
        for node in self._scopes:
            if isinstance(node, _FUNCTIONS):
                self._functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ClassDef):
                self._classes[node.name] = node
        for node in list(self._scopes):
            self._note(node)

    def reaches(self, begin: Source, end: Source) -> bool:
        """Whether numbers that one statement writes are among those that another one reads.

        Args:
            begin: the line of a statement.
            end: the line of another one, of the same file.
        """
        first, last = self._at(begin.line), self._at(end.line)
        if first is None or last is None:
            return False
        todo, goal = set(self._written(first)), set(self._read_by(last))
        seen = set(todo)
        while todo:
            key = todo.pop()
            if key in goal:
                return True
            new = self._to.get(key, set()) - seen
            seen |= new
            todo |= new
        return first is last

    def _at(self, line: int) -> ast.stmt | None:
        """The innermost statement at a line."""
        found = [x for x in self._scopes if isinstance(x, ast.stmt) and _holds(x, line)]
        return min(found, key=_lines, default=None)

    def _place(self, node: ast.AST, scope: _Function | None) -> None:
        """Notes the function around each node."""
        for child in ast.iter_child_nodes(node):
            self._scopes[child] = scope
            inner = child if isinstance(child, _FUNCTIONS) else scope
            self._place(child, inner)

    # What a statement reads and writes.

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            for target, value in _pairs(node):
                self._move(self._read(value), self._names(target))
                if _is_handed_on(value) or self._class_of(value) is not None:
                    self._move(self._names(target), self._read(value))
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            self._move(self._read(node.iter), self._names(node.target))
            if _is_handed_on(node.iter):
                self._move(self._names(node.target), self._read(node.iter))
        elif isinstance(node, ast.Return) and node.value is not None:
            self._move(self._read(node.value), self._written(node))
        elif isinstance(node, ast.Call):
            self._call(node)

    def _call(self, node: ast.Call) -> None:
        given = [x for each in _given(node) for x in self._read(each)]
        name = _name_of(node)
        if isinstance(node.func, ast.Attribute) and (
            name in _ADDS or (name.endswith("_") and not name.endswith("__"))
        ):
            self._move(given, self._names(node.func.value))
        if name == "register_buffer" and len(node.args) > 1:
            key = node.args[0]
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self._move(self._read(node.args[1]), [f".{key.value}"])
        for function in self._called(node):
            for parameter, argument in _matched(function, node):
                inside = self._key(parameter, function)
                self._move(self._read(argument), [inside])
                if _is_handed_on(argument) and _keeps(function, parameter):
                    self._move([inside], self._read(argument))

    def _written(self, node: ast.stmt) -> Iterator[str]:
        """What a statement gives numbers to; those that a condition decides about, too."""
        scope = self._scopes[node]
        if isinstance(node, ast.Return) and scope is not None:
            yield f"{scope.name}()"
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for target, _ in _pairs(node):
                yield from self._names(target)
        elif isinstance(node, (ast.If, ast.While)):
            for each in ast.walk(node):
                if isinstance(each, (ast.Assign, ast.AugAssign, ast.Return, ast.Expr)):
                    yield from self._written(each)
        elif isinstance(node, _FUNCTIONS):  # a default of a parameter
            for each in (*node.args.args, *node.args.kwonlyargs):
                yield self._key(each.arg, node)
        elif isinstance(node, ast.Expr):
            for each in ast.walk(node.value):
                if not isinstance(each, ast.Call):
                    continue
                if isinstance(each.func, ast.Attribute) and each.func.attr.endswith("_"):
                    yield from self._names(each.func.value)
                for function in self._called(each):
                    yield from (self._key(x, function) for x, _ in _matched(function, each))

    def _read_by(self, node: ast.stmt) -> list[str]:
        value = getattr(node, "value", None)
        return self._read(value) if isinstance(value, ast.expr) else []

    def _names(self, node: ast.expr) -> list[str]:
        """What is written where an expression is assigned, or changed in place."""
        if isinstance(node, ast.Name):
            return [self._key(node.id, self._scopes.get(node))]
        if isinstance(node, ast.Attribute) and node.attr not in _THE_SAME:
            return [] if node.attr in _NO_NUMBERS else [f".{node.attr}"]
        if isinstance(node, (ast.Subscript, ast.Starred, ast.Attribute)):
            return self._names(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self._names(node.func.value)
        elements = node.elts if isinstance(node, (ast.Tuple, ast.List)) else []
        return [name for each in elements for name in self._names(each)]

    def _read(self, node: ast.AST) -> list[str]:
        """What an expression takes its numbers from."""
        if isinstance(node, ast.Name):
            return [] if node.id == "self" else [self._key(node.id, self._scopes.get(node))]
        if isinstance(node, ast.Attribute):
            if node.attr in _NO_NUMBERS:
                return []
            own = [] if node.attr in _THE_SAME else [f".{node.attr}"]
            return [*own, *self._read(node.value)]
        if isinstance(node, ast.Call):
            return self._read_call(node)
        return [key for each in ast.iter_child_nodes(node) for key in self._read(each)]

    def _read_call(self, node: ast.Call) -> list[str]:
        if _name_of(node) in _SIZES:
            return []
        made = self._class_of(node)
        if made is not None:
            return [f".{name}" for name in _attributes(made)]
        if functions := self._called(node):
            return list(dict.fromkeys(f"{each.name}()" for each in functions))
        read = [key for each in _given(node) for key in self._read(each)]
        return [*read, *(self._read(node.func) if not _is_library(node.func) else [])]

    def _called(self, node: ast.Call) -> list[_Function]:
        """The functions of the file that a call may run; [] if it runs none of them."""
        made = self._class_of(node)
        if made is not None:
            return [x for x in made.body if isinstance(x, _FUNCTIONS) and x.name == "__init__"]
        if _is_library(node.func):
            return []
        found = self._functions.get(_name_of(node), [])
        is_method = isinstance(node.func, ast.Attribute)
        return [each for each in found if is_method == _is_method(each)]

    def _class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """The class of the file that an expression makes an instance of."""
        return self._classes.get(_name_of(node)) if isinstance(node, ast.Call) else None

    def _key(self, name: str, scope: _Function | None) -> str:
        """A variable, by the function that has it."""
        while scope is not None:
            if scope not in self._bound:
                self._bound[scope] = frozenset(_bound_in(scope))
            if name in self._bound[scope]:
                return f"{scope.name}:{scope.lineno}:{name}"
            scope = self._scopes[scope]
        return f":{name}"

    def _move(self, begin: Iterable[str], end: Iterable[str]) -> None:
        to = set(end)
        for key in begin:
            self._to.setdefault(key, set()).update(to)


def _holds(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno


def _pairs(
    node: ast.Assign | ast.AnnAssign | ast.AugAssign,
) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a statement assigns, each with its value."""
    value = node.value
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from zip(target.elts, value.elts, strict=False)
        elif value is not None:
            yield target, value


def _given(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(each.value for each in node.keywords)]


def _name_of(node: ast.Call | ast.AST) -> str:
    called = node.func if isinstance(node, ast.Call) else node
    return str(getattr(called, "attr", None) or getattr(called, "id", ""))


def _is_library(node: ast.expr) -> bool:
    """Whether something of torch or of Python's modules is called: ``torch.linalg.norm``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in ("F", "math", "nn", "np", "numpy", "torch")


def _is_method(node: _Function) -> bool:
    return bool(node.args.args) and node.args.args[0].arg == "self"


def _matched(function: _Function, node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """The parameters of a function, each with the argument of a call."""
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    names = names[1:] if _is_method(function) else names
    yield from zip(names, node.args, strict=False)
    for keyword in node.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value


def _keeps(function: _Function, name: str) -> bool:
    """Whether a function keeps a parameter, or writes into it."""
    if function.name == "__init__":
        return True
    for node in ast.walk(function):
        target: ast.expr | None = node.target if isinstance(node, ast.AugAssign) else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func.value if node.func.attr.endswith("_") else None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            target = node
        while isinstance(target, (ast.Attribute, ast.Subscript)):
            target = target.value
        if isinstance(target, ast.Name) and target.id == name:
            return True
        if isinstance(node, (ast.For, ast.comprehension)) and _is_handed_on(node.iter):
            read = (x.id for x in ast.walk(node.iter) if isinstance(x, ast.Name))
            if name in read:
                return True
    return False


def _is_handed_on(node: ast.expr) -> bool:
    """Whether an expression is a tensor that has another name already, or holds such tensors."""
    if isinstance(node, ast.Call):
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        inner = owner if owner is not None else next(iter(node.args), None)
        return _name_of(node) in _HANDS_ON and inner is not None and _is_handed_on(inner)
    if isinstance(node, (ast.Tuple, ast.List)):
        return all(map(_is_handed_on, node.elts))
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        return _is_handed_on(node.value)
    return isinstance(node, ast.Name)


def _bound_in(scope: _Function) -> Iterator[str]:
    """The variables that are a function's own."""
    arguments = scope.args
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        yield each.arg
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _attributes(node: ast.ClassDef) -> set[str]:
    """The attributes that methods of a class give its instances."""
    found = set()
    for each in ast.walk(node):
        is_written = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if is_written and isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
            found.add(each.attr)
    return found
