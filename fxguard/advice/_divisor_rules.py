"""The rules for divisors that are 0, and for the eps that should have prevented that.

Knows nothing of torch.
"""

from __future__ import annotations

from fxguard.advice import signs, zeros
from fxguard.advice._kinds import DIVISIONS, LOG
from fxguard.advice._rule import Rule
from fxguard.advice._rule import names_in as _names
from fxguard.advice.case import Case
from fxguard.advice.end_of_range import is_at_both_ends, is_at_end, maker_at_end, words_of_end
from fxguard.advice.ends_of_support import words_of_density
from fxguard.advice.extents import words_of_extent
from fxguard.advice.iterated import words_of_divisor, words_of_step
from fxguard.advice.logs_in_divisors import words_of_divided
from fxguard.advice.positive import cut_at_zero
from fxguard.advice.windows import is_sum_of_windows
from fxguard.advice.zero_options import words_of_option
from fxguard.graph.poles import DEFAULT_EPS, plain

__all__ = ["DIVISOR_RULES"]

_POLES = LOG | _names("digamma div lgamma polygamma reciprocal rsqrt")

# Those take no eps, and this one for a logarithm.
_BY_COUNT = (
    "a / clamp(b, min=n) -> a / clamp(b, min=1)", "a / b -> a / b.clamp(min=1)",
    "a ** y -> a.clamp(min=1) ** y", "rsqrt(a) -> rsqrt(a.clamp(min=1))",
)  # fmt: skip

_WITHOUT_EPS = _names("cosine_embedding_loss renorm")

_NORMS = frozenset(DEFAULT_EPS) - _WITHOUT_EPS - {"poisson_nll_loss", "weight_norm"}


def _is_kept_root(case: Case) -> bool:
    """A root of what is not trained, such as the second moment of an optimizer."""
    is_root = any(plain(step.kind) == "sqrt" for step in case.around.culprit_made_by)
    return is_root and not case.is_differentiated()


DIVISOR_RULES = (
    Rule("zero divisor", LOG, "advice",
         "leave out what has no extent, where it is chosen before {c.name}: {made} makes 0 of "
         "equal ends, and with a bound such as 1e-12 it would be {bound}",
         lambda c: bool(words_of_extent(c)), alone=True, words=words_of_extent),
    Rule("zero divisor", _names("xlogy"), "advice",
         "{repair}, or give such samples a likelihood of their own: the density is 0 there, and "
         "with a tiny bound they weigh more than all others",
         lambda c: bool(words_of_density(c)), alone=True, words=words_of_density),
    Rule("zero divisor, underflow", DIVISIONS, "advice",
         "bound the divisor of this Newton step, {divisor}.clamp(min=1e-6) if it is positive, or "
         "leave `{name}` as it is where the divisor is 0{why}",
         lambda c: bool(words_of_divisor(c)), alone=True, words=words_of_divisor),
    Rule("zero divisor, underflow", DIVISIONS, "advice",
         "{bounded}: `{name}` left the range where `{quotient}` has a value, and an eps alone "
         "makes a huge step of it",
         lambda c: bool(words_of_step(c)), alone=True, words=words_of_step),
    Rule("zero divisor, underflow", DIVISIONS | {"pow", "rsqrt"}, "advice",
         "take {c.counted}.clamp(min=1): a count less one is 0 where the count is 1; a group of "
         "one has no deviation, so treat it apart, such as with a deviation of 1",
         lambda c: signs.is_count_less_one(c) and signs.is_of_squares(c),
         rewrites=_BY_COUNT),
    Rule("zero divisor, underflow", DIVISIONS | {"pow", "rsqrt"}, "advice",
         "take {c.counted}.clamp(min=1): a count less one is 0 where the count is 1; or treat a "
         "group of one apart",
         lambda c: signs.is_count_less_one(c) and not signs.is_of_squares(c),
         rewrites=_BY_COUNT),
    Rule("zero divisor, underflow", DIVISIONS | {"pow", "rsqrt"}, "advice",
         "take {c.counted}.clamp(min=1): a count may be 0, as of an empty mask or a node without "
         "edges",
         lambda c: signs.is_count_of_mask(c) and not signs.is_count_less_one(c),
         rewrites=_BY_COUNT),
    Rule("zero divisor, domain", LOG | {"div"}, "advice",
         "take {n}.clamp(min=2) in the logarithm that divides: of a count of 1 it is 0, and of 0 "
         "it is -inf", lambda c: bool(words_of_divided(c)), words=words_of_divided, alone=True,
         tries=("log(a) -> log(a.clamp(min=2))",)),
    Rule("zero divisor", LOG, "advice",
         "take log1p(n), or log(n.clamp(min=1)), where n counts: a count may be 0",
         signs.is_count_of_mask, rewrites=("{c.name}(a) -> {c.name}(a.clamp(min=1))",)),
    Rule("zero divisor", LOG, "advice",
         "take 1 for a deviation of 0, {c.name}(torch.where({c.x} == 0, 1, {c.x})): what is "
         "constant has none, and an eps in its place makes a scale of 1 / eps",
         signs.is_inverted_spread,
         tries=("{c.name}(a) -> {c.name}(where(a == 0, 1, a))",)),
    Rule("zero divisor", LOG | {"rsqrt"}, "advice",
         "add an eps to the variance, {c.name}(v + {c.near_zero})",
         lambda c: signs.is_variance(c) and c.eps_has_gradient()
         and not (zeros.is_spread_of_data(c) or signs.is_inverted_spread(c)),
         tries=("{c.name}(a) -> {c.name}(a + {c.near_zero})",)),
    Rule("zero divisor", None, "advice",
         "compute {c.name} and what it reads in float32, with an eps: at an eps that float16 "
         "holds, the gradient overflows",
         lambda c: c.name in ("float_power", "pow", "rsqrt") and not c.eps_has_gradient()
         and not signs.is_count_of_mask(c) and not c.loses_eps()),
    Rule("zero divisor, underflow", None, "advice",
         "take an eps that {c.dtype} holds, {c.near_zero}: {c.eps} is 0 there",
         lambda c: c.loses_eps() and c.eps_has_gradient()),
    Rule("zero divisor, underflow", None, "advice",
         "compute the norm in float32, from x.float() on: {c.eps} is 0 in {c.dtype}, and with the "
         "smallest eps it holds the gradient overflows",
         lambda c: c.loses_eps() and not c.eps_has_gradient() and signs.is_variance(c)),
    Rule("zero divisor, underflow", None, "advice",
         "compute {c.name} and what it reads in float32: {c.eps} is 0 in {c.dtype}, and with the "
         "smallest eps it holds the gradient overflows",
         lambda c: c.loses_eps() and not c.eps_has_gradient() and not signs.is_variance(c)
         and not _is_kept_root(c)),
    Rule("zero divisor, underflow", None, "advice",
         "keep all that {c.name} is computed from in float32, also what is kept from step to step, "
         "as squares are 0 in {c.dtype} sooner than their roots; {c.eps} is 0 there, too",
         lambda c: c.loses_eps() and not c.eps_has_gradient() and _is_kept_root(c)),
    Rule("zero divisor", _names("weight_norm"), "advice",
         "initialise this weight with numbers, or leave weight_norm out: a row is all zeros, and "
         "weight_norm takes no eps"),
    Rule("zero divisor", _WITHOUT_EPS, "advice",
         "leave out rows of zeros, or add small numbers to them: {c.name} takes no eps"),
    Rule("zero divisor", _names("poisson_nll_loss"), "advice",
         "give {c.name} an eps above 0: it takes the logarithm of its input"),
    Rule("zero divisor", _NORMS, "advice",
         "give {c.name} an eps above 0: a row has no norm or deviation"),
    Rule("zero divisor", _POLES, "advice",
         "give `{option}`, which is 0 ({place}), a number above 0{other}: an eps makes 1 / eps "
         "of it", lambda c: bool(words_of_option(c)), alone=True, words=words_of_option),
    Rule("zero divisor", _POLES, "advice",
         "make {c.x} positive where it is computed, by {c.positive}{c.made_at}",
         lambda c: c.is_cut_at_zero() and not c.has_other_pole(),
         tries=("relu(a) -> softplus(a) + {c.above_zero}",
                "clamp(a, 0, m) -> softplus(a) + {c.above_zero}"),
         maker=lambda c: cut_at_zero(c.around)),
    Rule("zero divisor", _POLES, "advice",
         "make {c.x} positive where it is computed, by {c.positive}{c.made_at}: {c.reader} reads "
         "it, too", lambda c: c.has_other_pole() and (c.is_cut_at_zero() or not c.made_at),
         tries=("relu(a) -> softplus(a) + {c.above_zero}",
                "clamp(a, 0, m) -> softplus(a) + {c.above_zero}"),
         maker=lambda c: cut_at_zero(c.around)),
    Rule("zero divisor", _POLES, "advice",
         "keep {c.x} away from 0 where it is computed{c.made_at}: {c.reader} reads it, too",
         lambda c: c.has_other_pole() and not c.is_cut_at_zero() and bool(c.made_at), last=True),
    Rule("zero divisor", DIVISIONS, "advice",
         "add an eps inside the root, sqrt(s + {c.near_zero}): at 0 the root has no derivative",
         lambda c: signs.is_root_by_hand(c) and c.is_differentiated()),
    Rule("zero divisor, rounding", DIVISIONS | _names("atanh erfinv log log10 log1p log2 logit"),
         "advice",
         "keep {number} {inside} where it is made, in {made}, {how}{lost}",
         lambda c: is_at_end(c) and not is_at_both_ends(c), last=True, words=words_of_end,
         maker=maker_at_end),
    Rule("zero divisor, rounding", DIVISIONS | _names("log log10 log1p log2"), "advice",
         "keep {number} {inside} where it is made, in {made}, {how}{lost}",
         is_at_both_ends, alone=True, words=words_of_end, maker=maker_at_end),
    Rule("zero divisor", DIVISIONS, "advice",
         "pad by half a window at both ends before the frames are cut, and cut that off behind the "
         "division: at the ends windows add up to 0, and an eps makes huge samples there",
         is_sum_of_windows, alone=True),
    Rule("zero divisor", DIVISIONS, "advice",
         "choose the divisor{c.definition} by where({c.divisor} == 0, 1, {c.divisor}) before the "
         "division, or add an eps to it",
         lambda c: not (c.has_other_pole() or signs.divides_by_number(c)
                        or zeros.is_weight_by_norm(c)), last=True,
         tries=("a / b -> a / where(b == 0, 1, b)",)),
)  # fmt: skip
