"""Expressions of a program as operations of torch: ``x.log()`` and ``torch.log(x)`` are one.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

__all__ = ["OF_RULES", "PARAMETERS", "Imports", "Operation", "number_in", "plain_name"]

SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Div: "div",
    ast.MatMult: "matmul",
    ast.Mult: "mul",
    ast.Pow: "pow",
    ast.Sub: "sub",
}
SYNONYMS = {
    "bmm": "matmul",
    "clamp_max": "clamp",
    "clamp_min": "clamp",
    "clip": "clamp",
    "divide": "div",
    "expit": "sigmoid",
    "mm": "matmul",
    "multiply": "mul",
    "negative": "neg",
    "reciprocal": "div",
    "rsub": "sub",
    "subtract": "sub",
    "true_divide": "div",
}
# Parameters after the first that calls give by position or by name.
PARAMETERS = {
    "clamp": ("min", "max"),
    "clamp_max": ("max",),
    "clamp_min": ("min",),
    "log_softmax": ("dim",),
    "logsumexp": ("dim", "keepdim"),
    "mean": ("dim", "keepdim"),
    "softmax": ("dim",),
    "sum": ("dim", "keepdim"),
}
FLOAT = "float"
NUMBERS: dict[type[ast.operator], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Div: operator.truediv,
    ast.Mult: operator.mul,
    ast.Sub: operator.sub,
}


def plain_name(name: str) -> str:
    """One name for all spellings of an operation.

    Example:
        >>> plain_name("bmm"), plain_name("log")
        ('matmul', 'log')
    """
    return SYNONYMS.get(name, name)


@dataclass(frozen=True, slots=True)
class Operation:
    """A call, or an operator, with its operands."""

    name: str  # "log", "add"
    operands: tuple[ast.expr | None, ...]  # None: a parameter that the call leaves out
    keywords: dict[str, ast.expr] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Imports:
    """The names under which a file knows torch."""

    # Dotted name in the file to the dotted name of the module: {"F": "torch.nn.functional"}.
    modules: dict[str, str]
    functions: dict[str, str]  # {"exp": "torch.exp"}
    # What else it imports, and a method's own object: their methods are not those of tensors.
    others: frozenset[str] = frozenset()
    of_rule: bool = False  # whether every name that is called is one of torch

    @classmethod
    def of(cls, tree: ast.Module) -> Imports:
        """Those that a file imports outside of its functions and classes."""
        modules, functions, others = dict[str, str](), dict[str, str](), {"self", "cls"}
        for node in _at_top(tree):
            if isinstance(node, ast.Import):
                for each in node.names:
                    if each.name.partition(".")[0] not in ("torch", "math"):
                        others.add(each.asname or each.name.partition(".")[0])
                        continue
                    if each.asname:
                        modules[each.asname] = each.name
                    else:
                        modules[each.name.partition(".")[0]] = each.name.partition(".")[0]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                base = node.module or ""
                if base.partition(".")[0] not in ("torch", "math"):
                    others.update(each.asname or each.name for each in node.names)
                    continue
                for each in node.names:
                    full = f"{base}.{each.name}"
                    is_module = full in ("torch.nn", "torch.nn.functional", "torch.special")
                    (modules if is_module else functions)[each.asname or each.name] = full
        return cls(modules, functions, frozenset(others))

    def module_of(self, node: ast.expr) -> str:
        """``torch.nn.functional`` of ``F`` or ``nn.functional``; "" if it is no such module."""
        if isinstance(node, ast.Name):
            return self.modules.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.module_of(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def spelled(self, name: str) -> str:
        """A function of torch as this file can call it; "" if it imports nothing of torch.

        Args:
            name: "torch.nn.functional.logsigmoid".
        """
        for own, full in self.functions.items():
            if full == name:
                return own
        module, _, last = name.rpartition(".")
        rest = last
        while module:
            found = [own for own, full in self.modules.items() if full == module]
            if found:
                return f"{found[0]}.{rest}"
            module, _, last = module.rpartition(".")
            rest = f"{last}.{rest}"
        return ""

    def operation(self, node: ast.expr) -> Operation | None:
        """What an expression computes; None for names, numbers, and calls of anything else."""
        if isinstance(node, ast.BinOp):
            name = SIGNS.get(type(node.op), "")
            return Operation(name, (node.left, node.right)) if name else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return Operation("neg", (node.operand,))
        if isinstance(node, ast.Call):
            return self._of_call(node)
        return None

    def _of_call(self, node: ast.Call) -> Operation | None:
        called, args = node.func, list(node.args)
        if isinstance(called, ast.Attribute):
            name, module = called.attr, self.module_of(called.value)
            is_other = isinstance(called.value, ast.Name) and called.value.id in self.others
            if module == "math" or is_other:
                return None
            if not module:
                args.insert(0, called.value)
                if name == "where" and len(args) == 3:  # x.where(condition, other)
                    args[:2] = args[1::-1]
        elif isinstance(called, ast.Name) and self.of_rule:
            name = called.id
        elif isinstance(called, ast.Name) and called.id in self.functions:
            full = self.functions[called.id]
            if full.startswith("math."):
                return None
            name = full.rpartition(".")[2]
        else:
            return None
        keywords = {each.arg: each.value for each in node.keywords if each.arg is not None}
        if len(keywords) != len(node.keywords) or any(isinstance(x, ast.Starred) for x in args):
            return None
        return _in_order(name, args, keywords)


def _at_top(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a file that run when it is imported, without those of classes."""
    todo: list[ast.AST] = [*tree.body]
    while todo:
        node = todo.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(node, ast.stmt):
            yield node
            todo += [x for x in ast.iter_child_nodes(node) if isinstance(x, _BLOCKS)]


_BLOCKS = (ast.stmt, ast.ExceptHandler)


def _in_order(name: str, args: list[ast.expr], keywords: dict[str, ast.expr]) -> Operation | None:
    if "input" in keywords:
        args.insert(0, keywords.pop("input"))
    if not args:
        return None
    operands: list[ast.expr | None] = [*args]
    named = PARAMETERS.get(name, ())
    if len(operands) > 1 + len(named) and named:
        return None
    if named:
        for each in named[len(operands) - 1 :]:
            operands.append(keywords.pop(each, None))
    if name == "clamp_max":
        operands = [operands[0], None, operands[1]]
    elif name == "clamp_min":
        operands = [*operands, None]
    elif name == "reciprocal":
        operands = [ast.Constant(1), *operands]
    return Operation(plain_name(name), tuple(operands), keywords)


def number_in(node: ast.expr | None, imports: Imports) -> float | None:
    """The number that an expression is: ``1e-6``, ``-2``, ``float("-inf")``, ``-math.inf``."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(ast.literal_eval(node))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = number_in(node.operand, imports)
        return None if inner is None else -inner
    if isinstance(node, ast.BinOp) and type(node.op) in NUMBERS:
        left, right = number_in(node.left, imports), number_in(node.right, imports)
        is_known = left is not None and right is not None and right != 0
        return NUMBERS[type(node.op)](left, right) if is_known else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == FLOAT:
        text = ast.unparse(node.args[0]).strip("'") if node.args else ""
        return float(text) if text in ("inf", "-inf") else None
    if isinstance(node, ast.Attribute) and node.attr == "inf":
        known = imports.module_of(node.value) in ("math", "torch")
        is_numpy = isinstance(node.value, ast.Name) and node.value.id in ("np", "numpy")
        return math.inf if known or is_numpy else None
    return None


OF_RULES = Imports({}, {}, of_rule=True)
