"""What to do about a number that a loop computes from itself, and that grows without bound.

Knows nothing of torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fxguard.advice._patterns import made_by
from fxguard.advice.case import Case
from fxguard.findings import Fix
from fxguard.graph.poles import plain
from fxguard.records import Source
from fxguard.source.assigned import assignment_of
from fxguard.source.gains import added_gain
from fxguard.source.iterated import Iterated, iterated_at
from fxguard.source.row_norms import dimension_of_norm
from fxguard.source.step_sizes import made_at, stencil_in

__all__ = ["fix_of_turns", "words_of_divisor", "words_of_step"]


def fix_of_turns(source: Source | None, grew: str = "") -> Fix | None:
    """What keeps the loop at a line from growing; None if nothing is computed from itself there.

    Args:
        source: a line that overflowed, or led to that.
        grew: how far, where that is known: ``grew from 1.2 to 3.4e+30 in 40 turns``.
    """
    found = None if source is None else iterated_at(source)
    if found is None:
        return None
    has_grown = grew or "has become too large"
    repair = _sign_of_gain(found) or _whole_norm(found) or _repair(found)
    return Fix("advice", f"{repair}: in its loop it {has_grown}")


def _sign_of_gain(found: Iterated) -> str:
    """What to subtract in place of adding it, in Riccati's or Kalman's equation; "" elsewhere."""
    added = added_gain(found)
    if added is None:
        return ""
    term, gain, source = added
    subtract = f"subtract `{term}` ({source.place}), with the gain `{gain}`,"
    return f"{subtract} in place of adding it to `{found.name}`"


def _whole_norm(found: Iterated) -> str:
    """The norm that an iteration of a matrix with itself begins with; "" if it needs no other.

    The singular values of a matrix whose rows have the norm 1 may be as large as the root of the
    number of its rows.
    """
    is_other = bool(found.quotient or found.step) or not found.is_of_squares
    dimension = "" if is_other or found.begins is None else dimension_of_norm(found.begins)
    if not dimension or found.begins is None:
        return ""
    return (
        f"divide `{found.name}` by the norm of the whole matrix ({found.begins.place}), not one "
        f"over {dimension}, which leaves that above 1"
    )


def words_of_step(case: Case) -> Mapping[str, str]:
    """What keeps the divisor of a step of Newton's method away from 0; {} of other divisions."""
    found = _newton(case)
    if found is None or words_of_divisor(case):
        return {}
    return {"bounded": _bounded(found), "name": found.name, "quotient": found.quotient}


def words_of_divisor(case: Case) -> Mapping[str, str]:
    """The divisor of such a step that a bound on the variable does not keep away from 0.

    {} where the variable itself may have left the range in which there is a quotient.
    """
    found = _newton(case)
    if found is None:
        return {}
    numbers = [each.low for each in case.operands if each.low == each.high]
    inputs = case.around.step.inputs
    dividend = made_by(case.around, inputs[0]) if len(inputs) == 2 else None
    is_difference = dividend is not None and plain(dividend.kind) in ("sub", "rsub")
    is_root = numbers == [0, 0] and is_difference
    if not (is_root or found.is_bounded):
        return {}
    is_simple = re.fullmatch(r"[\w.]+(\(.*\))?", found.divisor) is not None
    divisor = found.divisor if is_simple else f"({found.divisor})"
    why = f": so is `{case.dividend}`, a root" if is_root else ""
    return {"divisor": divisor, "name": found.name, "place": found.source.place, "why": why}


def _newton(case: Case) -> Iterated | None:
    """The variable that a step of Newton's method corrects at the division; None if none does."""
    source = case.around.step.source
    found = None if source is None else iterated_at(source)
    return found if found is not None and found.quotient else None


def _bounded(found: Iterated) -> str:
    name, place = f"`{found.name}`", found.source.place
    return (
        f"keep {name} in a range at each step of Newton's method ({place}): bisect where a step "
        "leaves it, as a clamp may stay at its end, and keep the divisor above an eps"
    )


def _repair(found: Iterated) -> str:
    name, place = f"`{found.name}`", found.source.place
    if found.quotient:
        return _bounded(found)
    if found.step:
        return _smaller_step(found)
    if len(found.recursion) == 2 and found.recursion[1] != "0" and not found.is_matrix:
        return _stable(found)
    if found.factor and not found.is_matrix:
        factor = found.recursion[0].lstrip("-") if found.recursion else found.factor
        return f"keep `{factor}`, which multiplies {name} ({place}), between -1 and 1"
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


def _stable(found: Iterated) -> str:
    """How large the coefficients of a recursion of order 2 may be: Jury's conditions."""
    first, second = found.recursion
    place = found.value_source.place
    name = second.lstrip("-")
    made = assignment_of(name, found.value_source) if name.isidentifier() else None
    of = f", of {made.place}: {made.code}" if made is not None else ""
    return (
        f"keep the poles of this recursion ({place}) inside the unit circle, by q = tanh(u) and "
        f"p = (1 - q) * tanh(v) of free u and v, with p = {first}, q = {second}{of}"
    )


def _smaller_step(found: Iterated) -> str:
    """Where the step of an explicit scheme is made, and how large it may be."""
    made, function = made_at(found.step, found.source)
    at = (found.source if made is None else made).place
    by = f", by {function}" if function else ""
    smaller = f"take smaller steps than `{found.step}` ({at}{by})"
    neighbours = stencil_in(found.values, found.name, found.source.file)
    if neighbours:
        return f"{smaller}, at most dx**2 / ({neighbours} * D) for diffusion of `{found.name}`"
    return f"{smaller}, and more of them, or an implicit scheme for `{found.name}`"
