"""What to do about a variance that is the difference of two averages, of numbers and of squares.

Knows nothing of torch.
"""

from __future__ import annotations

from fxguard.records import Source
from fxguard.source.named import operand_text

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
    is_safe = "eps" in code and "rsqrt" not in code
    bound = ".clamp(min=0)" if is_safe else ".clamp(min=0) + eps"
    return f"take {found}{bound} before the root: {ROUNDED}"
