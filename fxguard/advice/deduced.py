"""What an operation read at a bad element, where only magnitudes are known. Knows nothing of torch.

Finite numbers divide to NaN only as 0 / 0, and their product is infinite only if it is too large.
Where arithmetic leaves one possibility, that is what happened, whoever may look at the elements:
not under ``torch.func``, nor of tensors that are gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxguard.graph.evidence import Evidence, Operand
from fxguard.graph.poles import PRODUCTS, plain

__all__ = ["deduced"]

# Those of one operand that are infinite at one number alone, and the number.
POLES = {
    **dict.fromkeys(("log", "log2", "log10", "rsqrt", "reciprocal"), 0.0),
    "log1p": -1.0,
}
# Finite numbers make infinities here only where the dtype ends.
GROWING = PRODUCTS | {"add", "copy", "cumsum", "mul", "setitem", "square", "sub", "sum"}
MANY = 2  # elements: which of them is not known
QUOTIENTS = frozenset({"div", "divide", "true_divide", "truediv"})


def deduced(
    kind: str, dtype: str, *, is_nan: bool, read: Sequence[tuple[float, float]]
) -> Evidence | None:
    """The operation at a bad element; None where the magnitudes leave more than one possibility.

    Args:
        kind: its kind.
        dtype: of its result.
        is_nan: whether it made NaN; else it made infinities and no NaN.
        read: the smallest and the largest magnitude of each tensor that it read.

    Example:
        >>> found = deduced("div", "float32", is_nan=True, read=[(0.0, 3.0), (0.0, 2.0)])
        >>> [operand.low for operand in found.operands]
        [0.0, 0.0]
    """
    if not read or not all(math.isfinite(high) for _, high in read):
        return None
    name = plain(kind)
    numbers: tuple[float, ...] | None = None
    made = math.nan if is_nan else math.inf
    has_zero = [low == 0 for low, _ in read]
    if name in QUOTIENTS and len(read) == 2 and has_zero[1]:
        if is_nan and has_zero[0]:
            numbers = 0.0, 0.0
        elif not is_nan:
            numbers = read[0][1], 0.0
    elif name in POLES and len(read) == 1 and not is_nan:
        pole = POLES[name]
        if read[0][0] <= abs(pole) <= read[0][1]:
            numbers = (pole,)
            made = -math.inf if name.startswith("log") else math.inf
    if not is_nan and name in GROWING:
        operands = tuple(Operand(-high, high, count=MANY, dtype=dtype) for _, high in read)
        return Evidence(kind, dtype, (), made, operands)
    if numbers is None:
        return None
    operands = tuple(Operand(number, number, dtype=dtype) for number in numbers)
    return Evidence(kind, dtype, (), made, operands)
