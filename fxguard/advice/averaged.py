"""What to do about a variance that is the difference of two averages, of numbers and of squares.

Knows nothing of torch.
"""

from __future__ import annotations

import ast

from fxguard.records import Source
from fxguard.source.named import operand_text, without_parentheses
from fxguard.source.syntax import expression_of

__all__ = ["repair_of_variance"]

TWO_DECAYS = (
    "average x and x² with one decay, and take (sq - mean ** 2).clamp(min=0) + eps: with two "
    "decays the difference is negative"
)
ROUNDED = "by roundings this difference of averages is negative, as where all numbers are alike"


def repair_of_variance(source: Source | None, *, is_of_roundings: bool) -> str:
    """The repair of a negative variance whose root is taken.

    Args:
        source: the line of the root.
        is_of_roundings: whether the variance is no more than what roundings leave of its terms:
            then one decay may well have made both.
    """
    if not is_of_roundings:
        return TWO_DECAYS
    code = "" if source is None else source.code
    found = operand_text(code, "sqrt") or "(sq - mean ** 2)"
    if parts := _with_eps(found):
        return f"take {parts[0]}.clamp(min=0) + {parts[1]} before the root: {ROUNDED}"
    is_safe = "eps" in code and "rsqrt" not in code
    bound = ".clamp(min=0)" if is_safe else ".clamp(min=0) + eps"
    return f"take {found}{bound} before the root: {ROUNDED}"


def _with_eps(operand: str) -> tuple[str, str] | None:
    """The difference and the eps of ``(sq - mean**2 + eps)``, whose root divides; None elsewhere.

    Who bounds the sum has a root of 0 in the divisor.
    """
    node = expression_of(operand)
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return None
    left = ast.unparse(node.left)
    is_name = isinstance(node.left, (ast.Name, ast.Attribute, ast.Subscript))
    eps = without_parentheses(operand).rpartition("+")[2].strip()  # as it is written: 1e-6
    return (left if is_name else f"({left})"), eps
