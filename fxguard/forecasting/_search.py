"""Finds a small set that suffices, in few trials: QuickXplain (Junker 2004).

A set of k out of n takes about 2 k log2(n / k) + 2 k trials. No element of the set can be left out,
provided that adding elements never spoils a set that suffices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["smallest"]

T = TypeVar("T")


def smallest(
    candidates: Sequence[T], suffices: Callable[[list[T]], bool], most_trials: int
) -> list[T]:
    """A small subset that suffices.

    Args:
        candidates: a set that suffices, in an order in which neighbours belong together.
        suffices: tries a subset.
        most_trials: after that many trials everything that was not yet decided is taken.

    Example:
        >>> smallest(range(100), lambda some: {7, 8, 60} <= set(some), 100)
        [7, 8, 60]
    """
    trials = 0

    def tried(some: list[T]) -> bool:
        nonlocal trials
        trials += 1
        return suffices(some)

    def within(given: list[T], is_new: bool, some: list[T]) -> list[T]:
        if trials >= most_trials:
            return some
        if is_new and tried(given):
            return []
        if len(some) == 1:
            return some
        first, second = some[: len(some) // 2], some[len(some) // 2 :]
        of_second = within([*given, *first], True, second)
        of_first = within([*given, *of_second], bool(of_second), first)
        return [*of_first, *of_second]

    return within([], False, list(candidates)) if candidates else []
