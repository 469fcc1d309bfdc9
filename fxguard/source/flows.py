"""Where numbers go in a program, by its text: from a statement to others, also through functions.

What a statement reads goes to what it writes, an argument to a parameter, and what a function
returns to its calls. Several names of one tensor are one: what is written in place through one of
them is read through the others. It is told what may go where, in any order of the statements.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from fxguard.records import Source
from fxguard.source._functions import (
    FUNCTIONS,
    Function,
    assigned_in,
    attributes_of,
    bound_in,
    given_to,
    holds,
    is_handed_on,
    is_library,
    is_method,
    keeps_parameter,
    lines_of,
    matched,
    methods_of,
    name_of,
    result_of,
)
from fxguard.source.syntax import tree_of_file

__all__ = ["Flows", "flows_of"]

# Attributes of tensors that are no numbers of theirs, and those that are the tensor.
_NO_NUMBERS = frozenset(["device", "dtype", "grad", "grad_fn", "is_cuda", "ndim", "shape"])
_THE_SAME = frozenset(["H", "T", "bias", "data", "imag", "mT", "real", "weight"])
_SIZES = frozenset(["dim", "len", "numel", "size"])
# Methods that change a module, and return it.
_OF_MODULES = frozenset(
    ["bfloat16", "cpu", "cuda", "double", "eval", "float", "half", "requires_grad_", "to", "train"]
)
_ADDS = frozenset(["append", "extend", "insert", "update"])


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
        self._functions: dict[str, list[Function]] = {}
        self._classes: dict[str, ast.ClassDef] = {}
        self._instances: dict[str, ast.ClassDef] = {}
        self._scopes: dict[ast.AST, Function | None] = {}
        self._bound: dict[ast.AST, frozenset[str]] = {}
        self._values: dict[str, list[ast.expr]] = {}
        self._place(tree, None)
        for node in self._scopes:
            if isinstance(node, FUNCTIONS):
                self._functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ClassDef):
                self._classes[node.name] = node
        for node in self._scopes:
            made = self._class_of(node.value) if isinstance(node, ast.Assign) else None
            if made is not None and isinstance(node, ast.Assign):
                self._instances.update((ast.unparse(each), made) for each in node.targets)
        for node in list(self._scopes):
            self._note(node)

    def reaches(self, begin: Source, end: Source, name: str = "") -> bool:
        """Whether numbers that one statement writes are among those that another one reads.

        Args:
            begin: the line of a statement.
            end: the line of another one, of the same file.
            name: what of it that one has to read, ``self.table``; "" for anything.
        """
        first, last = self._at(begin.line), self._at(end.line)
        if first is None or last is None:
            return False
        todo, goal = set(self._written(first)), set(self._read_by(last, name))
        seen = set(todo)
        while todo:
            key = todo.pop()
            if key in goal:
                return True
            new = self._to.get(key, set()) - seen
            seen |= new
            todo |= new
        return first is last

    def behind(self, end: Source, name: str = "", depth: int = 4) -> Iterator[ast.expr]:
        """The expressions that gave a statement's variables and attributes their values.

        Args:
            end: the line of the statement.
            name: of one of them; "" for all.
            depth: from one statement back to the next.
        """
        last = self._at(end.line)
        yield from self._behind([] if last is None else self._read_by(last, name), depth)

    def behind_expression(self, node: ast.expr, depth: int = 3) -> Iterator[ast.expr]:
        """The same of an expression of the file."""
        yield from self._behind(self._read(node), depth)

    def _behind(self, todo: list[str], depth: int) -> Iterator[ast.expr]:
        seen = set[str]()
        for _ in range(depth):
            values = [x for key in todo if key not in seen for x in self._values.get(key, ())]
            seen.update(todo)
            yield from values
            todo = [key for value in values for key in self._read(value)]

    def _at(self, line: int) -> ast.stmt | None:
        """The innermost statement at a line."""
        found = [x for x in self._scopes if isinstance(x, ast.stmt) and holds(x, line)]
        return min(found, key=lines_of, default=None)

    def _place(self, node: ast.AST, scope: Function | None) -> None:
        """Notes the function around each node."""
        for child in ast.iter_child_nodes(node):
            self._scopes[child] = scope
            inner = child if isinstance(child, FUNCTIONS) else scope
            self._place(child, inner)

    # What a statement reads and writes.

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            for target, value in assigned_in(node):
                self._gives(value, self._names(target))
                if is_handed_on(value) or self._class_of(value) is not None:
                    self._move(self._names(target), self._read(value))
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            self._move(self._read(node.iter), self._names(node.target))
            if is_handed_on(node.iter):
                self._move(self._names(node.target), self._read(node.iter))
        elif isinstance(node, ast.Return) and node.value is not None:
            self._gives(node.value, list(self._written(node)))
        elif isinstance(node, ast.Call):
            self._call(node)

    def _call(self, node: ast.Call) -> None:
        given = [x for each in given_to(node) for x in self._read(each)]
        name = name_of(node)
        if isinstance(node.func, ast.Attribute) and (
            name in _ADDS or (name.endswith("_") and not name.endswith("__"))
        ):
            self._move(given, self._names(node.func.value))
        if name == "register_buffer" and len(node.args) > 1:
            key = node.args[0]
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self._gives(node.args[1], [f".{key.value}"])
        for function in self._called(node):
            for parameter, argument in matched(function, node):
                inside = self._key(parameter, function)
                self._gives(argument, [inside])
                if is_handed_on(argument) and keeps_parameter(function, parameter):
                    self._move([inside], self._read(argument))

    def _written(self, node: ast.stmt) -> Iterator[str]:
        """What a statement gives numbers to; those that a condition decides about, too."""
        scope = self._scopes[node]
        if isinstance(node, ast.Return) and scope is not None:
            yield result_of(scope)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for target, _ in assigned_in(node):
                yield from self._names(target)
        elif isinstance(node, (ast.If, ast.While)):
            for each in ast.walk(node):
                if isinstance(each, (ast.Assign, ast.AugAssign, ast.Return, ast.Expr)):
                    yield from self._written(each)
        elif isinstance(node, FUNCTIONS):  # a default of a parameter
            for each in (*node.args.args, *node.args.kwonlyargs):
                yield self._key(each.arg, node)
        elif isinstance(node, ast.Expr):
            for each in ast.walk(node.value):
                if not isinstance(each, ast.Call):
                    continue
                writes = name_of(each).endswith("_") or name_of(each) in _OF_MODULES
                if writes and isinstance(each.func, ast.Attribute):
                    yield from self._names(each.func.value)
                for function in self._called(each):
                    yield from (self._key(x, function) for x, _ in matched(function, each))

    def _read_by(self, node: ast.stmt, name: str = "") -> list[str]:
        value = getattr(node, "value", None)
        if not isinstance(value, ast.expr):
            return []
        if not name:
            return self._read(value)
        found = (each for each in ast.walk(value) if isinstance(each, (ast.Name, ast.Attribute)))
        return [key for each in found if ast.unparse(each) == name for key in self._read(each)]

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
        if name_of(node) in _SIZES:
            return []
        made = self._class_of(node)
        if made is not None:
            return [f".{name}" for name in attributes_of(made)]
        if functions := self._called(node):
            return list(map(result_of, functions))
        read = [key for each in given_to(node) for key in self._read(each)]
        return [*read, *(self._read(node.func) if not is_library(node.func) else [])]

    def _called(self, node: ast.Call) -> list[Function]:
        """The functions of the file that a call may run; [] if it runs none of them."""
        made = self._class_of(node)
        if made is not None:
            return methods_of(made, "__init__")
        instance = self._class_of(node.func) or self._instances.get(ast.unparse(node.func))
        if instance is not None:
            return methods_of(instance, "forward", "__call__")
        if is_library(node.func):
            return []
        found = self._functions.get(name_of(node), [])
        is_by_owner = isinstance(node.func, ast.Attribute)
        return [each for each in found if is_by_owner == is_method(each)]

    def _class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """The class of the file that an expression makes an instance of."""
        while isinstance(node, ast.Call) and name_of(node) in _OF_MODULES:
            node = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        return self._classes.get(name_of(node)) if isinstance(node, ast.Call) else None

    def _key(self, name: str, scope: Function | None) -> str:
        """A variable, by the function that has it."""
        while scope is not None:
            if scope not in self._bound:
                self._bound[scope] = frozenset(bound_in(scope))
            if name in self._bound[scope]:
                return f"{scope.name}:{scope.lineno}:{name}"
            scope = self._scopes[scope]
        return f":{name}"

    def _gives(self, value: ast.expr, names: list[str]) -> None:
        """Notes that an expression gives some names their value."""
        self._move(self._read(value), names)
        for each in names:
            self._values.setdefault(each, []).append(value)

    def _move(self, begin: Iterable[str], end: Iterable[str]) -> None:
        to = set(end)
        for key in begin:
            self._to.setdefault(key, set()).update(to)
