"""The statement of a script that gave a name its value: found in the source, never run.

Knows nothing of torch. A statement is given only if no other one can have given the value: none in
a branch that perhaps did not run, and none further down in a loop.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence

from fxguard.records import Source
from fxguard.source.syntax import tree_of, tree_of_file

__all__ = [
    "assignment_of",
    "assignments_of",
    "converted_by",
    "expressions_on",
    "function_around",
    "function_called_in",
    "handed_on_by",
    "holds",
    "in_words",
    "source_of",
    "statement_at",
    "statement_node",
    "target_of",
]

LONGEST = 100  # characters of a statement of several lines
MOST_CONVERSIONS = 3
MODULES = ("torch", "np", "numpy")  # as programs call them

# These hand on the numbers that they are given, as calls or methods.
CONVERSIONS = frozenset(
    [
        *("Tensor", "array", "as_tensor", "asarray", "astype", "clone", "contiguous", "copy"),
        *("cpu", "cuda", "detach", "double", "float", "from_numpy", "numpy", "reshape"),
        *("squeeze", "tensor", "to", "unsqueeze", "view"),
    ]
)

_Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_WITHS = (ast.With, ast.AsyncWith)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)


class _UnclearError(Exception):
    """Several statements may have given the value."""


def assignment_of(name: str, read_at: Source) -> Source | None:
    """The statement that assigned a variable before a line read it; None if that is not certain.

    Args:
        name: of the variable, ``sigma``.
        read_at: the line that reads it.
    """
    tree = tree_of_file(read_at.file)
    if tree is None:
        return None
    scopes = list(_scopes_at(tree, read_at.line))
    if not scopes or _is_bound_inside(scopes[-1], name, read_at.line):
        return None
    try:
        found = _last_in(scopes[-1].body, name, read_at.line)
    except _UnclearError:
        return None
    if found is None and not _binds(scopes[-1], name):
        found = _only_one(tree, name)
    return None if found is None else source_of(found, read_at.file)


def assignments_of(name: str, read_at: Source) -> list[tuple[str, Source]]:
    """The same, and what the statement only converts, such as an array of NumPy.

    Each variable with its statement, the first one first; none if that is not certain, or on the
    line itself.
    """
    found: list[tuple[str, Source]] = []
    while len(found) <= MOST_CONVERSIONS and name:
        made = assignment_of(name, read_at)
        if made is None or made.line == read_at.line:
            break
        found.append((name, made))
        statement = statement_node(made)
        name = "" if statement is None else converted_in(statement)
        read_at = made
    return found


def in_words(found: Sequence[tuple[str, Source]]) -> str:
    """`` `x` comes from a.py:3: x = from_numpy(X), and `X` from a.py:2: X = X / X.std()``."""
    return ", and ".join(
        f"`{name}` {'' if position else 'comes '}from {source}"
        for position, (name, source) in enumerate(found)
    )


def converted_in(statement: ast.stmt) -> str:
    """The variable that a statement hands on, as in ``x = torch.from_numpy(X[:5]).float()``.

    "" if it computes something.
    """
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return _behind_conversions(statement.value)
    return ""


def converted_by(code: str, name: str) -> str:
    """The variable that a line converts by a call of that name; "" if there is none, or several.

    Example:
        >>> converted_by("loss = net(torch.from_numpy(x).float()).mean()", "float")
        "x"
    """
    tree = tree_of(code)
    calls = [] if tree is None else [x for x in ast.walk(tree) if isinstance(x, ast.Call)]
    named = [x for x in calls if isinstance(x.func, ast.Attribute) and x.func.attr == name]
    found = set(map(_behind_conversions, named))
    return found.pop() if len(found) == 1 else ""


def _behind_conversions(node: ast.expr | None) -> str:
    while node is not None and not isinstance(node, ast.Name):
        node = handed_on_by(node)
    return "" if node is None else node.id


def handed_on_by(node: ast.expr) -> ast.expr | None:
    """What an expression takes its numbers from; None if it computes them."""
    if isinstance(node, ast.Subscript):
        return node.value
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr in CONVERSIONS:
        owner = function.value
        is_method = not (isinstance(owner, ast.Name) and owner.id in MODULES)
        return owner if is_method else next(iter(node.args), None)
    return None


def statement_at(source: Source) -> str:
    """The whole statement around a line, in one line; only the line if it has a body."""
    node = statement_node(source)
    return source.code if node is None else ast.unparse(node)


def statement_node(source: Source) -> ast.stmt | None:
    """The same as a syntax tree; None if it has a body, or cannot be read."""
    tree = tree_of_file(source.file)
    nodes = () if tree is None else ast.walk(tree)
    around = [each for each in nodes if isinstance(each, _SIMPLE) and holds(each, source.line)]
    return around[-1] if around else None


def expressions_on(source: Source) -> list[str]:
    """The largest expressions of a statement that are on one line of it alone."""
    statement, found = statement_node(source), list[ast.expr]()
    for node in () if statement is None else ast.walk(statement):  # outer nodes come first
        if not isinstance(node, ast.expr) or any(node in ast.walk(each) for each in found):
            continue
        if node.lineno == node.end_lineno == source.line:
            found.append(node)
    return [ast.unparse(each) for each in found]


def target_of(source: Source) -> str:
    """What a statement assigns or writes, or a part of: ``alpha`` of ``alpha[t] = x``; else ""."""
    node = statement_node(source)
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    target = targets[0] if not isinstance(node, ast.Expr) else _written_by(node.value)
    while isinstance(target, ast.Subscript):
        target = target.value
    return ast.unparse(target) if isinstance(target, (ast.Name, ast.Attribute)) else ""


def _written_by(node: ast.expr) -> ast.expr | None:
    """What a method writes: ``w`` of ``w.sub_(x)``."""
    called = node.func if isinstance(node, ast.Call) else None
    writes = isinstance(called, ast.Attribute) and called.attr.endswith("_")
    return called.value if writes and isinstance(called, ast.Attribute) else None


def function_called_in(statement: ast.stmt, file: str) -> ast.stmt | None:
    """The function of the same file that a statement calls; None if there are none, or several."""
    tree = tree_of_file(file)
    calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    names = {x.id if isinstance(x, ast.Name) else getattr(x, "attr", "") for x in calls}
    nodes = () if tree is None else ast.walk(tree)
    found = [each for each in nodes if isinstance(each, _FUNCTIONS) and each.name in names]
    return found[0] if len(found) == 1 else None


def function_around(source: Source) -> ast.AST:
    """The innermost function around a line, or else the module, as a syntax tree."""
    tree = tree_of_file(source.file)
    return ast.Module([], []) if tree is None else list(_scopes_at(tree, source.line))[-1]


def holds(node: ast.AST, line: int) -> bool:
    """Whether a node covers a line."""
    begin, end = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    return begin is not None and end is not None and begin <= line <= end


def _scopes_at(tree: ast.Module, line: int) -> Iterator[_Scope]:
    """The module and the functions around a line, from the outside in."""
    yield tree
    for node in ast.walk(tree):  # outer functions come before inner ones
        if isinstance(node, _FUNCTIONS) and node.body[0].lineno <= line and holds(node, line):
            yield node


def _within(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is in it, except what is in scopes of their own."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _SCOPES):
            yield from _within(child)


def _assigns(node: ast.AST, name: str) -> bool:
    """Whether a node, or something in it, gives a variable a value."""
    return any(
        isinstance(each, ast.Name) and each.id == name and not isinstance(each.ctx, ast.Load)
        for each in _within(node)
    )


def _binds(scope: _Scope, name: str) -> bool:
    """Whether a function has its own variable of that name."""
    if isinstance(scope, ast.Module):
        return False
    arguments = (node.arg for node in ast.walk(scope.args) if isinstance(node, ast.arg))
    return name in arguments or any(_assigns(each, name) for each in scope.body)


def _is_bound_inside(scope: ast.AST, name: str, line: int) -> bool:
    """Whether a comprehension or a lambda at that line has its own variable of that name."""
    inner = [x for x in ast.walk(scope) if isinstance(x, _COMPREHENSIONS) and holds(x, line)]
    nodes = [node for each in inner for node in ast.walk(each)]
    targets = (x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store))
    return name in targets or name in (x.arg for x in nodes if isinstance(x, ast.arg))


def _only_one(tree: ast.Module, name: str) -> ast.stmt | None:
    """The statement of a module that alone gives a name its value."""
    found = [each for each in tree.body if _assigns(each, name)]
    writes = any(isinstance(x, ast.Global) and name in x.names for x in ast.walk(tree))
    is_simple = len(found) == 1 and isinstance(found[0], (ast.Assign, ast.AnnAssign))
    return found[0] if is_simple and not writes else None


def _last_in(body: Sequence[ast.stmt], name: str, line: int) -> ast.stmt | None:
    """The last statement of a block that assigned a name before a line was reached.

    Raises:
        _UnclearError: another one may have.
    """
    found: ast.stmt | None = None
    is_clear = True
    for each in body:
        if each.lineno > line:
            break
        if isinstance(each, _SCOPES):
            continue
        if holds(each, line):
            inner = _last_around(each, name, line)
            found, is_clear = (inner, True) if inner is not None else (found, is_clear)
        elif isinstance(each, _WITHS):
            inner = _last_in(each.body, name, line)
            found, is_clear = (inner, True) if inner is not None else (found, is_clear)
        elif _assigns(each, name):
            found, is_clear = each, not hasattr(each, "body")
    if not is_clear:
        raise _UnclearError
    return found


def _last_around(statement: ast.stmt, name: str, line: int) -> ast.stmt | None:
    """The same for the statement that holds the line."""
    blocks = [getattr(statement, each, []) for each in ("body", "orelse", "finalbody")]
    blocks += [each.body for each in getattr(statement, "handlers", [])]
    blocks += [each.body for each in getattr(statement, "cases", [])]
    holding = [block for block in blocks if block and _covers(block, line)]
    inner = _last_in(holding[0], name, line) if holding else None
    if inner is not None:
        return inner
    if isinstance(statement, _LOOPS):
        if any(_assigns(each, name) for each in statement.body):
            raise _UnclearError  # in the turn before
        if not isinstance(statement, ast.While) and _assigns(statement.target, name):
            return statement
    is_with = isinstance(statement, _WITHS) and any(_assigns(x, name) for x in statement.items)
    return statement if is_with else None


def _covers(block: Sequence[ast.stmt], line: int) -> bool:
    return block[0].lineno <= line <= (block[-1].end_lineno or line)


def source_of(statement: ast.stmt, file: str) -> Source:
    """A statement as a line of its file: the first line of a compound one."""
    code = linecache.getline(file, statement.lineno).strip()
    if not hasattr(statement, "body") and statement.end_lineno != statement.lineno:
        code = ast.unparse(statement)
        code = code if len(code) <= LONGEST else code[: LONGEST - 1] + "…"
    return Source(file, statement.lineno, code)
