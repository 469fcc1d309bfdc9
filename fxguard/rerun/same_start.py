"""Lets a second run start like the first one, and compares the two."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fxguard.batch.events import GraphRun
from fxguard.errors import FxguardError
from fxguard.graph.overwritten_inputs import written_inputs
from fxguard.graph.random_state import random_state_kept
from fxguard.graph.torch_settings import settings_now
from fxguard.measure.at_hand import has_memory, own_arithmetic
from fxguard.measure.func_levels import levels_restored
from fxguard.records import Role

__all__ = ["as_before", "copies_of", "same_magnitude"]

# How far apart the largest magnitudes of the two runs may be: compilers keep more digits between
# fused operations. Different random numbers differ by more.
TOLERANCE = 0.02


@contextlib.contextmanager
def as_before(run: GraphRun) -> Iterator[None]:
    """Restore the run's initial random state for the block, without visible side effects."""
    assert run.args is not None
    with (
        random_state_kept(run.args),
        own_arithmetic(),
        levels_restored(),
    ):
        if run.random_state is not None:
            run.random_state.restore()
        restore = settings_now()
        try:
            yield
        finally:
            restore()


def copies_of(run: GraphRun) -> list[Any]:
    """The graph's inputs, with copies of everything that it may write."""
    assert run.args is not None
    if not all(has_memory(a) for a in run.args if isinstance(a, Tensor)):
        raise FxguardError("an input of the graph has been freed")
    writable, may_write_more = written_inputs(run.graph_module)
    if may_write_more:  # except weights, for which unseen writes are unknown
        others = (v.argument for v in run.plan.values if v.role in (Role.INPUT, Role.BUFFER))
        writable |= {argument for argument in others if argument is not None}
    return [
        a.detach().clone() if i in writable and isinstance(a, Tensor) else a
        for i, a in enumerate(run.args)
    ]


def same_magnitude(one: float, other: float) -> bool:
    """Whether the largest magnitudes of two runs come from the same computation."""
    if math.isfinite(one) and math.isfinite(other):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-30)
    return str(one) == str(other)
