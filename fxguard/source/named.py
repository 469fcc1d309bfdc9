"""The operand of an operation as the program's line has it: ``deg`` of ``deg.pow(-0.5)``."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fxguard.source.syntax import tree_of

__all__ = [
    "OPERATORS",
    "SIGNS",
    "argument_text",
    "called_name",
    "factor_text",
    "first_argument",
    "given_text",
    "gradient_in",
    "innermost_operand_text",
    "is_number_of_module",
    "is_of_numbers",
    "last_name",
    "operand_text",
    "operand_texts",
    "other_text",
    "unbounded",
    "variable_in",
    "variables_in",
    "without_parentheses",
]

LONGEST = 30  # characters

# Which operator computes it, and which of its operands is in question; else the first of a call.
OPERATORS: dict[str, tuple[type[ast.operator] | None, int]] = {
    "addcdiv": (None, 2),
    "div": (ast.Div, 1),
    "floor_divide": (ast.FloorDiv, 1),
    "fmod": (None, 1),
    "pow": (ast.Pow, 0),
    "remainder": (ast.Mod, 1),
    "xlogy": (None, 1),
}
SIGNS: dict[str, type[ast.operator]] = {
    "add": ast.Add,
    "div": ast.Div,
    "matmul": ast.MatMult,
    "mul": ast.Mult,
    "pow": ast.Pow,
    "sub": ast.Sub,
}
MODULES = ("F", "math", "nn", "torch")  # as programs call them
NOT_OF_TENSORS = ("math", "cmath", "np", "numpy")
SAFE = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant)  # these need no parentheses


def operand_text(code: str, name: str) -> str:
    """The operand that matters for a pole or a domain: the divisor, the base, or the only one.

    Args:
        code: the text of a line.
        name: the plain name of an operation of that line.

    Returns:
        Ready to be followed by a method; "" if the line has no such operation, or several with
        different operands, or if the operand is long or a number.

    Example:
        >>> operand_text("z = (y.unsqueeze(-1) - mu) / sigma", "div")
        'sigma'
        >>> operand_text("a = torch.log(1 - p)", "log")
        '(1 - p)'
    """
    sign, position = OPERATORS.get(name, (None, 0))
    return _only_text(_operands(code, name, sign, position))


def operand_texts(code: str, name: str) -> set[str]:
    """The same of each such operation of a line, "" of a long one; numbers are left out.

    Example:
        >>> sorted(operand_texts("h = torch.log(k / lam) + (k - 1) * torch.log(z)", "log"))
        ['(k / lam)', 'z']
    """
    sign, position = OPERATORS.get(name, (None, 0))
    nodes = _operands(code, name, sign, position)
    return {_text(node, with_numbers=False) for node in nodes if _is_of_names(node)}


def other_text(code: str, name: str) -> str:
    """The other operand of one that has two: the exponent, the dividend; a number as well.

    Example:
        >>> other_text("y = x.pow(self.p)", "pow")
        'self.p'
    """
    sign, position = OPERATORS.get(name, (None, 0))
    return _only_text(_operands(code, name, sign, 0 if position else 1), with_numbers=True)


def argument_text(code: str, name: str, position: int, *, is_method: bool | None = None) -> str:
    """The operand at a position of an operation of a line; "" if that is not certain.

    Args:
        code: the text of a line.
        name: the plain name of an operation of that line.
        position: of the operand.
        is_method: whether a call is one of a method of a tensor, which is its first operand; None
            to judge by what it is called on.

    Example:
        >>> argument_text("z = (target - mu) / sigma", "sub", 0)
        'target'
        >>> argument_text("y = torch.where(seen, nll, 0.0)", "where", 0)
        'seen'
    """
    sign = SIGNS.get(name)
    nodes = _operands(code, name, sign, position, is_method=is_method)
    return without_parentheses(_only_text(nodes))


def without_parentheses(text: str) -> str:
    """Without the parentheses that only a method needs."""
    is_whole = text.startswith("(") and text.endswith(")") and tree_of(text[1:-1]) is not None
    return text[1:-1] if is_whole else text


def given_text(code: str, name: str, position: int, count: int) -> str:
    """One of the operands of the calls of a function; "" unless it is given so many in a row.

    Example:
        >>> given_text("y = F.kl_div(log_q, log_p, log_target=True)", "kl_div", 1, 2)
        'log_p'
    """
    tree = _parsed(code)
    calls = (
        _arguments(node)
        for node in (() if tree is None else ast.walk(tree))
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name))
        if called_name(node) == name and not is_of_numbers(node)
    )
    return _only_text(given[position] for given in calls if len(given) == count)


def _only_text(nodes: Iterator[ast.expr], *, with_numbers: bool = False) -> str:
    found = {_text(node, with_numbers=with_numbers) for node in nodes}
    return found.pop() if len(found) == 1 else ""


def gradient_in(code: str) -> str:
    """The gradient that a line reads; "" if it reads none, or several.

    Example:
        >>> gradient_in("grads = [p.grad.float() / scale for p in weights]")
        'p.grad'
    """
    tree = _parsed(code)
    nodes = () if tree is None else ast.walk(tree)
    found = {ast.unparse(x) for x in nodes if isinstance(x, ast.Attribute) and x.attr == "grad"}
    found -= {"torch.autograd.grad", "autograd.grad"}
    return found.pop() if len(found) == 1 else ""


def smooths(code: str) -> bool:
    """Whether a statement calls something with ``label_smoothing`` above 0, or of a variable.

    Example:
        >>> smooths("loss = F.cross_entropy(x, y, label_smoothing=0.1)")
        True
        >>> smooths("loss = F.cross_entropy(x, y, label_smoothing=0.0)")
        False
    """
    tree = _parsed(code)
    given = [
        keyword.value
        for node in (() if tree is None else ast.walk(tree))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "label_smoothing"
    ]
    return any(not isinstance(each, ast.Constant) or bool(each.value) for each in given)


def variable_in(text: str) -> str:
    """The one variable that operators, methods and torch's functions compute an operand from.

    Returns:
        "" if there are several, or if something else computes it, such as a module.

    Example:
        >>> variable_in("(1 - p.float())"), variable_in("self.net(x)"), variable_in("a + b")
        ('p', '', '')
    """
    tree = _parsed(text)
    if tree is None:
        return ""
    found = set[str]()
    indices = {x for node in ast.walk(tree) if isinstance(node, ast.Subscript)
               for x in ast.walk(node.slice)}  # fmt: skip
    for node in ast.walk(tree):
        if node in indices:
            continue
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Attribute):
            return ""  # a function of the program
        if isinstance(node, ast.Name) and node.id not in MODULES:
            found.add(node.id)
    return found.pop() if len(found) == 1 and "self" not in found else ""


def variables_in(code: str) -> set[str]:
    """The names that a statement reads or writes."""
    tree = _parsed(code)
    nodes = () if tree is None else ast.walk(tree)
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def _parsed(code: str) -> ast.AST | None:
    texts = (code, f"{code}\n    pass", f"{code.rstrip(',')}")
    return next((tree for tree in map(tree_of, texts) if tree is not None), None)


def _operands(
    code: str,
    name: str,
    sign: type[ast.operator] | None,
    position: int,
    *,
    is_method: bool | None = None,
) -> Iterator[ast.expr]:
    tree = _parsed(code)
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.BinOp) and sign is not None and isinstance(node.op, sign):
            yield node.right if position else node.left
        elif isinstance(node, ast.AugAssign) and sign is not None and isinstance(node.op, sign):
            yield node.value if position else node.target
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            if called_name(node) != name or is_of_numbers(node):
                continue
            given = node.args if is_method is False else _arguments(node)
            if len(given) > position:
                yield given[position]


def innermost_operand_text(code: str, name: str) -> str:
    """The same of an operation whose operand does not hold that operation again.

    Example:
        >>> innermost_operand_text("y = x.pow(p).mean(-1).pow(1 / p)", "pow")
        'x'
    """
    sign, position = OPERATORS.get(name, (None, 0))
    found = _operands(code, name, sign, position)
    return _only_text(x for x in found if not any(_operands(ast.unparse(x), name, sign, position)))


def factor_text(code: str, *, is_first: bool) -> str:
    """The only variable or attribute that is a factor on one side of the products of a line.

    Example:
        >>> factor_text("h = -(p * log_p).sum(-1)", is_first=False)
        'log_p'
        >>> factor_text("target = r + gamma * (1 - done) * boot", is_first=False)
        'boot'
    """
    tree = _parsed(code)
    found = [
        node.left if is_first else node.right
        for node in (() if tree is None else ast.walk(tree))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
    ]
    named = [node for node in found if isinstance(node, (ast.Attribute, ast.Name))]
    return _text(named[0], with_numbers=False) if len(named) == 1 else ""


def unbounded(text: str) -> str:
    """An expression without the bounds around it.

    Example:
        >>> unbounded("cos.clamp(-1.0, 1.0)")
        'cos'
    """
    tree = _parsed(text)
    first = tree.body[0] if isinstance(tree, ast.Module) and len(tree.body) == 1 else None
    node = first.value if isinstance(first, ast.Expr) else None
    while isinstance(node, ast.Call) and called_name(node) in ("clamp", "clip"):
        node = first_argument(node)
    return text if node is None else _text(node, with_numbers=True) or text


def first_argument(call: ast.Call) -> ast.expr | None:
    """The tensor that a method is called of, or the first argument of a function."""
    return next(iter(_arguments(call)), None)


def _arguments(call: ast.Call) -> list[ast.expr]:
    """The arguments of a function; a method's tensor is the first."""
    given = list(call.args)
    if isinstance(call.func, ast.Attribute) and not _is_module(call.func.value):
        given.insert(0, call.func.value)
    return given


def last_name(node: ast.AST) -> str:
    """The name of a variable, or that of an attribute: ``lr`` of ``self.hp.lr``."""
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def called_name(call: ast.Call) -> str:
    """``exp`` of ``torch.exp(x)``, ``exp(x)`` and ``x.exp_()``."""
    called = call.func
    name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
    return str(name).rstrip("_")


def is_of_numbers(call: ast.Call) -> bool:
    """Whether a function computes with Python's numbers or arrays: ``math.log``."""
    return is_number_of_module(call.func)


def is_number_of_module(node: ast.expr) -> bool:
    """Whether an expression is something of Python's mathematics or of numpy: ``math.pi``."""
    owner = node.value if isinstance(node, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id in NOT_OF_TENSORS


def _is_module(node: ast.expr) -> bool:
    """Whether a method's name is that of a function: ``torch.log``, ``torch.special.xlogy``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in MODULES


def _text(node: ast.expr, *, with_numbers: bool) -> str:
    if not (with_numbers or _is_of_names(node)):
        return ""
    text = ast.unparse(node)
    if len(text) > LONGEST:
        return ""
    return text if isinstance(node, SAFE) else f"({text})"


def _is_of_names(node: ast.expr) -> bool:
    return any(isinstance(each, ast.Name) for each in ast.walk(node))
