"""Powers that became 0, ``0.5 ** (age / h)``; and numbers so large that all of them become 0.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.vanished import vanished_in
from fxguard.advice.written_operands import titled
from fxguard.formats import FORMATS
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.records import Role

__all__ = ["far_beyond", "vanished_power", "words_of_far", "words_of_power"]

FAR = 100.0  # times the largest exponent of which something is left
HIGH = 16.0  # the exponent of a weight
MOST_STEPS = 16  # from an exponent to what made it large

_POWERS = names_in("float_power pow")
_HANDED_ON = frozenset(map(plain, MOVES | SELECTS | CASTS)) | names_in(
    "abs add div max min mul neg rsub sub"
)


def vanished_power(case: Case) -> Step | None:
    """The power of numbers of an ordinary size because of which the operand is 0; None if none."""
    culprit = case.around.culprit
    return None if culprit is None else vanished_in(case.around, culprit, _power_made_zeros)


def far_beyond(case: Case) -> Step | None:
    """The power that made 0 of everything, by far too large numbers; None if none did.

    Logarithms of densities are as large, and their exponentials are another case.
    """
    around, culprit = case.around, case.around.culprit
    whole = None if culprit is None else around.range_of(culprit)
    if culprit is None or whole is None or whole.abs_max:
        return None
    step = vanished_power(case)
    form = None if step is None else FORMATS.get(around.values[step.outputs[0]].dtype)
    if step is None or form is None:
        return None
    return step if _exponent(around, step) > -FAR * math.log(form.smallest) else None


def _power_made_zeros(around: Surroundings, step: Step) -> bool | None:
    if plain(step.kind) not in _POWERS or (step.literals and not _is_decay(step)):
        return None
    made, form = around.range_of(step.outputs[0]), FORMATS.get(around.values[step.outputs[0]].dtype)
    if made is None or form is None:
        return None
    is_zero = made.abs_min == 0 and made.abs_max < math.inf
    is_small = _exponent(around, step) > -math.log(form.smallest_normal)
    return is_zero and (is_small or bool(_of_weight(around, step)))


def _of_weight(around: Surroundings, step: Step) -> str:
    """``decay ** 7e+03``: a power of a weight, whose size is not known, where it is a high one."""
    if len(step.inputs) != 2 or around.values[step.inputs[0]].role is not Role.WEIGHT:
        return ""
    found = around.range_of(step.inputs[1])
    is_high = found is not None and HIGH < found.abs_max < math.inf
    name = around.values[step.inputs[0]].name.strip("`")
    return f"{name} ** {found.abs_max:.4g}" if found is not None and is_high else ""


def _is_decay(step: Step) -> bool:
    """It is a number to some power, or something to a negative one."""
    return step.number_first or step.literals[0] < 0


def _exponent(around: Surroundings, step: Step) -> float:
    """How small the smallest result is, as minus its natural logarithm; 0 if that is not known."""
    base, exponent = _base_and_exponent(around, step)
    if not (0 < base < math.inf and abs(exponent) < math.inf):
        return 0.0
    return abs(exponent * math.log(base))


def _base_and_exponent(around: Surroundings, step: Step) -> tuple[float, float]:
    ranges = [around.range_of(value) for value in step.inputs]
    if not ranges or any(each is None for each in ranges):
        return 0.0, 0.0
    least = [0.0 if each is None else each.abs_min for each in ranges]
    most = [0.0 if each is None else each.abs_max for each in ranges]
    if len(ranges) == 2:
        return (least[0], most[1]) if most[0] < 1 else (most[0], -most[1])
    number = step.literals[0] if step.literals else 0.0
    if step.number_first:
        return number, -most[0] if number > 1 else most[0]
    return most[0], number


def words_of_power(case: Case) -> Mapping[str, str]:
    """The power, and what it made 0 of."""
    step = vanished_power(case)
    if step is None:
        return dict.fromkeys(("power", "number", "dtype", "smallest"), "it")
    base, exponent = _base_and_exponent(case.around, step)
    dtype = case.around.values[step.outputs[0]].dtype
    return {
        "power": titled(step),
        "number": f"{base:.4g} ** {exponent:.4g}" if base else _of_weight(case.around, step),
        "dtype": dtype,
        "smallest": f"{FORMATS[dtype].smallest:.0e}",
    }


def words_of_far(case: Case) -> Mapping[str, str]:
    """The numbers that are too large, and where they were made."""
    step = far_beyond(case)
    if step is None:
        return dict.fromkeys(("power", "largest", "origin"), "it")
    around = case.around
    read = step.inputs[-1]
    found = around.range_of(read)
    largest = 0.0 if found is None else found.abs_max
    value = _origin(around, read)
    maker, at = around.maker_of(value), around.range_of(value)
    origin = titled(maker) if maker is not None else around.values[value].name.strip("`")
    is_other = value != read and origin and at is not None and at.abs_max != largest
    made = "" if at is None else f", made of numbers up to {at.abs_max:.3g} in {origin}"
    return {
        "power": titled(step),
        "largest": f"{largest:.3g}",
        "origin": made if is_other else "",
    }


def _origin(around: Surroundings, value: int) -> int:
    """What made a number large, behind differences and scales: the largest operand, each time."""
    for _ in range(MOST_STEPS):
        step = around.maker_of(value)
        if step is None or not step.inputs:
            return value
        if step.counts and plain(step.kind) not in _HANDED_ON:
            return value
        sizes = {each: around.range_of(each) for each in step.inputs}
        known = {each: found.abs_max for each, found in sizes.items() if found is not None}
        largest, at = (
            max(known, key=lambda each: known[each], default=value),
            around.range_of(value),
        )
        if len(known) < len(sizes) or at is None or known[largest] < at.abs_max / 2:
            return value
        value = largest
    return value
