"""Turns a trial in float32 into a tried fix, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fxguard.advice.beginnings import MASKS
from fxguard.advice.fixes import MOST_FIXES
from fxguard.batch.batch import Batch
from fxguard.batch.keys import Key
from fxguard.findings import Fix
from fxguard.forgiving import theirs
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step
from fxguard.rerun.trial import Trial, in_float32

__all__ = ["tried", "with_tried"]

MOST_NAMES = 2  # of operations kept in float32 besides the blamed one
MOST_ERROR = 0.1  # relative: with a larger error nothing is fixed


def tried(batch: Batch, key: Key, harmless: Iterable[Key]) -> Fix | None:
    """The fix that keeps failing operations in float32, if a run of the batch shows that it helps.

    Args:
        batch: the batch, still open.
        key: key of the value that overflowed or was rounded away.
        harmless: keys of bad values that do no harm.
    """
    try:
        trial = in_float32(batch, key, harmless)
    except theirs():  # whatever stops the run, nothing was tried
        return None
    return None if trial is None or trial.error > MOST_ERROR else fix_of(trial)


def fix_of(trial: Trial) -> Fix:
    """The fix: which operations to keep, and the result of the trial.

    Example:
        >>> print(fix_of(trial))
        keep `decoder.wo` and 3 operations after it in float32: finite, error 0.001 (tried)
    """
    first, *others = trial.steps
    names = [name for name in dict.fromkeys(map(_name_of, others)) if name != _name_of(first)]
    kept = _name_of(first)
    if len(names) <= MOST_NAMES:
        kept = ", ".join([kept, *names])
    else:
        kept += f" and {len(others)} operations after it"
    text = f"keep {kept} in float32: finite, error {trial.error:.1g}"
    return Fix("tried", text, (f"{', '.join(plain(x.kind) for x in trial.steps)} -> float32",))


def with_tried(fixes: Sequence[Fix], trial: Fix | None) -> tuple[Fix, ...]:
    """The fixes with a tried one, which replaces the same advice.

    It comes after exact fixes, and after another way to make a mask; before all other advice.
    """
    if trial is None:
        return tuple(fixes)
    before = [fix for fix in fixes if fix.kind == "exact" or fix.text.startswith(MASKS)]
    others = [fix for fix in fixes if fix not in before and not fix.text.startswith("keep ")]
    return (*before, trial, *others)[:MOST_FIXES]


def _name_of(step: Step) -> str:
    """The module of an operation; without one, the operation and its line."""
    if step.module:
        return f"`{step.module}`"
    return f"{step.kind} ({step.source.place})" if step.source else step.kind
