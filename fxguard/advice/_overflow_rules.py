"""The rules for numbers that a dtype does not hold.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice import becomes, signs, zeros
from fxguard.advice._kinds import REDUCED
from fxguard.advice._rule import Rule
from fxguard.advice._rule import names_in as _names
from fxguard.advice.beginnings import GREW, MASK
from fxguard.advice.case import Case
from fxguard.advice.causes import overflowed_on_the_way
from fxguard.advice.gated_states import words_of_gate
from fxguard.advice.parameters_in_exponents import words_of_exponent
from fxguard.graph.poles import LAWS, PRODUCTS
from fxguard.graph.tables import CASTS
from fxguard.source.assigned import target_of
from fxguard.source.weighting import weighs_terms_at

__all__ = ["OVERFLOW_RULES"]

_EXPS = _names("cosh exp exp2 expm1 sinh")

_TAKE_DTYPE = _names("cumprod cumsum mean nansum prod sum")

_KEPT_WIDE = (PRODUCTS | frozenset(LAWS)) - _EXPS


def _stored(case: Case) -> Mapping[str, str]:
    """What is written: ``self.cache``."""
    source = case.around.step.source
    return {"stored": ("" if source is None else target_of(source)) or "what is written"}


def _weight(case: Case) -> Mapping[str, str]:
    """The variable that weighs the terms of a mean by it; {} if there is none."""
    source = case.around.step.source
    name = "" if source is None or case.is_half() else weighs_terms_at(source)
    return {"weight": name} if name else {}


def _is_hopeless_exponent(case: Case) -> bool:
    is_free = signs.is_free_exponent(case) and not becomes.is_bounded_after(case)
    return is_free and case.fits_float32() and case.is_hopeless()


OVERFLOW_RULES = (
    # In a row that is masked entirely these are other functions, so they are not exact.
    Rule("overflow", _names("add sub"), "advice",
         MASK, Case.adds_limit),
    Rule("overflow", _names("add mul sub where"), "advice",
         "take masked_fill(mask, torch.finfo(x.dtype).min): {c.dtype} has no such number",
         Case.number_of_mask),
    Rule("overflow", None, "advice",
         "take a number that {c.dtype} holds, or compute {c.name} in {c.widest}",
         lambda c: c.is_beyond() and not c.number_of_mask()),
    Rule("overflow", None, "advice",
         "rescale all that is added to this stream: the norm that follows{c.norm} divides it out",
         lambda case: signs.norm_follows(case) and not signs.only_norm_follows(case)),
    # Overflows avoided by another dtype or a bound on an argument; never a bound on the result.
    Rule("overflow", None, "advice",
         "square in float32, {c.x}.float().pow(2): {c.dtype} holds squares of up to "
         "{c.largest_root:.3g}", lambda c: signs.is_square(c) and c.fits_float32()),
    Rule("overflow", _EXPS, "advice",
         "keep the weight in float32, and take its {c.name} there", signs.is_by_weight_in_half),
    Rule("overflow", _EXPS, "advice",
         "bound {c.argument} where it is computed{c.made_at}, or scale the inputs: in float32 the "
         "result would be {c.needed}", _is_hopeless_exponent,
         tries=("{c.name}(a) -> {c.name}(a.clamp(max={c.exponent_with_room}))",)),
    Rule("overflow", _EXPS, "advice",
         "compute it in float32, {c.name}({c.x}.float()): {c.dtype} holds {c.name} up to "
         "{c.name}({c.largest_exponent})",
         lambda c: signs.is_free_exponent(c) and c.fits_float32() and not _is_hopeless_exponent(c)
         and not becomes.is_bounded_after(c)),
    Rule("overflow", _names("exp"), "advice",
         "bound the weight that a term of the mean gets, exp({c.x}.clamp(max=4.6)): `{weight}` "
         "is then at most 100, as AWR and IQL clip theirs",
         lambda c: signs.is_free_exponent(c) and not becomes.is_bounded_after(c)
         and bool(_weight(c)), words=_weight,
         rewrites=("exp(a) -> exp(a.clamp(max=4.6))",)),
    Rule("overflow", _EXPS, "advice",
         "bound the parameter {parameter} where it is read, by clamp(-10, 10): each step moves it "
         "on where its loss is 0, or the learning rate is high",
         lambda c: bool(words_of_exponent(c)) and not becomes.is_bounded_after(c),
         words=words_of_exponent,
         rewrites=("{c.name}(a) -> {c.name}(a.clamp(-10, 10))",)),
    Rule("overflow", _EXPS, "advice",
         "look at what {c.argument} grew from, such as inputs that are not scaled: {c.dtype} holds "
         "{c.name} up to {c.name}({c.largest_exponent})",
         lambda c: signs.is_free_exponent(c) and not c.fits_float32()
         and not becomes.is_bounded_after(c) and not words_of_exponent(c)),
    Rule("overflow", _EXPS, "advice",
         "bound the argument in place of the result, {c.name}({c.x}.clamp(max="
         "{c.exponent_with_room})): then its gradient is finite, too",
         lambda c: signs.is_free_exponent(c) and becomes.is_bounded_after(c),
         rewrites=("{c.bounded_exponent}",)),
    Rule("overflow", _TAKE_DTYPE, "advice",
         "accumulate in float32: {c.name}(..., dtype=torch.float32)", Case.is_half),
    Rule("overflow", REDUCED - _TAKE_DTYPE, "advice",
         "accumulate in float32: give {c.name} what .float() makes of its operands", Case.is_half),
    Rule("overflow", CASTS, "advice",
         "cast to {c.wider} here: {c.dtype}'s maximum is {c.limit:.5g}{c.why_not_bfloat16}",
         Case.is_half),
    Rule("overflow", _names("copy setitem"), "advice",
         "keep {stored} in {c.wider}, or scale what is written there before, and back where it is "
         "read: {c.dtype}'s maximum is {c.limit:.5g}{c.why_not_bfloat16}", Case.is_half,
         words=_stored),
    Rule("overflow", _KEPT_WIDE, "advice",
         "keep {c.where} in {c.wider}: {c.dtype}'s maximum is {c.limit:.5g}", signs.is_near_limit),
    Rule("overflow", None, "advice",
         "compute {c.name} in {c.wider}: {c.dtype}'s maximum is {c.limit:.5g}", Case.is_half,
         last=True),
    Rule("overflow", zeros.NORMS, "advice",
         "divide by the largest magnitude first, m * {c.name}({c.x} / m) with m = "
         "{c.x}.abs().amax(): {c.dtype} holds the result, and not the squares",
         lambda c: c.is_wide() and c.evidence is not None and overflowed_on_the_way(c.evidence)),
    Rule("overflow", _names("add mul"), "advice",
         "keep the factor that {gate} makes at most 1, by sigmoid in its place; or carry the "
         "largest exponent m along from turn to turn, and take exp of differences to it, as xLSTM "
         "does: what is kept is multiplied by it in each turn",
         lambda c: bool(words_of_gate(c)), alone=True, words=words_of_gate),
    Rule("overflow", None, "advice",
         GREW + ": {c.dtype}'s maximum is {c.limit:.3g}", Case.is_wide,
         last=True),
)  # fmt: skip
