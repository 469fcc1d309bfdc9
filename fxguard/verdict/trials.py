"""A trial in float32 to a fix that was tried, in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fxguard.batch.batch import Batch
from fxguard.batch.keys import Key
from fxguard.plan.plan import Step
from fxguard.records import Fix
from fxguard.rerun.trial import Trial, in_float32

__all__ = ["tried", "with_tried"]

MOST_NAMES = 3  # of what is kept in float32
MOST_FIXES = 3


def tried(batch: Batch, key: Key) -> Fix | None:
    """The fix that keeps in float32 what failed, where a run of the batch shows that it helps.

    Args:
        batch: still open.
        key: of the value that overflowed, or was rounded away.
    """
    try:
        trial = in_float32(batch, key)
    except Exception:  # whatever stops the run: nothing was tried
        return None
    return None if trial is None else fix_of(trial)


def fix_of(trial: Trial) -> Fix:
    """Which operations, and what came of it."""
    names = list(dict.fromkeys(map(_name_of, trial.steps)))
    if len(names) > MOST_NAMES:
        names = list(dict.fromkeys(_without_numbers(names)))
    more = len(names) - MOST_NAMES
    listed = ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    return Fix("tried", f"keep {listed} in float32: finite, error {trial.error:.1g}")


def with_tried(fixes: Sequence[Fix], trial: Fix | None) -> tuple[Fix, ...]:
    """The fixes with one that was tried, before all advice, and instead of the same advice."""
    if trial is None:
        return tuple(fixes)
    exact = [fix for fix in fixes if fix.kind == "exact"]
    advice = [fix for fix in fixes if fix.kind != "exact" and not fix.text.startswith("keep ")]
    return (*exact, trial, *advice)[:MOST_FIXES]


def _name_of(step: Step) -> str:
    """``mul` of `encoder.block.0``; the operation's line where it stands in no module."""
    if step.module:
        return f"`{step.module}`"
    return f"{step.kind} ({step.source.place})" if step.source else step.kind


def _without_numbers(names: Iterable[str]) -> list[str]:
    return [re.sub(r"\.\d+(?=[.`])", ".*", name) for name in names]
