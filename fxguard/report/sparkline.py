"""Numbers as a line of block characters. Knows nothing of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["MARK", "sparkline"]

BLOCKS = "▁▂▃▄▅▆▇█"
MARK = "│"
MISSING = " "
INFINITE = "!"


def sparkline(
    heights: Sequence[float], width: int, *, mark: int | None = None, span: float = 0.0
) -> str:
    """The largest of each stretch of numbers as a block; ``!`` is infinite, a blank is unknown.

    Args:
        heights: numbers from left to right; NaN is unknown.
        width: how many blocks there are at most.
        mark: a bar stands before the block with the number of this index.
        span: the range of a whole block at least, so that noise stays small.

    Example:
        >>> sparkline([1, 1, 1, 8, 4], 5, mark=3)
        '▁▁▁│█▄'
    """
    count = len(heights)
    each = max(1, -(-count // width))
    # A stretch begins at the mark, so that what is before it does not hide what is behind.
    first = 0 if mark is None else mark % each
    begins = [*([0] if first else []), *range(first, count, each)]
    parts = [heights[i:j] for i, j in zip(begins, [*begins, count][1:], strict=True)]
    tops = [max((x for x in part if not math.isnan(x)), default=math.nan) for part in parts]
    known = [top for top in tops if math.isfinite(top)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = max(high / 2 - low / 2, span / 2) or 1.0  # halves: the range of floats has no number
    text = []
    for begin, top in zip(begins, tops, strict=True):
        if begin == mark:
            text.append(MARK)
        if math.isnan(top):
            text.append(MISSING)
        elif math.isinf(top):
            text.append(INFINITE)
        else:
            text.append(
                BLOCKS[min(int((top / 2 - low / 2) / scale * len(BLOCKS)), len(BLOCKS) - 1)]
            )
    return "".join(text)
