"""Errors, shares, factors and lists of names as people say them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

__all__ = ["digits_of", "names_text", "percent", "ranks_in_words", "times"]

MOST = 4  # ranks that are named


def digits_of(error: float) -> float:
    """Correct decimal digits.

    Example:
        >>> round(digits_of(2 ** -8), 1)  # of bfloat16
        2.4
    """
    if math.isnan(error):
        return math.nan
    return max(0.0, -math.log10(error)) if error else math.inf


def times(factor: float) -> str:
    """A factor as people say it.

    Example:
        >>> times(131.7), times(1.26)
        ('130', '1.3')
    """
    return f"{float(f'{factor:.2g}'):.10g}" if factor < 1e6 else f"{factor:.1g}"


def percent(share: float) -> str:
    """A share as people say it.

    Example:
        >>> percent(0.54), percent(0.0041), percent(3e-7)
        ('54 %', '0.41 %', '3e-07')
    """
    if not math.isfinite(share):
        return "not finite"
    if share >= 0.0995:
        return f"{100 * share:.0f} %"
    return f"{100 * share:.2g} %" if share >= 1e-4 or not share else f"{share:.1g}"


def names_text(names: Sequence[str], most: int = 5) -> str:
    """Some of the names, each once: ``a, b (2 times) and 3 more``."""
    counted = [f"{name} ({n} times)" if n > 1 else name for name, n in Counter(names).items()]
    more = len(counted) - most
    return ", ".join(counted[:most]) + (f" and {more} more" if more > 0 else "")


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks as people name them; at least one.

    Example:
        >>> ranks_in_words([3]), ranks_in_words([0, 2, 3]), ranks_in_words(range(64))
        ('rank 3', 'ranks 0, 2 and 3', 'ranks 0, 1, 2 and 61 more')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    few = len(ranks) <= MOST
    *first, last = map(str, ranks if few else ranks[: MOST - 1])
    if few:
        return f"ranks {', '.join(first)} and {last}"
    return f"ranks {', '.join([*first, last])} and {len(ranks) - MOST + 1} more"
