"""Rules for special functions that leave the range of a dtype: scaled ones, and logarithms of them.

Those that are *exact* are as in :mod:`fxguard.advice._rewrites`. Knows nothing of torch.
"""

from __future__ import annotations

from fxguard.advice import _expressions as made
from fxguard.advice import special_functions as special
from fxguard.advice._rule import Rule, names_in
from fxguard.advice.case import Case

__all__ = ["SPECIAL_RULES"]

_LOG = names_in("log log10 log2")
_LOST = "zero divisor, underflow, rounding"


def _is_alone(case: Case) -> bool:
    """Neither its logarithm is taken, nor a quotient by which it cancels."""
    is_logged = special.is_logged(case) or special.is_logged_in_product(case)
    return not is_logged and not special.is_quotient(case)


SPECIAL_RULES = (
    # Bessel functions, which grow as exp(|x|) does.
    *(Rule("overflow", names_in(name), "exact",
           f"take log(special.{name}e({{c.bare}})) + {{c.x}}.abs() "
           f"instead of log({name}({{c.bare}}))",
           special.is_logged,
           rewrites=(f"log({name}(a)) -> log({name}e(a)) + a.abs()",))
      for name in sorted(special.BESSEL)),
    Rule("overflow", special.BESSEL, "exact",
         "take special.{above}e({c.bare}) / special.{below}e({c.bare}) "
         "instead of {above}({c.bare}) / {below}({c.bare})",
         special.is_quotient, words=special.words_of_quotient),
    Rule("overflow", special.BESSEL, "advice",
         "take log(special.{c.name}e({c.bare})) + {c.x}.abs() for the logarithm of "
         "{c.name}({c.bare}), and add the logarithms of its factors", special.is_logged_in_product),
    Rule("overflow", special.BESSEL, "advice",
         "take torch.special.{c.name}e({c.bare}), which is {c.name}({c.bare}) * "
         "exp(-{c.x}.abs()), and move exp({c.x}.abs()) into the exponents beside it", _is_alone),
    # Exponentials whose logarithm is taken.
    Rule("overflow", names_in("sinh"), "exact",
         "take {c.x} + log(-expm1(-2 * {c.x})) - log(2) instead of log(sinh({c.bare}))",
         special.is_logged,
         rewrites=("log(sinh(a)) -> a + log(-expm1(-2 * a)) - log(2)",)),
    Rule("overflow", names_in("exp"), "exact",
         "take {c.bare} instead of log(exp({c.bare}))", special.is_logged,
         rewrites=("log(exp(x)) -> x",)),
    Rule(_LOST, _LOG, "exact",
         "take {c.of[exp]}{c.per_log} instead of {c.name}(exp({c.of[exp]}))",
         made.is_of("exp"), rewrites=("{c.name}(exp(x)) -> x{c.per_log}",)),
    Rule("overflow", names_in("exp"), "advice",
         "add and subtract {c.argument} and the other lgamma themselves, in place of the logarithm "
         "of products and quotients of their exp", special.is_log_of_gamma),
    # Probabilities of the normal distribution.
    Rule(_LOST, _LOG, "exact",
         "take special.log_ndtr({c.of[ndtr]}){c.per_log} instead of {c.name}(ndtr({c.of[ndtr]}))",
         made.is_of("ndtr"), rewrites=("{c.name}(ndtr(x)) -> log_ndtr(x){c.per_log}",)),
    Rule(_LOST, _LOG, "exact",
         "take (special.log_ndtr(-sqrt(2) * {c.of[erfc]}) + log(2)){c.per_log} "
         "instead of {c.name}(erfc({c.of[erfc]}))", made.is_of("erfc"),
         rewrites=("{c.name}(erfc(x)) -> "
                   "(log_ndtr(-1.4142135623730951 * x) + log(2)){c.per_log}",)),
    Rule(_LOST, _LOG, "exact",
         "take special.log_ndtr(x){c.per_log} instead of {c.name}(0.5 * (1 + erf(x / sqrt(2))))",
         special.is_normal_tail),
    Rule(_LOST, _LOG, "exact",
         "take special.log_ndtr(-x){c.per_log} instead of {c.name}(0.5 * (1 - erf(x / sqrt(2))))",
         special.is_normal_tail_above),
)  # fmt: skip
