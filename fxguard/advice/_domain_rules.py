"""The rules for numbers outside of where an operation has a value.

Knows nothing of torch.
"""

from __future__ import annotations

from fxguard.advice import signs
from fxguard.advice._bounded import BOUNDED, BOUNDED_RUN, likewise
from fxguard.advice._kinds import DIVISIONS, LOG
from fxguard.advice._rule import Rule
from fxguard.advice._rule import names_in as _names
from fxguard.advice.beginnings import IN_LOGS
from fxguard.advice.case import Case
from fxguard.advice.determinants import (
    is_barrier,
    is_of_variables,
    is_to_be_positive,
    words_of_matrix,
)
from fxguard.advice.eigenvalues import words_of_eigenvalues
from fxguard.advice.learned_ranges import words_of_learned
from fxguard.advice.negative_factors import words_of_factor
from fxguard.advice.negative_parts import words_of_part
from fxguard.advice.numbers import DOMAINS
from fxguard.advice.own_rates import words_of_rate
from fxguard.advice.stored_tanh import is_of_tanh
from fxguard.advice.underflows import is_by_small_exp, small_exp, words_of_small_exp
from fxguard.graph.poles import LAWS, SINGULAR

__all__ = ["DOMAIN_RULES"]

_POSITIVE = LOG | _names("float_power pow rsqrt sqrt xlogy")  # these need a positive operand

_NAMES_OF_DETERMINANTS = LOG | {"logdet"}

_OTHERS = frozenset(LAWS) - DIVISIONS - frozenset(BOUNDED)


def _is_far_outside(case: Case) -> bool:
    has_own_rule = case.name in _POSITIVE and _is_free(case)
    return case.is_far_outside() and not (has_own_rule or signs.is_difference_with_square(case))


def _is_free(case: Case) -> bool:
    return case.has_operands() and signs.is_free_domain(case) and not case.is_of_parameters()


DOMAIN_RULES = (
    Rule("domain, rounding, zero divisor", _POSITIVE, "advice",
         "bound the eigenvalues by a share of the largest, {c.x}.clamp(min={share} * "
         "{c.x}.amax(-1, keepdim=True)): "
         "by roundings the smallest may be 0 or negative, and an absolute eps is below these",
         lambda c: bool(words_of_eigenvalues(c)), alone=True, words=words_of_eigenvalues),
    Rule("domain", _POSITIVE | frozenset(DOMAINS), "advice",
         "keep {learned} {range}: make it as {by}; a bound on {c.x} has no gradient",
         lambda c: bool(words_of_learned(c)), alone=True, words=words_of_learned),
    Rule("zero divisor", _names("atanh"), "advice",
         "keep u, of which {c.bare} is tanh(u), and hand it on in place of {c.bare}: tanh has "
         "rounded it to {c.number}, and of a bound atanh makes another u",
         is_of_tanh, alone=True),
    Rule("domain", _POSITIVE, "advice",
         "change {grown} by a factor that stays positive, {grown} * exp(...), in {made}: a share "
         "of {grown} is added to it, which turns it negative where that share is below -1",
         lambda c: bool(words_of_rate(c)), alone=True, words=words_of_rate),
    Rule("domain", _POSITIVE, "advice",
         "compute it only where `{factor}` is above 0, by if or where, and what holds without it "
         "elsewhere: it is {number}, and a bound at 0 hides that",
         lambda c: bool(words_of_factor(c)), alone=True, words=words_of_factor),
    Rule("domain", _POSITIVE, "advice",
         "bound {part}, which {maker} makes negative, below by the least that it can be, with "
         "clamp(min=...) above 0: all else that {c.operand} is computed of is positive",
         lambda c: bool(words_of_part(c)), alone=True, words=words_of_part),
    Rule("domain", _POSITIVE, "advice",
         "keep {c.parameters} positive, by softplus or exp of a free parameter: a bound on {c.x} "
         "has no gradient where it is negative",
         lambda c: signs.is_free_domain(c) and c.is_of_parameters()),
    Rule("domain", _POSITIVE, "advice",
         "make {c.operand} positive where it is computed{c.made_at}, by softplus, exp or a "
         "softmax: a bound has no gradient there", lambda c: _is_free(c) and c.is_of_layer()),
    Rule("domain", LOG | {"rsqrt"}, "advice",
         "see why {c.operand} is negative{c.made_at}, and keep it positive there, by softplus or "
         "exp, not by clamp(min=0), of which {c.name} is infinite",
         lambda c: _is_free(c) and not (c.is_of_layer() or c.is_of_layers())
         and not signs.is_root_of_powers(c) and c.is_differentiated()),
    Rule("domain", LOG | {"rsqrt"}, "advice",
         "see why {c.operand} is negative{c.made_at}, where it has no {c.name}: leave such "
         "elements out, or bound it so far above 0 that its {c.name} means something",
         lambda c: _is_free(c) and not (c.is_of_layer() or c.is_of_layers())
         and not signs.is_root_of_powers(c) and not c.is_differentiated()),
    Rule("domain", _POSITIVE - LOG - {"rsqrt"}, "advice",
         "see why {c.operand} is negative{c.made_at}; where it may be, bound it by clamp(min=0), "
         "which has no gradient there",
         lambda c: _is_free(c) and not (c.is_of_layer() or c.is_of_layers())
         and not (signs.is_root_of_powers(c) or signs.is_learned_exponent(c))),
    Rule("domain", _names("pow rsqrt sqrt"), "advice",
         "average (x - mean) ** 2 in place of x ** 2, or x less a first value in float64, x and x² "
         "alike: sq - mean ** 2 keeps roundings, and a bound hides them",
         signs.is_difference_with_square),
    Rule("domain, rounding", LOG, "advice",
         "compute the variance as the mean of (x - mean) ** 2, or in float64: of numbers far from "
         "0, sq - mean ** 2 keeps roundings alone, and so does a bound on it",
         signs.is_difference_with_square),
    Rule("rounding", _names("div"), "advice",
         "average (x - mean) ** 2 in place of x ** 2, or in float64: of numbers far from 0, "
         "sq - mean ** 2 keeps roundings alone, here 0", signs.is_deviation_by_squares),
    Rule("rounding", _names("pow rsqrt sqrt"), "advice",
         "take (sq - mean ** 2).clamp(min=0) + eps, or the mean of (x - mean) ** 2, with an eps: "
         "by roundings the difference is 0 or negative", signs.is_difference_with_square),
    Rule("zero divisor", _names("log1p"), "advice",
         "{c.bare} is -1 in the data, as where a number is missing: put another in its place "
         "before log1p and before statistics, such as {c.x}.clamp(min=0), or leave it out",
         signs.is_missing_data, alone=True),
    Rule("zero divisor", _names("digamma lgamma polygamma"), "advice",
         "a count is -1 in the data, as where one is missing: put 0 in its place before {c.name}, "
         "or leave it out: a mask behind {c.name} is too late, as it multiplies an infinity",
         lambda c: signs.missing_count(c) is not None, alone=True),
    Rule("domain", _names("log1p"), "advice",
         "{c.bare} is {c.number} in the data: take sign({c.bare}) * log1p({c.x}.abs()) where "
         "numbers below 0 mean something, or log1p({c.x}.clamp(min=0)) where they are mistakes",
         signs.is_negative_data),
    *(Rule("domain", _names(name), "advice",
           f"see why {{c.operand}} is {{c.number}}{{c.made_at}}: leave such elements out, or take "
           f"{bounded}, with no gradient there",
           lambda c: _is_far_outside(c) and not signs.is_negative_data(c))
      for name, bounded in BOUNDED.items() if name in DOMAINS),
    *(Rule("zero divisor, rounding, domain, underflow", _names(name), "advice",
           f"bound the argument: {bounded}{{c.why_floor}}{{likewise}}",
           lambda c: not c.reads_infinity() and c.eps_has_gradient(), last=True,
           words=likewise, tries=(BOUNDED_RUN[name],))
      for name, bounded in BOUNDED.items()),
    Rule("zero divisor, rounding, domain", _OTHERS, "advice",
         "bound the argument of {c.name} away from where it has no value",
         lambda c: not c.reads_infinity(), last=True),
    Rule("underflow, rounding", None, "advice",
         "compute {c.name} and what it reads in float32: {c.dtype} does not hold it", Case.is_half,
         last=True),
    *(Rule(cause, _names("div reciprocal"), "advice",
           IN_LOGS + " from {exp} on, with logsumexp in place of {product}: an eps would "
           "change a divisor this small", fits, words=words_of_small_exp)
      for cause, fits in (("underflow", lambda c: small_exp(c) is not None),
                          ("overflow", is_by_small_exp))),
    Rule("underflow", None, "advice",
         "work with logarithms, or add an eps: {c.dtype} does not hold numbers so small",
         Case.is_wide, last=True),
    Rule("domain", _NAMES_OF_DETERMINANTS, "advice",
         "go back and halve a step after which {matrix} has left the matrices with a determinant "
         "above 0, as slogdet({matrix}).sign tells; its logabsdet alone hides it",
         lambda c: bool(words_of_matrix(c)) and is_barrier(c), words=words_of_matrix, alone=True),
    Rule("domain", _NAMES_OF_DETERMINANTS, "advice",
         "make {matrix} positive definite, as L @ L.mT with the exp of a free number on L's "
         "diagonal: its determinant is negative, and slogdet hides it",
         lambda c: bool(words_of_matrix(c)) and is_to_be_positive(c), words=words_of_matrix,
         alone=True),
    Rule("domain", _NAMES_OF_DETERMINANTS, "advice",
         "take slogdet({matrix}).logabsdet: the determinant is negative, and a change of variables "
         "takes its magnitude",
         lambda c: bool(words_of_matrix(c)) and is_of_variables(c), words=words_of_matrix,
         alone=True, tries=("logdet(a) -> slogdet(a)[1]",)),
    Rule("zero divisor", SINGULAR, "advice",
         "add eps to the diagonal: the matrix is singular",
         tries=("{c.name}(a, ...) -> {c.name}(a + 1e-6 * ones_like(a).tril().triu(), ...)",)),
)  # fmt: skip
