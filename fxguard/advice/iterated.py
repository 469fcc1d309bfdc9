"""What to do about a number that a loop computes from itself, and that grows without bound.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice.case import Case
from fxguard.findings import Fix
from fxguard.records import Source
from fxguard.source.iterated import Iterated, iterated_at

__all__ = ["fix_of_turns", "words_of_step"]


def fix_of_turns(source: Source | None, grew: str = "") -> Fix | None:
    """What keeps the loop at a line from growing; None if nothing is computed from itself there.

    Args:
        source: a line that overflowed, or led to that.
        grew: how far it grew, where that is known: ``from 1.2 to 3.4e+30 in 40 turns``.
    """
    found = None if source is None else iterated_at(source)
    if found is None:
        return None
    has_grown = f"grew {grew}" if grew else "has become too large"
    why = f"at each turn it is computed from itself, and {has_grown}"
    return Fix("advice", f"{_repair(found)}: {why}")


def words_of_step(case: Case) -> Mapping[str, str]:
    """What keeps the divisor of a step of Newton's method away from 0; {} of other divisions."""
    source = case.around.step.source
    found = None if source is None else iterated_at(source)
    if found is None or not found.quotient:
        return {}
    return {"bounded": _bounded(found), "name": found.name, "quotient": found.quotient}


def _bounded(found: Iterated) -> str:
    name, place = f"`{found.name}`", found.source.place
    return (
        f"keep {name} in a range at each step of Newton's method ({place}), by clamp(low, high) or "
        "bisection, and the divisor above an eps"
    )


def _repair(found: Iterated) -> str:
    name, place = f"`{found.name}`", found.source.place
    if found.quotient:
        return _bounded(found)
    if found.step:
        return (
            f"take smaller steps than `{found.step}` ({place}), and more of them, or an implicit "
            f"scheme for {name}"
        )
    if found.factor and not found.is_matrix:
        return f"keep `{found.factor}`, which multiplies {name} ({place}), between -1 and 1"
    if found.factor:
        return (
            f"keep the norm of `{found.factor}`, which multiplies {name} ({place}), below 1, as "
            f"spectral_norm does, or divide {name} by its norm there"
        )
    begins = "" if found.begins is None else f" ({found.begins.place})"
    smaller = f"begin the loop with a smaller {name}, such as by its norm{begins}"
    if found.is_called:
        return f"bound {name} at {place}, such as by clamp or tanh, or {smaller}"
    return f"{smaller}, or bound it at {place}"
