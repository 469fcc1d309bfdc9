"""Zeros whose reason the program's text tells: other dimensions, updates, differences of nothing.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from fxguard.advice.case import Case
from fxguard.source.contracted import summed_across
from fxguard.source.multiplicative import multiplied_at
from fxguard.source.overwritten import difference_behind
from fxguard.source.own_limits import limit_in_backward

__all__ = ["words_of_dimension", "words_of_overwritten", "words_of_own_limit", "words_of_update"]

LONGEST = 40  # characters of an expression


def words_of_dimension(case: Case) -> Mapping[str, str]:
    """The sum over rows that a recursion keeps apart; {} if it divides by none."""
    source = case.around.step.source
    dims = 0 if case.evidence is None else case.evidence.dims
    found = None if source is None else summed_across(source, dims)
    if found is None:
        return {}
    return {
        "name": found.name,
        "own": f"dim={dims - 1 if found.dim >= 0 else -1}",
        "dim": f"dim={found.dim}",
        "place": found.source.place,
        "product": found.product,
        "product_place": found.product_at.place,
    }


def words_of_update(case: Case) -> Mapping[str, str]:
    """What a multiplicative update multiplies, and where others are; {} if it is none."""
    source = case.around.step.source
    numbers = [each.low for each in case.operands if each.low == each.high]
    found = multiplied_at(source) if source is not None and numbers == [0, 0] else None
    if found is None:
        return {}
    name, others = found
    places = " and ".join(dict.fromkeys(each.place for each in others))
    return {"name": name, "others": f", here and at {places}" if places else ""}


def words_of_overwritten(case: Case) -> Mapping[str, str]:
    """The difference that is 0, of which the operand is computed; {} if there is none."""
    source = case.around.step.source
    found = None if source is None else difference_behind(case.bare, source)
    if found is None:
        return {}
    base = case.bare.partition("[")[0]
    return {
        "name": found.name,
        "place": found.source.place,
        "made": "" if base == found.name else f", of which `{base}` is made,",
        "target": found.target,
        "value": found.value,
        "written": found.written_at.place,
    }


def words_of_own_limit(case: Case) -> Mapping[str, str]:
    """The limit of a quotient of two zeros in a backward of the script's own; {} of others."""
    source = case.around.step.source
    numbers = [each.low for each in case.operands if each.low == each.high]
    found = limit_in_backward(source) if source is not None and numbers == [0, 0] else None
    if found is None:
        return {}
    where = f"where {found.name} is {found.at:g}"
    if found.factor and found.made is not None and len(found.factor) <= LONGEST:
        made = f"made as `{found.product}` ({found.made.place})"
        dividend = found.text.partition(" /")[0]
        repair = f"take {found.factor} in place of `{found.text}`: `{dividend}` is {made}"
        return {"repair": f"{repair}, and both sides are 0 {where}"}
    quotient = f"`{found.text}`" if len(found.text) <= LONGEST else "this quotient"
    near = Fraction(found.limit).limit_denominator(12)
    is_part = near.denominator > 2 and math.isclose(near, found.limit, abs_tol=1e-3)
    limit = f"{near.numerator} / {near.denominator}" if is_part else f"{found.limit:g}"
    chosen = f"torch.where({found.name} == {found.at:g}, {limit}, ...)"
    return {"repair": f"take {limit}, the limit of {quotient}, {where}, by {chosen}: 0 / 0 is NaN"}
