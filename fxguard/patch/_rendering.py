"""Writes a rule's expression with the operands and the names of the user's file.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass

from fxguard.patch._operations import OF_RULES, PARAMETERS, Imports, number_in

__all__ = ["CannotRender", "Renderer"]

FUNCTIONAL = ("cross_entropy", "ctc_loss", "logsigmoid", "softplus")  # no method, and not in torch
SPECIAL = ("i0e", "i1", "i1e", "log_ndtr", "ndtr")  # in torch.special alone
ATOM, POWER, UNARY, PRODUCT, SUM, BITS, LOOSE = 9, 5, 4, 3, 2, 1, 0
SIGNS: dict[type[ast.AST], tuple[str, int]] = {
    ast.Add: ("+", SUM),
    ast.BitAnd: ("&", BITS),
    ast.Div: ("/", PRODUCT),
    ast.MatMult: ("@", PRODUCT),
    ast.Mult: ("*", PRODUCT),
    ast.Pow: ("**", POWER),
    ast.Sub: ("-", SUM),
}
COMPARED = {ast.Eq: "==", ast.NotEq: "!=", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
ATOMS = (ast.Attribute, ast.Call, ast.Constant, ast.List, ast.Name, ast.Subscript, ast.Tuple)


class CannotRender(Exception):  # noqa: N818 - a reason, which reaches the user
    """Why the file cannot say it."""


def precedence_of(node: ast.expr) -> int:
    """How tightly an expression holds together."""
    if isinstance(node, ATOMS):
        return ATOM
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)][1]
    return UNARY if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not) else LOOSE


@dataclass(frozen=True)
class Renderer:
    """Writes expressions of rules for one file."""

    imports: Imports
    operand: Callable[[str], tuple[str, int] | None]  # text and precedence of a letter's operand

    def text(self, rule: ast.expr) -> str:
        """The expression; it may need parentheses where it stands."""
        return self._render(rule)[0]

    def _render(self, rule: ast.expr) -> tuple[str, int]:
        if isinstance(rule, ast.Name):
            found = self.operand(rule.id)
            if found is None:
                raise CannotRender(f"{rule.id} is left out")
            return found
        if isinstance(rule, ast.BinOp):
            return self._binary(rule)
        if isinstance(rule, ast.UnaryOp) and isinstance(rule.op, ast.USub):
            text, binds = self._render(rule.operand)
            return f"-{self._held(text, binds, UNARY)}", UNARY
        if isinstance(rule, ast.Compare):
            left = self._at_least(rule.left, SUM)
            right = self._at_least(rule.comparators[0], SUM)
            return f"{left} {COMPARED[type(rule.ops[0])]} {right}", LOOSE
        if isinstance(rule, ast.Call):
            return self._call(rule), ATOM
        if isinstance(rule, ast.Constant) and isinstance(rule.value, str):
            return f'"{rule.value}"', ATOM
        return ast.unparse(rule), ATOM

    def _binary(self, rule: ast.BinOp) -> tuple[str, int]:
        sign, binds = SIGNS[type(rule.op)]
        is_power = isinstance(rule.op, ast.Pow)
        is_other = isinstance(rule.left, ast.BinOp) and type(rule.left.op) is not type(rule.op)
        left = self._at_least(rule.left, binds + (is_power or (is_other and binds == PRODUCT)))
        right = self._at_least(rule.right, UNARY if is_power else binds + 1)
        return f"{left} {sign} {right}", binds

    def _at_least(self, rule: ast.expr, binds: int) -> str:
        return self._held(*self._render(rule), binds)

    @staticmethod
    def _held(text: str, binds: int, wanted: int) -> str:
        return text if binds >= wanted else f"({text})"

    def _call(self, rule: ast.Call) -> str:
        if isinstance(rule.func, ast.Attribute):
            base = self._at_least(rule.func.value, ATOM)
            return f"{base}.{rule.func.attr}({self._arguments(rule.func.attr, rule, 0)})"
        assert isinstance(rule.func, ast.Name)
        name = rule.func.id
        if name == "float":
            return ast.unparse(rule).replace("'", '"')
        if name == "log" and (number := number_in(rule.args[0], OF_RULES)) is not None:
            own = self.imports.spelled("math.log")
            return f"{own}({number:g})" if own else repr(math.log(number))
        home = "torch.nn.functional" if name in FUNCTIONAL else "torch"
        home = "torch.special" if name in SPECIAL else home
        own = self.imports.spelled(f"{home}.{name}")
        if own:
            return f"{own}({self._arguments(name, rule, 0)})"
        if name in FUNCTIONAL or name in SPECIAL or name == "where":
            raise CannotRender(f"the file imports no torch to call {name} of")
        base = self._at_least(rule.args[0], ATOM)
        return f"{base}.{name}({self._arguments(name, rule, 1)})"

    def _arguments(self, name: str, rule: ast.Call, begin: int) -> str:
        is_method = isinstance(rule.func, ast.Attribute)
        named = PARAMETERS.get(name, ())
        told = []
        for position, each in enumerate(rule.args[begin:], begin + is_method):
            if isinstance(each, ast.Name) and self.operand(each.id) is None:
                continue  # the program left it out, too
            text = self.text(each)
            is_keepdim = 0 < position <= len(named) and named[position - 1] == "keepdim"
            told.append(f"keepdim={text}" if is_keepdim else text)
        told += [f"{each.arg}={self.text(each.value)}" for each in rule.keywords]
        return ", ".join(told)
