"""Rules for zeros whose reason the program's text tells: they come before all others.

Knows nothing of torch.
"""

from __future__ import annotations

from fxguard.advice._rule import Rule, names_in
from fxguard.advice.long_steps import words_of_boundary, words_of_cut, words_of_long_step
from fxguard.advice.lost_bounds import words_of_bound
from fxguard.advice.rounded_to_one import words_of_equal, words_of_rounded
from fxguard.advice.told_by_text import (
    words_of_dimension,
    words_of_overwritten,
    words_of_own_limit,
    words_of_update,
)
from fxguard.advice.whole_function import words_of_function

__all__ = ["TEXT_RULES"]

_LOST = "zero divisor, underflow, rounding, domain, singular gradient"
_OF_REST = names_in(
    "addcdiv div floor_divide fmod log log10 log1p log2 logit pow reciprocal remainder rsqrt sqrt"
)

TEXT_RULES = (
    Rule(_LOST, None, "advice",
         "take {instead} for {constant} ({place}){both}: in {half} that {held}, so it bounds "
         "nothing, and {what}",
         lambda c: bool(words_of_bound(c)), words=words_of_bound, alone=True),
    Rule(_LOST, _OF_REST, "advice",
         "keep {number} in float32{as_number}: {half} holds nothing between {below} "
         "and 1, so it is 1, and {made} makes {zero} of it",
         lambda c: bool(words_of_rounded(c)), alone=True, words=words_of_rounded),
    Rule(_LOST, names_in("div log log10 log2 reciprocal rsqrt"), "advice",
         "take the difference in {made} in float32, before {rounding} rounds: {half} holds "
         "numbers up to {largest} in steps of {steps}, and neighbours become equal",
         lambda c: bool(words_of_equal(c)), alone=True, words=words_of_equal),
    Rule("zero divisor, domain, underflow", names_in("div"), "advice", "{repair}",
         lambda c: bool(words_of_own_limit(c)), words=words_of_own_limit, alone=True),
    Rule("zero divisor", names_in("div log log10 log2 reciprocal rsqrt sqrt"), "advice",
         "compute `{name}` ({place}){made} before `{target}` is set to `{value}` ({written}): "
         "after that the difference is 0", lambda c: bool(words_of_overwritten(c)),
         words=words_of_overwritten, alone=True),
    Rule("zero divisor, underflow", names_in("div"), "advice",
         "sum `{name}` over {own}, not {dim} ({place}): `{product}` ({product_place}) keeps the "
         "rows apart, and a column of them may be 0 throughout",
         lambda c: bool(words_of_dimension(c)), words=words_of_dimension, alone=True),
    Rule("zero divisor, underflow", names_in("div"), "advice",
         "bound what each multiplicative update makes, by clamp(min=1e-12){others}: what has "
         "become 0 in `{name}` or its factor stays 0, and makes this divisor 0",
         lambda c: bool(words_of_update(c)), words=words_of_update, alone=True),
    Rule(_LOST, names_in("div log log10 log2 pow reciprocal rsqrt sqrt"), "advice",
         "take 0.99 of {ratio}: {step} goes the whole way to the boundary, where an element of "
         "{name} is 0 ({place})",
         lambda c: bool(words_of_boundary(c)), words=words_of_boundary, alone=True),
    Rule("domain", names_in("log log10 log1p log2 pow rsqrt sqrt xlogy"), "advice", "{repair}",
         lambda c: bool(words_of_long_step(c)), words=words_of_long_step, alone=True),
    Rule(_LOST, names_in("div log log10 log2 reciprocal rsqrt"), "advice",
         "keep {name} above 0 in this update, by clamp(min=1e-6) in place of {cut}: where it is 0, "
         "it has no reciprocal and no logarithm",
         lambda c: bool(words_of_cut(c)) and not words_of_boundary(c), words=words_of_cut,
         alone=True),
    Rule("overflow", None, "advice",
         "compute all of {name} in float32, with .float() of what it is given{outside}: beside "
         "this, {others} overflows",
         lambda c: bool(words_of_function(c)), words=words_of_function),
)  # fmt: skip
