"""The rules by which an origin is told what to do: a table, keyed by the cause and what is around.

A new fix is one entry in :data:`RULES`; those of zeros and exact rewrites have tables of their own.
Knows nothing of torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fxguard.advice import becomes, signs, zeros
from fxguard.advice._rewrites import REWRITES
from fxguard.advice._rule import Rule
from fxguard.advice._rule import names_in as _names
from fxguard.advice._special_rules import SPECIAL_RULES
from fxguard.advice._text_rules import TEXT_RULES
from fxguard.advice._zero_rules import ZERO_RULES
from fxguard.advice.alignments import words_of_short
from fxguard.advice.case import Case
from fxguard.advice.causes import overflowed_on_the_way
from fxguard.advice.chosen_products import words_of_argument, words_of_product
from fxguard.advice.converged import words_of_change
from fxguard.advice.covariances import is_covariance
from fxguard.advice.determinants import (
    is_barrier,
    is_of_variables,
    is_to_be_positive,
    words_of_matrix,
)
from fxguard.advice.eigenvalues import words_of_eigenvalues
from fxguard.advice.end_of_range import is_at_both_ends, is_at_end, maker_at_end, words_of_end
from fxguard.advice.fill_values import words_of_fill
from fxguard.advice.filtered_rows import filter_of, words_of_filter, words_of_masked
from fxguard.advice.gated_states import words_of_gate
from fxguard.advice.impossible_rows import has_impossible_row, words_of_emptied, words_of_row
from fxguard.advice.infinite_terms import words_of_infinities
from fxguard.advice.iterated import words_of_divisor, words_of_step
from fxguard.advice.learned_ranges import words_of_learned
from fxguard.advice.logs_in_divisors import words_of_divided
from fxguard.advice.masked_products import words_of_mask
from fxguard.advice.masked_sums import words_of_masked_sum
from fxguard.advice.negative_parts import words_of_part
from fxguard.advice.numbers import DOMAINS
from fxguard.advice.outside_ball import words_of_ball
from fxguard.advice.own_rates import words_of_rate
from fxguard.advice.positive import cut_at_zero
from fxguard.advice.reduced_rows import words_of_rows
from fxguard.advice.root_of_difference import words_of_difference
from fxguard.advice.samplers import is_of_sampler, words_of_acceptance
from fxguard.advice.underflows import is_by_small_exp, small_exp, words_of_small_exp
from fxguard.advice.windows import is_of_tanh, is_sum_of_windows
from fxguard.advice.zero_options import words_of_option
from fxguard.graph.poles import (
    DEFAULT_EPS,
    LAWS,
    LOSSES_OF_TARGETS,
    PRODUCTS,
    SINGULAR,
    SOFTMAXES,
    SPREADS,
    SUMS,
    plain,
)
from fxguard.graph.tables import CASTS, SELECTS
from fxguard.source.assigned import statement_at, target_of
from fxguard.source.named import smooths
from fxguard.source.same_operand import same_operand_at

__all__ = ["ASKS_BACK", "BOUND", "GREW", "IN_LOGS", "MASK", "MASKS", "REJECT", "RULES"]

MASKS = ("mask with ", "take masked_fill")  # how advice begins that comes before a trial
GREW = "look at what its operands grew from"  # how advice begins that a climb makes precise
IN_LOGS = "work in logs"  # how advice begins that no bound replaces
REJECT = "reject a proposal"  # how advice begins that a sampler needs
BOUND = "bound "  # how advice begins that bounds an argument
ASKS_BACK = ("look at ", BOUND)  # how advice begins that asks for what led there
MASK = "mask with masked_fill, where or a boolean mask: nothing fits beside the dtype's limit"


def _likewise(case: Case) -> Mapping[str, str]:
    """The other lines that apply the operation to the same expression."""
    source = case.around.step.source
    same = [] if source is None else same_operand_at(source, case.name)
    others = " and ".join(each.place for each in same)
    return {"likewise": f", and likewise at {others}" if others else ""}


def _is_smoothed(case: Case) -> bool:
    """A loss that smooths its targets over all classes reads -inf."""
    source = case.around.step.source
    is_masked = case.reads_infinity() and not case.reads_plus_infinity()
    return is_masked and source is not None and smooths(statement_at(source))


_LOG = _names("log log10 log2")
_POSITIVE = _LOG | _names("float_power pow rsqrt sqrt xlogy")  # these need a positive operand
_POLES = _LOG | _names("digamma div lgamma polygamma reciprocal rsqrt")
_NAMES_OF_DETERMINANTS = _LOG | {"logdet"}
_EXPS = _names("cosh exp exp2 expm1 sinh")
_DIVISIONS = _names("addcdiv div floor_divide fmod reciprocal remainder")
_REDUCED = SUMS | _names("mean logcumsumexp")
_LOSSES = LOSSES_OF_TARGETS | _names("kl_div")
# Those take no eps, and this one for a logarithm.
_BY_COUNT = (
    "a / clamp(b, min=n) -> a / clamp(b, min=1)", "a / b -> a / b.clamp(min=1)",
    "a ** y -> a.clamp(min=1) ** y", "rsqrt(a) -> rsqrt(a.clamp(min=1))",
)  # fmt: skip
_WITHOUT_EPS = _names("cosine_embedding_loss renorm")
_NORMS = frozenset(DEFAULT_EPS) - _WITHOUT_EPS - {"poisson_nll_loss", "weight_norm"}
_TAKE_DTYPE = _names("cumprod cumsum mean nansum prod sum")
_KEPT_WIDE = (PRODUCTS | frozenset(LAWS)) - _EXPS

# How to keep an argument inside its domain or away from a pole.
_BOUNDED = {
    "acos": "acos({c.unbounded}.clamp(-1 + {c.near_one}, 1 - {c.near_one}))",
    "acosh": "acosh({c.x}.clamp(min=1 + {c.near_one}))",
    "asin": "asin({c.unbounded}.clamp(-1 + {c.near_one}, 1 - {c.near_one}))",
    "atanh": "atanh({c.x}.clamp(-1 + {c.near_one}, 1 - {c.near_one}))",
    "erfinv": "erfinv({c.x}.clamp(-1 + {c.near_one}, 1 - {c.near_one}))",
    "log": "log({c.x}.clamp(min={c.floor}))",
    "log10": "log10({c.x}.clamp(min={c.floor}))",
    "log1p": "log1p({c.x}.clamp(min=-1 + {c.near_one}))",
    "log2": "log2({c.x}.clamp(min={c.floor}))",
    "logit": "logit({c.bare}, eps={c.near_one})",
    "pow": "{c.x}.clamp(min={c.near_zero}) ** {c.other}",
    "rsqrt": "rsqrt({c.bare} + {c.near_zero})",
    "sqrt": "sqrt({c.x}.clamp(min={c.near_zero}))",
    "xlogy": "xlogy({c.other}, {c.x}.clamp(min={c.near_zero}))",
}

_OTHERS = frozenset(LAWS) - _DIVISIONS - frozenset(_BOUNDED)

# The same for a run, with letters for the operands.
_BOUNDED_RUN = {
    name: f"{'a ** b' if name == 'pow' else 'xlogy(b, a)' if name == 'xlogy' else f'{name}(a)'} -> "
    + re.sub(r"\{c\.(x|unbounded|bare)\}", "a", text).replace("{c.other}", "b")
    for name, text in _BOUNDED.items()
}

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


def _stored(case: Case) -> Mapping[str, str]:
    """What is written: ``self.cache``."""
    source = case.around.step.source
    return {"stored": ("" if source is None else target_of(source)) or "what is written"}


def _last_batch(case: Case) -> Mapping[str, str]:
    """Of rows that were not chosen by an index it may be a last batch that has only one."""
    culprit = case.around.culprit
    maker = None if culprit is None else case.around.maker_of(culprit)
    is_chosen = maker is not None and plain(maker.kind) in SELECTS
    return {"last": "" if is_chosen else "; drop_last=True leaves out such a last batch"}


def _is_far_outside(case: Case) -> bool:
    has_own_rule = case.name in _POSITIVE and _is_free(case)
    return case.is_far_outside() and not (has_own_rule or signs.is_difference_with_square(case))


def _is_hopeless_exponent(case: Case) -> bool:
    is_free = signs.is_free_exponent(case) and not becomes.is_bounded_after(case)
    return is_free and case.fits_float32() and case.is_hopeless()


def _is_steep_elsewhere(case: Case) -> bool:
    """Something else has no derivative there either, and what computed the operand is known."""
    return bool(case.made_in and case.steep) and case.dtype != "float16"


def _is_kept_root(case: Case) -> bool:
    """A root of what is not trained, such as the second moment of an optimizer."""
    is_root = any(plain(step.kind) == "sqrt" for step in case.around.culprit_made_by)
    return is_root and not case.is_differentiated()


def _is_free(case: Case) -> bool:
    return case.has_operands() and signs.is_free_domain(case) and not case.is_of_parameters()


RULES = (
    *TEXT_RULES,
    Rule("unknown, domain", _names("mul"), "advice",
         "choose before {maker}, by where({mask}, ..., 0) of what it reads, in place of a product "
         "with {mask}: its result is infinite, and inf * 0 is NaN, also in its backward",
         lambda c: bool(words_of_mask(c)), words=words_of_mask, alone=True),
    Rule("overflow", _names("exp"), "advice",
         "mask with masked_fill({mask} == 0, -inf) what {c.name} reads, in float32, and take "
         "logsumexp in place of the log of the sum: a product with {mask} comes after inf",
         lambda c: bool(words_of_masked_sum(c)), words=words_of_masked_sum),
    Rule("overflow", None, "advice",
         "leave out, before the arithmetic, what {fill} fills with {number}: it stands for what is "
         "missing, and {c.name} has computed with it",
         lambda c: bool(words_of_fill(c)), words=words_of_fill, alone=True),
    Rule("domain", _names("acosh log pow rsqrt sqrt"), "advice",
         "keep points inside the unit ball: 1 - {norm} is negative in {less}, as |x| is above 1; "
         "after each step scale back what left it, x.mul_((1 - 1e-5) / "
         "x.norm(dim=-1, keepdim=True).clamp(min=1 - 1e-5))",
         lambda c: bool(words_of_ball(c)), alone=True, words=words_of_ball),
    Rule("overflow", None, "advice",
         REJECT + " that diverges: take 0 for {name} ({place}) where it is not finite, "
         "before anything is adapted to it", is_of_sampler, words=words_of_acceptance),
    Rule("domain", _names("sub"), "advice",
         "begin inside the support: a state of density 0, as here, has no ratio to a proposal, "
         "-inf - (-inf); with finfo.min in place of -inf it would accept any",
         lambda c: is_of_sampler(c) and signs.is_difference_of_masks(c)),
    Rule("zero divisor, underflow", _names("div reciprocal"), "advice",
         "stop where `{name}`{made} is 0 throughout, with `{what}` as it was before: {divides} by "
         "{by}; or guard {all}",
         lambda c: bool(words_of_change(c)), alone=True, words=words_of_change),
    *ZERO_RULES,
    *REWRITES,
    *SPECIAL_RULES,
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
    Rule("overflow", _EXPS, "advice",
         "look at what {c.argument} grew from, such as inputs that are not scaled: {c.dtype} holds "
         "{c.name} up to {c.name}({c.largest_exponent})",
         lambda c: signs.is_free_exponent(c) and not c.fits_float32()
         and not becomes.is_bounded_after(c)),
    Rule("overflow", _EXPS, "advice",
         "bound the argument in place of the result, {c.name}({c.x}.clamp(max="
         "{c.exponent_with_room})): then its gradient is finite, too",
         lambda c: signs.is_free_exponent(c) and becomes.is_bounded_after(c),
         rewrites=("{c.bounded_exponent}",)),
    Rule("overflow", _TAKE_DTYPE, "advice",
         "accumulate in float32: {c.name}(..., dtype=torch.float32)", Case.is_half),
    Rule("overflow", _REDUCED - _TAKE_DTYPE, "advice",
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
    # Divisors that are 0, and the eps that should have prevented that.
    Rule("zero divisor, underflow", _DIVISIONS, "advice",
         "bound the divisor of this Newton step, {divisor}.clamp(min=1e-6) if it is positive, or "
         "leave `{name}` as it is where the divisor is 0{why}",
         lambda c: bool(words_of_divisor(c)), alone=True, words=words_of_divisor),
    Rule("zero divisor, underflow", _DIVISIONS, "advice",
         "{bounded}: `{name}` left the range where `{quotient}` has a value, and an eps alone "
         "makes a huge step of it",
         lambda c: bool(words_of_step(c)), alone=True, words=words_of_step),
    Rule("zero divisor, underflow", _DIVISIONS | {"pow", "rsqrt"}, "advice",
         "take {c.counted}.clamp(min=1): a count less one is 0 where the count is 1; a group of "
         "one has no deviation, so treat it apart, such as with a deviation of 1",
         lambda c: signs.is_count_less_one(c) and signs.is_of_squares(c),
         rewrites=_BY_COUNT),
    Rule("zero divisor, underflow", _DIVISIONS | {"pow", "rsqrt"}, "advice",
         "take {c.counted}.clamp(min=1): a count less one is 0 where the count is 1; or treat a "
         "group of one apart",
         lambda c: signs.is_count_less_one(c) and not signs.is_of_squares(c),
         rewrites=_BY_COUNT),
    Rule("zero divisor, underflow", _DIVISIONS | {"pow", "rsqrt"}, "advice",
         "take {c.counted}.clamp(min=1): a count may be 0, as of an empty mask or a node without "
         "edges",
         lambda c: signs.is_count_of_mask(c) and not signs.is_count_less_one(c),
         rewrites=_BY_COUNT),
    Rule("zero divisor, domain", _LOG | {"div"}, "advice",
         "take {n}.clamp(min=2) in the logarithm that divides: of a count of 1 it is 0, and of 0 "
         "it is -inf", lambda c: bool(words_of_divided(c)), words=words_of_divided, alone=True,
         tries=("log(a) -> log(a.clamp(min=2))",)),
    Rule("zero divisor", _LOG, "advice",
         "take log1p(n), or log(n.clamp(min=1)), where n counts: a count may be 0",
         signs.is_count_of_mask, rewrites=("{c.name}(a) -> {c.name}(a.clamp(min=1))",)),
    Rule("zero divisor", _LOG, "advice",
         "take 1 for a deviation of 0, {c.name}(torch.where({c.x} == 0, 1, {c.x})): what is "
         "constant has none, and an eps in its place makes a scale of 1 / eps",
         signs.is_inverted_spread,
         tries=("{c.name}(a) -> {c.name}(where(a == 0, 1, a))",)),
    Rule("zero divisor", _LOG | {"rsqrt"}, "advice",
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
    Rule("zero divisor", _DIVISIONS, "advice",
         "add an eps inside the root, sqrt(s + {c.near_zero}): at 0 the root has no derivative",
         lambda c: signs.is_root_by_hand(c) and c.is_differentiated()),
    Rule("zero divisor, rounding", _DIVISIONS | _names("atanh erfinv log log10 log1p log2 logit"),
         "advice",
         "keep {number} {inside} where it is made, in {made}, {how}{lost}",
         lambda c: is_at_end(c) and not is_at_both_ends(c), last=True, words=words_of_end,
         maker=maker_at_end),
    Rule("zero divisor, rounding", _DIVISIONS | _names("log log10 log1p log2"), "advice",
         "keep {number} {inside} where it is made, in {made}, {how}{lost}",
         is_at_both_ends, alone=True, words=words_of_end, maker=maker_at_end),
    Rule("zero divisor", _DIVISIONS, "advice",
         "pad by half a window at both ends before the frames are cut, and cut that off behind the "
         "division: at the ends windows add up to 0, and an eps makes huge samples there",
         is_sum_of_windows, alone=True),
    Rule("zero divisor", _DIVISIONS, "advice",
         "choose the divisor{c.definition} by where({c.divisor} == 0, 1, {c.divisor}) before the "
         "division, or add an eps to it",
         lambda c: not (c.has_other_pole() or signs.divides_by_number(c)
                        or zeros.is_weight_by_norm(c)), last=True,
         tries=("a / b -> a / where(b == 0, 1, b)",)),
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
    Rule("domain", _LOG | {"rsqrt"}, "advice",
         "see why {c.operand} is negative{c.made_at}, and keep it positive there, by softplus or "
         "exp, not by clamp(min=0), of which {c.name} is infinite",
         lambda c: _is_free(c) and not (c.is_of_layer() or c.is_of_layers())
         and not signs.is_root_of_powers(c) and c.is_differentiated()),
    Rule("domain", _LOG | {"rsqrt"}, "advice",
         "see why {c.operand} is negative{c.made_at}, where it has no {c.name}: leave such "
         "elements out, or bound it so far above 0 that its {c.name} means something",
         lambda c: _is_free(c) and not (c.is_of_layer() or c.is_of_layers())
         and not signs.is_root_of_powers(c) and not c.is_differentiated()),
    Rule("domain", _POSITIVE - _LOG - {"rsqrt"}, "advice",
         "see why {c.operand} is negative{c.made_at}; where it may be, bound it by clamp(min=0), "
         "which has no gradient there",
         lambda c: _is_free(c) and not (c.is_of_layer() or c.is_of_layers())
         and not (signs.is_root_of_powers(c) or signs.is_learned_exponent(c))),
    Rule("domain", _names("pow rsqrt sqrt"), "advice",
         "average (x - mean) ** 2 in place of x ** 2, or x less a first value in float64, x and x² "
         "alike: sq - mean ** 2 keeps roundings, and a bound hides them",
         signs.is_difference_with_square),
    Rule("domain, rounding", _LOG, "advice",
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
      for name, bounded in _BOUNDED.items() if name in DOMAINS),
    *(Rule("zero divisor, rounding, domain, underflow", _names(name), "advice",
           f"bound the argument: {bounded}{{c.why_floor}}{{likewise}}",
           lambda c: not c.reads_infinity() and c.eps_has_gradient(), last=True,
           words=_likewise, tries=(_BOUNDED_RUN[name],))
      for name, bounded in _BOUNDED.items()),
    Rule("zero divisor, rounding, domain", _OTHERS, "advice",
         "bound the argument of {c.name} away from where it has no value",
         lambda c: not c.reads_infinity(), last=True),
    Rule("underflow, rounding", None, "advice",
         "compute {c.name} and what it reads in float32: {c.dtype} does not hold it", Case.is_half,
         last=True),
    *(Rule(cause, _names("div reciprocal"), "advice",
           IN_LOGS + " from {exp} on, with logsumexp in place of {product}: an eps makes other "
           "numbers of a divisor so small", fits, words=words_of_small_exp)
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
    # Infinite derivatives at finite numbers.
    Rule("singular gradient", _LOG | _names("pow rsqrt sqrt"), "advice",
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
           lambda c: not signs.is_chosen_after(c), words=_likewise,
           tries=(_BOUNDED_RUN[name],))
      for name, bounded in _BOUNDED.items() if name not in _SMOOTHED),
    Rule("singular gradient, rounding", _names("eigh"), "advice",
         "put distinct numbers, far from the other eigenvalues, on the diagonal where a matrix is "
         "padded with 0, here in {rows}: one eps for all keeps them equal",
         lambda c: bool(_zero_rows(c)) and not is_covariance(c), words=_zero_rows),
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
    Rule("domain", _names("mul"), "exact",
         "take xlogy(p, q) instead of p * log(q): it is 0 where p is", becomes.is_product_with_log,
         rewrites=("p * log(q) -> xlogy(p, q)",)),
    Rule("domain", PRODUCTS | _names("exp mul"), "advice",
         "keep 0 out of {log}: leave that element out, such as by a range that begins at 1, or "
         "bound the argument by {x}.clamp(min=...): 0 * inf is NaN, in a gradient, too",
         lambda c: bool(becomes.words_of_log(c)), words=becomes.words_of_log),
    # Intended infinities.
    Rule("domain", _names("mul"), "exact",
         "put 0 where the mask is before this product, {c.masked}: 0 * -inf is NaN",
         lambda c: signs.is_masked_log(c) or signs.is_masked_value(c),
         rewrites=("a * b -> {c.without_infinity}",)),
    Rule("domain", _names("mul"), "exact",
         "mask after this product, not before it: 0 * -inf is NaN", signs.is_masked_score),
    Rule("domain", _names("mul"), "exact",
         "take masked_fill(mask, -inf) instead of a product with inf: 0 * inf is NaN",
         lambda c: c.reads_mask() and not (signs.is_masked_log(c) or signs.is_masked_score(c)
                                           or signs.is_masked_value(c) or becomes.words_of_log(c)),
         rewrites=(
             'a * b + (1 - b) * float("-inf") -> a.masked_fill(b != 1, float("-inf"))',
             'a + (1 - b) * float("-inf") -> a.masked_fill(b != 1, float("-inf"))',
             'a + b * float("-inf") -> a.masked_fill(b != 0, float("-inf"))')),
    Rule("domain", _names("add sub"), "exact",
         "join masks by where or a boolean or, not by addition: inf - inf is NaN",
         lambda c: c.reads_mask() and not signs.is_difference_of_masks(c)),
    Rule("domain", PRODUCTS | _REDUCED, "advice",
         "begin {logsumexp} with finite numbers, or leave a row out of which all is -inf: nothing "
         "in it is possible", lambda c: c.reads_mask() and bool(words_of_emptied(c)),
         words=words_of_emptied),
    Rule("domain", None, "advice",
         "{filled} behind {reduce}: it has put nothing into some rows, and the infinity that they "
         "began with is left", lambda c: bool(words_of_rows(c)), words=words_of_rows),
    Rule("domain", PRODUCTS | _REDUCED, "advice",
         "put 0 where the mask is before the {c.name}: masked_fill(mask, 0)",
         lambda c: c.reads_mask() and not words_of_emptied(c) and not words_of_rows(c)),
    Rule("domain", _names("kl_div"), "advice",
         "give {c.name} probabilities, log_p.exp() with log_target=False: it takes 0 * log(0) as 0 "
         "then; with log_target=True it computes 0 * -inf where a target is masked",
         signs.has_log_target),
    Rule("domain", _names("kl_div"), "advice",
         "compare both where both are possible, such as on the same top-k, normalised again, or "
         "leave every class a small probability: the input is -inf where the target is not, and "
         "the divergence infinite", signs.has_impossible_input, alone=True),
    Rule("domain", _names("logaddexp"), "advice",
         "begin with torch.finfo({c.torch_dtype}).min in place of -inf for what cannot be reached: "
         "{c.name} of -inf alone has no derivative", Case.reads_infinity),
    Rule("domain", _LOSSES, "advice",
         "see what makes {c.operand} +inf{c.made_at}: a score may be -inf on purpose, and +inf is "
         "no mask; x - log(n) is +inf where a count n is 0", Case.reads_plus_infinity),
    Rule("domain", _LOSSES, "advice",
         "smooth over the classes that the mask leaves: label_smoothing gives each class a share, "
         "those at -inf, too; or mask only where the program decodes", _is_smoothed),
    Rule("domain", _LOSSES, "advice",
         "leave out targets that the mask excludes: their probability is 0",
         lambda c: c.reads_infinity() and not (c.reads_plus_infinity() or _is_smoothed(c))),
    Rule("domain", _names("sub"), "advice",
         "take a number of your data's range for the infinities before the difference, such as "
         "{name}.clamp({bound}=...), or leave them out: inf - inf is NaN",
         lambda c: not c.reads_mask() and bool(words_of_infinities(c)), words=words_of_infinities),
    Rule("domain", None, "advice", "look at what made its operand infinite", Case.reads_infinity,
         last=True),
    Rule("masked row", _names("sub"), "advice",
         "mask with torch.finfo({c.torch_dtype}).min in place of -inf: -inf - (-inf) is NaN"),
    Rule("masked row", _names("logsumexp"), "advice",
         "{extend}: all {count} terms of a row are -inf{where}; or leave such rows out",
         has_impossible_row, words=words_of_row, alone=True),
    Rule("masked row", _names("logsumexp logcumsumexp"), "advice",
         "begin with torch.finfo({c.torch_dtype}).min in place of -inf for what cannot be reached: "
         "{c.name} of -inf alone has no derivative"),
    Rule("masked row", SOFTMAXES, "advice",
         "keep the largest entry of each row, whatever {mask} says: it is made of the scores that "
         "it hides, and hid all of a row",
         lambda c: filter_of(c) is not None, words=words_of_filter),
    Rule("masked row", SOFTMAXES, "advice",
         "mask with torch.finfo({c.torch_dtype}).min in place of -inf in {filled}, and put 0 where "
         "`{mask}` is behind {c.name}, by masked_fill({mask}, 0): no entry of such a row counts",
         lambda c: filter_of(c) is None and bool(words_of_masked(c)), words=words_of_masked),
    Rule("masked row", None, "advice",
         "drop the row in which everything is masked, or unmask one position of it",
         lambda c: filter_of(c) is None and c.name != "sub"),
    # Empty operands.
    Rule("empty", SPREADS, "advice",
         "take {c.name} of more than one element (if {c.x}.{c.size} > 1){last}; "
         "{c.name}(..., correction=0) makes 0", words=_last_batch,
         rewrites=("{c.name}(...) -> {c.name}(..., correction=0)",)),
    Rule("empty", LOSSES_OF_TARGETS, "advice",
         'skip the batch, or take reduction="sum" and divide by max(valid targets, 1)',
         rewrites=(
             'cross_entropy(a, b) -> cross_entropy(a, b, reduction="sum") / '
             '(b != -100).sum().clamp(min=1)',)),
    Rule("empty", None, "advice",
         "skip what is empty, or divide the sum by max(n, 1)", last=True),
    Rule("no alignment", None, "advice",
         "leave the input more frames, by less stride or pooling in front of it, as {share} "
         "samples have too few; take zero_infinity=True for the rest, which then have no gradient",
         lambda c: bool(words_of_short(c)), words=words_of_short, alone=True,
         rewrites=("ctc_loss(...) -> ctc_loss(..., zero_infinity=True)",)),
    Rule("no alignment", None, "advice",
         "drop samples with labels + repeats > frames before training, as a filter by labels alone "
         "keeps them; zero_infinity=True gives them no gradient",
         rewrites=("ctc_loss(...) -> ctc_loss(..., zero_infinity=True)",)),
    Rule("memory", None, "advice",
         "take zeros instead of {c.name}, or write all of it before it is read"),
)  # fmt: skip
