"""Errors, shares, factors and lists of names as people say them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

__all__ = ["digits_of", "names_text", "percent", "ranks_in_words", "resumed_at", "times"]

MOST = 4  # numbers that are named


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
    return f"rank{'s' * (len(ranks) > 1)} {_few(ranks)}"


def resumed_at(steps: Sequence[int]) -> list[str]:
    """Where a training was resumed, as one phrase; none for nowhere.

    Example:
        >>> resumed_at([300, 800]), resumed_at([])
        (['resumed at steps 300 and 800'], [])
    """
    return [f"resumed at step{'s' * (len(steps) > 1)} {_few(steps)}"] if steps else []


def _few(numbers: Sequence[int]) -> str:
    """``0, 1, 2 and 61 more``."""
    shown = [*map(str, numbers)]
    if len(shown) > MOST:
        shown[MOST - 1 :] = [f"{len(shown) - MOST + 1} more"]
    *first, last = shown
    return f"{', '.join(first)} and {last}" if first else last
