"""What the ``try`` blocks of a file cover, and which exceptions they handle."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fxguard.capture._undoing import lines_set_back, undoes
from fxguard.source.syntax import tree_of_file

__all__ = ["Tried", "tried_lines"]

# All other packages have exceptions of their own, which no operation of torch raises.
RAISED_BY_OPERATIONS = ("builtins", "torch", "triton")

Function = ast.FunctionDef | ast.AsyncFunctionDef
TRY = (ast.Try, getattr(ast, "TryStar", ast.Try))

# The fields of a statement that hold statements, or what holds statements in its turn.
BLOCKS = frozenset({"body", "orelse", "finalbody", "handlers", "cases"})


class Call(NamedTuple):
    """A call of ``super().__call__``."""

    first: int  # the first line of the method that it stands in, with decorators
    line: int


class Tried(NamedTuple):
    """What a ``try`` block covers."""

    lines: range
    waits_for_kernels: bool  # only NotImplementedError is handled
    waits_for_others: bool  # only exceptions that no operation of torch raises are handled
    undoes: bool  # nothing is handled, and what was set before the block is set back under finally
    set_back: frozenset[int]  # the lines that set attributes which it sets back
    calls: Call | None  # of super(), which no call of the method around it goes past


@functools.lru_cache(maxsize=256)
def tried_lines(file: str) -> tuple[Tried, ...]:
    """The lines of a file that a handler or a ``finally`` block covers."""
    if not any("try" in line for line in linecache.getlines(file)):
        return ()  # and it need not be parsed
    tree = tree_of_file(file)
    blocks = [] if tree is None else list(_try_blocks(tree))
    names = _names_of(file) if blocks else {}
    return tuple(
        Tried(
            _covered(node),
            not node.finalbody and all(map(_handles_no_kernel, node.handlers)),
            not node.finalbody and all(_is_of_others(x, inside, names) for x in node.handlers),
            undone := undoes(node, before),
            lines_set_back(node, before) if undone else frozenset(),
            _call_in(node, inside, before),
        )
        for node, inside, before in blocks
    )


def _covered(block: Any) -> range:
    """The lines whose exceptions are handled, or behind which something stands under finally."""
    last = block.body[-1]
    if block.finalbody:
        return range(block.body[0].lineno, block.finalbody[0].lineno)
    return range(block.body[0].lineno, (last.end_lineno or last.lineno) + 1)


class _TryBlock(NamedTuple):
    node: Any
    inside: Function | None  # the outermost function that contains it
    before: Sequence[ast.stmt]  # of the same block of statements


def _try_blocks(tree: ast.AST) -> Iterator[_TryBlock]:
    """All ``try`` blocks of a file. Expressions are skipped, because they contain none."""
    left: list[tuple[ast.AST, Function | None]] = [(tree, None)]
    while left:
        outer, inside = left.pop()
        if inside is None and isinstance(outer, Function):
            inside = outer
        for name in BLOCKS.intersection(outer._fields):
            block = getattr(outer, name)
            for at, node in enumerate(block):
                if isinstance(node, TRY):
                    yield _TryBlock(node, inside, block[:at])
                if not BLOCKS.isdisjoint(node._fields):
                    left.append((node, inside))


def _call_in(block: Any, inside: Function | None, before: Sequence[ast.stmt]) -> Call | None:
    """The call of ``super().__call__`` in a ``try`` block that is made whenever its method runs.

    Args:
        block: the ``try`` block.
        inside: the outermost function around it.
        before: the statements before it.
    """
    if inside is None or block not in inside.body or any(map(_leaves, before)):
        return None
    line = _sure_call(block.body)
    first = min((each.lineno for each in inside.decorator_list), default=inside.lineno)
    return None if line is None else Call(first, line)


def _sure_call(statements: Sequence[ast.stmt]) -> int | None:
    """The line at which some statements call ``super().__call__`` in any case."""
    for statement in statements:
        found = None
        match statement:
            case ast.Expr(value) | ast.Assign(value=value) | ast.Return(value):
                match value:
                    case ast.Call(ast.Attribute(ast.Call(ast.Name("super"), []), "__call__")):
                        found = statement.lineno
            case ast.With(body=body):
                found = _sure_call(body)
            case ast.If(body=body, orelse=orelse):
                found = _sure_call(body) if _sure_call(orelse) else None
        if found is not None or _leaves(statement):
            return found
    return None


def _leaves(statement: ast.AST) -> bool:
    """Whether a function may end in a statement, other than by an exception."""
    if isinstance(statement, (ast.Return, ast.Yield, ast.YieldFrom)):
        return True
    if isinstance(statement, (Function, ast.Lambda, ast.ClassDef)):
        return False
    return any(map(_leaves, ast.iter_child_nodes(statement)))


def _handles_no_kernel(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.type, ast.Name) and handler.type.id == "NotImplementedError"


def _is_of_others(
    handler: ast.ExceptHandler, inside: Function | None, names: Mapping[str, Any]
) -> bool:
    """Whether no operation of torch raises what is handled.

    Args:
        handler: the handler.
        inside: the outermost function around it.
        names: the global names of its module.
    """
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return all(
        isinstance(kind, ast.Name)
        and _is_other(names.get(kind.id))
        and not _is_bound_in(inside, kind.id)
        for kind in kinds
    )


def _is_other(kind: Any) -> bool:
    return (
        isinstance(kind, type)
        and issubclass(kind, Exception)
        and kind.__module__.partition(".")[0] not in RAISED_BY_OPERATIONS
    )


def _is_bound_in(function: Function | None, name: str) -> bool:
    """Whether a name may be another than the global one in a function."""
    for node in () if function is None else ast.walk(function):
        if isinstance(node, ast.Name):
            if node.id == name and not isinstance(node.ctx, ast.Load):
                return True
        elif isinstance(node, ast.arg):
            if node.arg == name:
                return True
        elif isinstance(node, ast.alias):
            if name in (node.asname, node.name.partition(".")[0]):
                return True
        elif isinstance(node, (Function, ast.ClassDef)) and node.name == name:
            return True
    return False


def _names_of(file: str) -> dict[str, Any]:
    """The global names of the module that a file holds; none if it is not known."""
    module = sys.modules.get(_modules.get(file, ""))
    if getattr(module, "__file__", None) != file:
        _modules.clear()
        for name, each in list(sys.modules.items()):
            _modules.setdefault(getattr(each, "__file__", None), name)
        module = sys.modules.get(_modules.get(file, ""))
    return {} if module is None else vars(module)


_modules: dict[str | None, str] = {}  # the name of the module that a file holds
