"""The rules for derivatives that are infinite at finite numbers.

Knows nothing of torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fxguard.advice import signs
from fxguard.advice._bounded import BOUNDED, BOUNDED_RUN, likewise
from fxguard.advice._kinds import LOG
from fxguard.advice._rule import Rule
from fxguard.advice._rule import names_in as _names
from fxguard.advice.case import Case
from fxguard.advice.chosen_products import words_of_argument, words_of_product
from fxguard.advice.covariances import is_covariance
from fxguard.advice.matrix_functions import is_matrix_function
from fxguard.advice.root_of_difference import words_of_difference

__all__ = ["GRADIENT_RULES"]

# How to keep an argument away from an infinite derivative.
_SMOOTHED = {
    **{
        name: f"{name}({{c.unbounded}}.clamp(-1 + {{c.near_one}}, 1 - {{c.near_one}})), or atan2 "
        "of the sine and cosine"
        for name in ("acos", "asin")
    },
    "pow": "({c.bare} + {c.near_zero}) ** {c.other}: the derivative at 0 is infinite where the "
    "exponent is below 1",
    "sqrt": "sqrt({c.bare} + {c.near_zero}): the derivative at 0 is infinite",
    "rsqrt": "rsqrt({c.bare} + {c.near_zero}): the derivative at 0 is infinite",
}

_WITH_EPS = {
    "pow": ("a ** y -> (a + {c.near_zero}) ** y",),
    "rsqrt": ("rsqrt(a) -> rsqrt(a + {c.near_zero})",),
    "sqrt": ("sqrt(a) -> sqrt(a + {c.near_zero})",),
}

# How to give a decomposition a gradient: by what does not depend on the choice of its vectors, or
# by a matrix that is not degenerate. An eps times the identity keeps what is equal equal.
_INVARIANT = {
    name: f"take the loss from {values}'s values or the matrix; or write a backward of {name} "
    "with d / (d ** 2 + eps): its own divides by differences d of these"
    for name, values in (("eig", "eigvals"), ("eigh", "eigvalsh"), ("svd", "svdvals"))
}

_DISTINCT = (
    "for vectors, add distinct numbers to the diagonal, such as diag(linspace(0, {c.apart}, n)), "
    "or begin with weights that differ: one eps keeps them equal"
)

_DISTINCT_RUN = (
    "{c.name}(a, ...) -> {c.name}(a + {c.apart} * ones_like(a).cumsum(-1).tril().triu() / "
    "ones_like(a).cumsum(-1).amax(), ...)"
)

_FULL_RANK = "leave out dependent columns, or add eps to the diagonal: Q has no gradient there"


def _zero_rows(case: Case) -> Mapping[str, str]:
    """``{"rows": "rows 6 to 9"}`` of a matrix that are 0, so that eigenvalues are equal; or {}."""
    told = "" if case.evidence is None else case.evidence.degeneracy
    found = re.search(r", as (rows .*) of the matrix are 0$", told)
    return {} if found is None else {"rows": found[1]}


def _is_steep_elsewhere(case: Case) -> bool:
    """Something else has no derivative there either, and what computed the operand is known."""
    return bool(case.made_in and case.steep) and case.dtype != "float16"


GRADIENT_RULES = (
    Rule("singular gradient", LOG | _names("pow rsqrt sqrt"), "advice",
         "keep {c.x} away from 0 where it is made{c.made_in}, by clamp(min=1e-6): {c.steep} reads "
         "it, too, and has no derivative at 0", _is_steep_elsewhere),
    Rule("singular gradient, domain", _names("mul"), "exact",
         "take {instead} in place of {x} in the product: the branch that is not taken has a "
         "gradient, and 0 * inf is NaN",
         lambda c: signs.is_chosen_after(c) and bool(words_of_product(c)), alone=True,
         words=words_of_product),
    Rule("singular gradient, domain", None, "exact",
         "choose a safe argument of {c.name} by where, too{such}: the branch that is not taken "
         "has a gradient, and 0 * inf is NaN", signs.is_chosen_after, words=words_of_argument,
         rewrites=("where(c, {c.name}(a), b) -> where(c, {c.name}(where(c, a, {c.safe})), b)",
                   "where(c, b, {c.name}(a)) -> where(c, b, {c.name}(where(c, {c.safe}, a)))")),
    Rule("singular gradient", _names("sqrt"), "advice",
         "sqrt({c.x}.clamp(min={c.near_zero})): at 0 the derivative is infinite{roundings}{cdist}",
         lambda c: signs.is_difference(c) and not signs.is_chosen_after(c),
         words=words_of_difference,
         rewrites=("sqrt(a) -> sqrt(a.clamp(min={c.near_zero}))",)),
    *(Rule("singular gradient", _names(name), "advice", smoothed,
           lambda c: not signs.is_chosen_after(c) and c.eps_has_gradient()
           and not (c.name == "sqrt" and signs.is_difference(c)),
           rewrites=_WITH_EPS.get(name, ()))
      for name, smoothed in _SMOOTHED.items()),
    *(Rule("singular gradient", _names(name), "advice",
           f"bound the argument: {bounded}{{likewise}}",
           lambda c: not signs.is_chosen_after(c), words=likewise,
           tries=(BOUNDED_RUN[name],))
      for name, bounded in BOUNDED.items() if name not in _SMOOTHED),
    Rule("singular gradient, rounding", _names("eigh"), "advice",
         "put distinct numbers, far from the other eigenvalues, on the diagonal where a matrix is "
         "padded with 0, here in {rows}: one eps for all keeps them equal",
         lambda c: bool(_zero_rows(c)) and not is_covariance(c), words=_zero_rows),
    Rule("singular gradient, rounding", _names("eigh"), "advice",
         "give this function f of a matrix its own backward, with (f(a) - f(b)) / (a - b), and "
         "f'(a) where eigenvalues a and b are equal; that of {c.name} divides by a - b",
         lambda c: c.is_degenerate() and is_matrix_function(c)),
    Rule("singular gradient, rounding", _names("eigh"), "advice",
         "leave out, before {c.name}, what does not vary: points that repeat others, as those that "
         "fill up a set do, or features that are constant: {rows} of the covariance are 0, and its "
         "vectors mean nothing there",
         lambda c: bool(_zero_rows(c)) and is_covariance(c), words=_zero_rows),
    *(Rule("singular gradient, rounding", _names(name), "advice", text, Case.is_degenerate)
      for name, text in _INVARIANT.items()),
    Rule("singular gradient, rounding", frozenset(_INVARIANT), "advice", _DISTINCT,
         Case.is_degenerate, tries=(_DISTINCT_RUN,)),
    Rule("singular gradient, rounding", _names("qr"), "advice", _FULL_RANK, Case.is_degenerate),
    Rule("singular gradient", None, "advice",
         "keep the argument of {c.name} away from where its derivative is infinite", last=True),
)  # fmt: skip
