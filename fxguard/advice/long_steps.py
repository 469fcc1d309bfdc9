"""Steps that are too long: of an explicit scheme, or the whole way to where something becomes 0.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice.case import Case
from fxguard.advice.positive import cut_at_zero, made_at
from fxguard.advice.signs import is_difference_with_square
from fxguard.advice.written_operands import operand_in, titled
from fxguard.source.advanced import Advanced, advanced_behind, updated_at
from fxguard.source.named import variable_in

__all__ = ["words_of_boundary", "words_of_cut", "words_of_long_step"]

ROUNDINGS = 1e-9  # below 0, at a boundary
FAR = 1e-3  # below 0, farther than roundings lead


def words_of_boundary(case: Case) -> Mapping[str, str]:
    """The step that takes a variable to 0, all of the way; {} of other zeros."""
    if not any(-ROUNDINGS < each.low <= 0 for each in case.operands):
        return {}
    found = [each for each in _behind(case) if each.is_to_boundary]
    made = made_at(case.around, case.around.culprit)
    here = None if made is None or made.source is None else made.source.position
    name = variable_in(operand_in(case.around))
    exact = [each for each in found if each.source.position == here]
    exact = exact or [each for each in found if each.name == name] or found
    if len({each.source.position for each in exact}) != 1:
        return {}
    step = exact[0]
    ratio = "it" if step.made is None else f"the least ratio ({step.made.place})"
    return {
        "step": f"`{step.step}`",
        "name": f"`{step.name}`",
        "place": step.source.place,
        "ratio": ratio,
    }


def words_of_long_step(case: Case) -> Mapping[str, str]:
    """The step of an explicit scheme that made something negative; {} of others."""
    is_other = is_difference_with_square(case) or case.is_differentiated()
    if is_other or case.negative_operand is None or case.negative_operand > -FAR:
        return {}
    found = [each for each in _behind(case) if not each.is_to_boundary and each.change]
    for each in found:
        if repair := _proportional(each) or _by_speed(each) or _of_neighbours(each):
            return {"repair": repair}
    return {}


def _behind(case: Case) -> list[Advanced]:
    source = case.around.step.source
    name = variable_in(operand_in(case.around))
    return [] if source is None else advanced_behind(source, name)


def _smaller(step: Advanced) -> str:
    at = step.source if step.made is None else step.made
    return f"take smaller steps `{step.step}` ({at.place})"


def _proportional(step: Advanced) -> str:
    if not step.is_proportional:
        return ""
    if step.decay:
        return (
            f"take smaller steps: keep `{step.decay}` below 1 ({step.source.place}), above which a "
            f"step takes `{step.name}` below 0; or multiply by exp(-{step.decay})"
        )
    return (
        f"{_smaller(step)}: `{step.name}` changes in proportion to itself ({step.source.place}), "
        "and only a step that is too long takes it below 0"
    )


def _by_speed(step: Advanced) -> str:
    if not step.divisor or step.divisor_at is None or not step.is_of_neighbours:
        return ""
    if step.is_speed_whole:
        return (
            f"{_smaller(step)}, such as half of them: `{step.name}` is advanced explicitly "
            f"({step.source.place}), which is stable up to a limit"
        )
    return (
        f"{_smaller(step)}: `{step.name}` is advanced explicitly ({step.source.place}), so "
        f"`{step.divisor}` ({step.divisor_at.place}) has to be the fastest wave's, |u| + c in a gas"
    )


def _of_neighbours(step: Advanced) -> str:
    if not step.is_of_neighbours:
        return ""
    return (
        f"{_smaller(step)} if `{step.name}` has to stay positive: the explicit step "
        f"({step.source.place}) is stable up to dx / speed, or dx**2 / (2 * D)"
    )


def words_of_cut(case: Case) -> Mapping[str, str]:
    """The variable of an iteration that a bound made 0; {} where a gradient flows, or of others."""
    step = cut_at_zero(case.around)
    if step is None or step.source is None or case.is_differentiated():
        return {}
    name = updated_at(step.source)
    return {"name": f"`{name}`", "cut": titled(step)} if name else {}
