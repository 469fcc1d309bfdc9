"""The search for a small set that suffices."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxguard.forecasting._search import smallest


@given(st.integers(1, 60), st.sets(st.integers(0, 59), max_size=6))
def test_exactly_what_is_needed_is_found(size: int, needed: set[int]) -> None:
    """In the order that it was given in."""
    needed = {each % size for each in needed} or {0}
    found = smallest(range(size), lambda some: needed <= set(some), 10_000)
    assert found == sorted(needed)


@given(st.integers(0, 12), st.sets(st.integers(0, 59), min_size=1, max_size=6))
def test_few_trials_find_something_that_suffices(most: int, needed: set[int]) -> None:
    """It may be too large."""
    trials = []

    def suffices(some: list[int]) -> bool:
        trials.append(some)
        return needed <= set(some)

    assert needed <= set(smallest(range(60), suffices, most))
    assert len(trials) <= most
