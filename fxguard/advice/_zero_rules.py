"""Rules for numbers that became 0, or negative, where the program can keep them from it.

Each comes before a bound on the argument, which hides what went wrong. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice import cancelled, lowered, signs, vanished, wrapped, zeros
from fxguard.advice._patterns import number_of
from fxguard.advice._rule import Rule, names_in
from fxguard.advice.case import Case
from fxguard.advice.coarse import is_coarse_difference, words_of_steps
from fxguard.advice.diagonals import is_of_diagonal, words_of_diagonal
from fxguard.advice.entries import is_entry_of_table, words_of_table
from fxguard.advice.exponents_of_zero import log_of_zero, words_of_log
from fxguard.advice.frequencies import frequencies, words_of_frequencies
from fxguard.advice.grids import words_of_grid
from fxguard.advice.limits import limit_of, words_of_limit
from fxguard.advice.one_maximum import differences_behind, one_maximum, words_of_maximum
from fxguard.advice.other_groups import (
    groups_without_maximum,
    other_groups,
    words_of_groups,
    words_of_other_groups,
)
from fxguard.advice.positive import made_at
from fxguard.advice.propensities import sigmoid_in_divisor, words_of_sigmoid
from fxguard.advice.pushed_apart import distances, words_of_distances
from fxguard.advice.quotients_of_exps import is_quotient_of_exps
from fxguard.advice.samplers import is_of_sampler
from fxguard.advice.scaled_vectors import is_factor_of_vectors, words_of_vectors
from fxguard.advice.scans import scan_behind, words_of_scan
from fxguard.advice.shares import rest_of_shares, words_of_shares
from fxguard.advice.vanished_powers import (
    far_beyond,
    vanished_power,
    words_of_far,
    words_of_power,
)
from fxguard.advice.vanished_squares import (
    free_of_scale,
    is_free_of,
    vanished_square,
    words_of_scale,
    words_of_square,
)
from fxguard.advice.written_operands import titled
from fxguard.advice.zero_factors import holds_zeros, words_of_factor, zero_factor
from fxguard.formats import FORMATS
from fxguard.graph.poles import plain
from fxguard.source.assigned import target_of
from fxguard.source.named import other_text
from fxguard.source.weighed import divergence_in

__all__ = ["ZERO_RULES"]

SQUARE_ROOTS = (
    "carry a Cholesky factor of the covariance (a square-root form); Joseph's form alone may turn "
    "negative in {}, too"
)
WITHOUT = "in a form without the difference, as the mean of (x - mean) ** 2 is for a variance"

_LOG = names_in("log log10 log2")
_POWERS = names_in("pow float_power")
_DIVISIONS = names_in("div reciprocal")
_ROOTS = names_in("rsqrt sqrt")
_LOST = "zero divisor, underflow"


def _recursion(case: Case) -> Mapping[str, str]:
    """The product that is repeated: what it assigns, and its line."""
    step = next(iter(zeros.repeated_products(case)), None)
    if step is None or step.source is None:
        return {"name": "it", "place": ""}
    name = target_of(step.source)
    return {"name": f"`{name}`" if name else "the product", "place": step.source.place}


def _divergence(case: Case) -> Mapping[str, str]:
    """The p and the q of a divergence that is written out."""
    source = case.around.step.source
    p, q = (None if source is None else divergence_in(source)) or ("p", "q")
    return {"p": p, "q": q}


def _is_divergence(case: Case) -> bool:
    source, culprit = case.around.step.source, case.around.culprit
    is_learned = culprit is not None and case.around.is_differentiated(culprit)
    return source is not None and not is_learned and divergence_in(source) is not None


def _is_recursion(case: Case) -> bool:
    return bool(zeros.repeated_products(case))


def _is_long_recursion(case: Case) -> bool:
    """No factor of it is 0 by itself."""
    return _is_recursion(case) and not holds_zeros(case)


def _is_log_of_counts(case: Case) -> bool:
    is_other = signs.is_count_of_mask(case) or zeros.is_weighed(case)
    return zeros.is_of_whole_numbers(case) and not is_other


def _are_features(case: Case) -> bool:
    """A layer reads them, or they are a table, as words of documents are."""
    is_table = case.evidence is not None and case.evidence.dims > 1
    return is_table or zeros.is_feature(case)


def _collapse(case: Case) -> Mapping[str, str]:
    """The variance that collapsed, and the line that made it."""
    found = zeros.spread_of_data(case)
    return {"name": case.variable, "place": "" if found is None else found.made_in}


def _is_collapse(case: Case) -> bool:
    return zeros.is_spread_of_data(case) and not case.loses_eps()


def _vanished(case: Case) -> Mapping[str, str]:
    """The exponential that made 0, of what, and how far down dtypes hold it."""
    step = vanished.vanished_exp(case)
    if step is None:
        return dict.fromkeys(("exp", "made", "dtype", "name", "lowest", "wide", "far"), "it")
    name, made = plain(step.kind), step.outputs[0]
    dtype, wide = case.around.values[made].dtype, _wider(case.around.values[made].dtype)
    return {
        "exp": titled(step),
        "number": f"{vanished.exponent_of(case, step):.4g}",
        "dtype": dtype,
        "name": name,
        "lowest": str(vanished.lowest_exponent(step, dtype)),
        "wide": wide,
        "far": str(vanished.lowest_exponent(step, wide)),
    }


def _forgotten(case: Case) -> str:
    """``hmm.py:34``: where an exponential became 0 so long ago that only its line is known."""
    source = None if zeros.share_of(case) else vanished.forgotten_exp(case)
    return "" if source is None else source.place


def _wider(dtype: str) -> str:
    return "float64" if dtype in ("float32", "float64") else "float32"


def _is_vanished(case: Case) -> bool:
    return vanished.vanished_exp(case) is not None and not zeros.share_of(case)


def _is_free_of_exp(case: Case) -> bool:
    """A quotient in which the exponentials that vanished may have any factor, as powers of them."""
    step = vanished.vanished_exp(case)
    if step is None or not _is_vanished(case) or vanished.is_mean_by_kernel(case):
        return False
    return is_free_of(case, step.outputs[0])


def _fits_wider(case: Case) -> bool:
    step = vanished.vanished_exp(case)
    if step is None or not _is_vanished(case):
        return False
    lowest = vanished.lowest_exponent(step, _wider(case.around.values[step.outputs[0]].dtype))
    return vanished.exponent_of(case, step) > lowest


def _cancelled(case: Case) -> Mapping[str, str]:
    """What cancelled where, and what would not."""
    found = cancelled.cancelled_state(case) or cancelled.cancelled_difference(case)
    if found is None:
        return dict.fromkeys(("name", "largest", "place", "wider", "instead", "floor"), "it")
    wider = "" if case.dtype == "float64" else f"compute it in {_wider(case.dtype)}, or "
    floor = FORMATS[case.dtype].eps * found.largest
    is_of_matrices = plain(found.step.kind) in cancelled.MATRIX_PRODUCTS
    return {
        "name": case.variable,
        "largest": f"{found.largest:.{4 if found.largest < 1e4 else 2}g}",
        "place": titled(found.step),
        "wider": wider,
        "instead": SQUARE_ROOTS.format(case.dtype) if is_of_matrices else WITHOUT,
        "floor": f"{floor:.0e}",
    }


def _magnitude(case: Case) -> Mapping[str, str]:
    """The integers whose magnitude is negative, and where it was taken."""
    found = wrapped.wrapped_magnitude(case) or wrapped.Wrapped("it", "")
    return {"integers": found.squared, "place": found.place}


def _terms(case: Case) -> str:
    """``0.7812 - 1``: the difference by a number that a negative base is; "" if it is none."""
    step = made_at(case.around, case.around.culprit)
    number = case.negative_operand
    is_difference = step is not None and plain(step.kind) in ("rsub", "sub")
    if number is None or step is None or not is_difference or number_of(step) is None:
        return ""
    other = step.literals[0]
    if plain(step.kind) == "rsub" or step.number_first:
        return f"{other:.4g} - {other - number:.4g}"
    return f"{number + other:.4g} - {other:.4g}"


def _is_of_number(case: Case) -> bool:
    is_other = signs.is_learned_exponent(case) or signs.is_root_of_powers(case)
    return bool(_terms(case)) and not is_other and cancelled.cancelled_state(case) is None


def _wrapped(case: Case) -> Mapping[str, str]:
    """The integers that were squared, and where."""
    found = wrapped.wrapped_square(case) or wrapped.Wrapped("it", "")
    return {"squared": found.squared, "place": found.place}


def _updated(case: Case) -> Mapping[str, str]:
    """The covariance that a Kalman filter updates, and where."""
    step = cancelled.covariance_update(case)
    source = None if step is None else step.source
    name = "" if source is None else target_of(source)
    return {"P": name or "P", "place": "" if source is None else f" ({source.place})"}


def _is_updated(case: Case) -> bool:
    return cancelled.covariance_update(case) is not None and not cancelled.cancelled_state(case)


def _is_schedule(case: Case) -> bool:
    is_other = signs.is_count_of_mask(case) or signs.divides_by_whole_numbers(case)
    is_other = is_other or next(differences_behind(case), None) is not None
    return is_entry_of_table(case) and not is_other and not zeros.is_spread_of_data(case)


def _lowered(case: Case) -> Mapping[str, str]:
    """Where a state is lowered."""
    source = lowered.lowered_at(case)
    return {"place": "" if source is None else source.place}


def _has_no_slope_at_zero(case: Case) -> bool:
    """A gradient flows through it, and at 0 its derivative is infinite."""
    exponents = case.around.step.literals if case.name in _POWERS else ()
    return case.is_differentiated() and not (exponents and min(exponents) >= 1)


def _is_only_a_difference(case: Case) -> bool:
    is_state = cancelled.cancelled_state(case) is not None
    is_other = signs.is_difference_with_square(case) or signs.is_root_of_powers(case)
    return not (is_state or is_other) and cancelled.cancelled_difference(case) is not None


def _sampled(case: Case) -> Mapping[str, str]:
    """What a program gives to ``log_prob``, which inverts the tanh of a distribution."""
    source = case.around.step.source
    return {"sample": "" if source is None else other_text(source.code, "log_prob")}


def _defined(case: Case) -> Mapping[str, str]:
    """What a divisor without a name is."""
    return {"defined": f", with{case.definition}" if case.definition else ""}


def _counted(case: Case) -> Mapping[str, str]:
    return {"count": signs.count_less_one(case)}


ZERO_RULES = (
    Rule("zero divisor, singular gradient", _LOG | _POWERS | _ROOTS | _DIVISIONS, "advice",
         "put 1 on the diagonal of {c.bare} before {c.name}, as by + {eye}: each meets "
         "itself there; and mask these terms behind it (a mask alone is too late: 0 * inf is NaN)",
         is_of_diagonal, words=words_of_diagonal),
    Rule(_LOST, _LOG | _DIVISIONS | {"rsqrt"}, "advice",
         "bound what {log} reads, {read}.clamp(min={eps}): it reads 0, makes -inf of it, and {exp} "
         "makes 0 of that", lambda c: log_of_zero(c) is not None, words=words_of_log, alone=True),
    Rule(_LOST + ", overflow", names_in("div"), "advice",
         "do not divide by the product of all decays, {product}: run the recurrence step by step, "
         "h = a * h + u, or sum exp(c_i - c_j) over j <= i, masked before exp, with c the cumsum "
         "of log a; an eps makes other states", lambda c: scan_behind(c) is not None,
         words=words_of_scan, alone=True),
    Rule(_LOST + ", rounding", names_in("div reciprocal"), "advice",
         "keep {p} away from 0 and 1 where {sigmoid} makes it, {p}.clamp(0.01, 0.99), as "
         "propensities are trimmed: it has rounded to {end}; an eps in the divisor leaves huge "
         "weights", lambda c: sigmoid_in_divisor(c) is not None, words=words_of_sigmoid,
         alone=True),
    Rule("domain", _LOG | _POWERS | _ROOTS, "advice",
         "keep the sum of the sigmoids below 1, as by softmax of them and a rest, or by one for "
         "their sum and one for how it is divided: each is below 1, and what they leave is "
         "negative, {rest}", lambda c: rest_of_shares(c) is not None, words=words_of_shares,
         alone=True),
    Rule(_LOST, names_in("div"), "advice",
         "take exp(a - b) in place of exp(a) / exp(b), with factors as logarithms inside: both "
         "became 0, and the quotient need not", is_quotient_of_exps),
    Rule("zero divisor", _DIVISIONS, "advice",
         "take the difference in {made} in float64 or of integers, or subtract a first value "
         "there, before it is {c.dtype}: that holds numbers of {largest} in steps of {steps}",
         is_coarse_difference, words=words_of_steps),
    Rule(_LOST, names_in("div"), "advice",
         "both sides are 0 where {name} is {at}: take the limit there, {limit}, by {how}; a safe "
         "divisor alone makes 0 of it", lambda c: limit_of(c) is not None, words=words_of_limit,
         alone=True),
    Rule("zero divisor", names_in("div"), "advice",
         "divide by {count} in place of {c.bare}, or by max({c.bare}, 1): one row has no unbiased "
         "variance; or leave out a batch of one row, as a DataLoader does with drop_last=True",
         lambda c: bool(signs.count_less_one(c)), words=_counted),
    Rule("zero divisor", names_in("div"), "advice",
         "keep {name} from becoming {end}, such as by a schedule that ends before it, or take the "
         "limit of the formula there: {c.bare} is 0",
         lambda c: bool(signs.words_of_scheduled(c)), words=signs.words_of_scheduled),
    Rule("zero divisor", names_in("div"), "advice",
         "look at what makes {c.bare} 0, a number of the program; if it counts, divide by "
         "max({c.bare}, 1)",
         lambda c: signs.divides_by_number(c) and not signs.count_less_one(c)
         and not signs.words_of_scheduled(c)),
    Rule(_LOST, _LOG, "advice",
         "bound what {distances} reads, too, as by {vectors}: of what it makes the {mean}, "
         "and this loss falls without end as the vectors move apart",
         lambda c: distances(c) is not None, words=words_of_distances),
    Rule(_LOST, _LOG | _DIVISIONS | {"rsqrt"}, "advice",
         "subtract the maximum of each {what} that is normalised{place}, {instead}, and not one of "
         "all: far below it exp makes 0 of a whole {what}, and with an eps it is still 0",
         lambda c: one_maximum(c) is not None, words=words_of_maximum),
    Rule(_LOST, _LOG | _DIVISIONS | {"rsqrt"}, "advice",
         "take the maximum{place} by {sum_by}, as the sum{sum_place}, not by {by}: that of others "
         "may be far above a whole sum, of which exp makes 0",
         lambda c: other_groups(c) is not None, words=words_of_other_groups, alone=True),
    Rule(_LOST, _DIVISIONS, "advice",
         "subtract the maximum of each group from what {exp} reads, by scatter_reduce(..., "
         '"amax"): the quotient stays the same, and exp made 0 of all of a group',
         lambda c: groups_without_maximum(c) is not None and one_maximum(c) is None,
         words=words_of_groups),
    Rule(_LOST, _LOG | _DIVISIONS | {"rsqrt"}, "advice",
         "look at the numbers that {power} reads, up to {largest}{origin}: of all of them it makes "
         "0, as of another unit or of outliers; a divisor that is guarded would leave nothing",
         lambda c: far_beyond(c) is not None, words=words_of_far),
    Rule(_LOST, _LOG | _DIVISIONS | {"rsqrt"}, "advice",
         "{power} made 0 of {number}: work in logs there, the exponent times log of the base (with "
         "logsumexp or softmax), as {dtype} holds numbers down to {smallest}",
         lambda c: vanished_power(c) is not None and far_beyond(c) is None, words=words_of_power),
    Rule(_LOST, names_in("div"), "advice",
         "divide by the largest first, {scaled}: the quotient stays the same, and {power} made 0 "
         "of {numbers} in {dtype}{logs}; a safe divisor makes a wrong number of it",
         lambda c: free_of_scale(c) is not None, words=words_of_scale, alone=True),
    Rule(_LOST, names_in("div"), "advice",
         "take softmax of what {exp} reads, in place of it: the quotient stays the same if all are "
         "divided by their sum, and {name} made 0 of {number}", _is_free_of_exp, words=_vanished,
         alone=True),
    Rule(_LOST, _LOG, "advice",
         "{power} made 0 of {numbers}: take {logarithm} in place of the log of the power, with "
         "logsumexp for a sum, as {dtype} holds those of numbers down to {root}",
         lambda c: vanished_square(c) is not None, words=words_of_square),
    Rule(_LOST, _DIVISIONS | {"rsqrt"}, "advice",
         "{power} made 0 of {numbers}: scale them before it{wider}, as {dtype} holds those of "
         "numbers down to {root}",
         lambda c: vanished_square(c) is not None and not signs.is_variance(c),
         words=words_of_square),
    Rule(_LOST, names_in("div"), "advice",
         "take softmax of what {exp} reads as weights, in place of it divided by its sum: it made "
         "0 of {number}", lambda c: _is_vanished(c) and vanished.is_mean_by_kernel(c),
         words=_vanished),
    Rule(_LOST, _LOG | _DIVISIONS, "advice",
         "work in logs from exp ({place}) on, with logsumexp in place of sums and + in place of "
         "products: it made 0 of numbers that are too low, and an eps only hides them",
         lambda c: _forgotten(c) != "", words=lambda c: {"place": _forgotten(c)}, alone=True),
    Rule(_LOST, _LOG | _DIVISIONS | {"rsqrt"}, "advice",
         "{exp} made 0 of {number}: work in logs there (logsumexp), as {dtype} holds {name} down "
         "to {name}({lowest})",
         lambda c: _is_vanished(c)
         and not (_is_long_recursion(c) or vanished.is_mean_by_kernel(c)),
         words=_vanished),
    Rule(_LOST, _LOG | _DIVISIONS | {"rsqrt"}, "advice",
         "compute in {wide} from {exp} on: it holds {name} down to {name}({far})", _fits_wider,
         words=_vanished),
    Rule("domain", _LOG | _POWERS | _ROOTS | {"log1p"}, "advice",
         "make {integers} floating-point numbers before abs, {integers}.float().abs() ({place}): "
         "abs of the smallest integer of a type is that negative integer itself",
         lambda c: wrapped.wrapped_magnitude(c) is not None, words=_magnitude),
    Rule("domain", _POWERS, "advice",
         "see why {c.operand} is {c.number}{c.made_at}, {terms}: keep what it is computed of "
         "within its range; a bound on the base only hides it",
         _is_of_number, words=lambda c: {"terms": _terms(c)}),
    Rule("domain", _LOG | _POWERS | _ROOTS, "advice",
         "square {squared} as floating-point numbers, {squared}.float() ({place}): its squares are "
         "integers too large for their type, and have wrapped around to negative ones",
         lambda c: wrapped.wrapped_square(c) is not None, words=_wrapped),
    Rule("domain, rounding", _LOG | _POWERS | _ROOTS, "advice",
         "update {P}{place} by Joseph's form, (I - K H) {P} (I - K H)^T + K R K^T, in float64: by "
         "roundings (I - K H) {P} is no covariance any more; a smaller first {P} loses less",
         _is_updated, words=_updated),
    Rule("domain, rounding", _LOG | _POWERS | _ROOTS, "advice",
         "{name} is what roundings of numbers up to {largest} leave in {place}: {wider}{instead}",
         lambda c: cancelled.cancelled_state(c) is not None, words=_cancelled),
    Rule("domain, rounding", _LOG | _POWERS | _ROOTS, "advice",
         "{name} is what roundings of numbers up to {largest} leave in {place}: {wider}in a form "
         "without the difference", _is_only_a_difference, words=_cancelled),
    Rule("domain, rounding", _LOG | _POWERS | _ROOTS, "advice",
         "bound it at the size of its roundings, {c.x}.clamp(min={floor})", _is_only_a_difference,
         words=_cancelled),
    Rule(_LOST + ", unknown", _DIVISIONS, "advice",
         "work with logarithms, logsumexp in place of the sum and log densities in place of exp: "
         "{c.dividend} is divided by its sum at every turn already, and all of it is 0",
         lambda c: _is_recursion(c) and zeros.is_by_own_sum(c)),
    Rule(_LOST + ", unknown", _LOG | _DIVISIONS, "advice",
         "normalise {name} at every turn ({place}), and add up the logs of its sums; or take "
         "logsumexp of logs there: a product of so many numbers is 0",
         lambda c: _is_long_recursion(c) and not zeros.is_by_own_sum(c),
         words=_recursion),
    Rule(_LOST + ", unknown", _LOG | _DIVISIONS, "advice",
         "{factor} is 0{place}, and so is {name} from there on: stop before that, or leave out "
         "where {name} is 0; its logarithm is -inf, too",
         lambda c: zero_factor(c) is not None and not zeros.is_by_own_sum(c),
         words=words_of_factor),
    Rule(_LOST, names_in("div"), "advice",
         "take softmax({z}.sum(dim), 0) in place of exp({bare}).prod(dim) divided by its sum: as "
         "logarithms they do not become 0",
         lambda c: zeros.share_of(c) == "prod of exp", words=zeros.exponents),
    Rule(_LOST, names_in("div"), "advice",
         "take softmax(log({bare}).sum(dim), 0) in place of {z}.prod(dim) divided by its sum: as "
         "logarithms they do not become 0",
         lambda c: zeros.share_of(c) in ("prod", "cumprod"), words=zeros.exponents),
    Rule(_LOST, names_in("div"), "advice",
         "normalise in logarithms, from the exponents on: subtract logsumexp along one dimension, "
         "then the other, and take exp last; all of a row or a column became 0",
         zeros.is_share_in_turn, alone=True),
    Rule(_LOST, names_in("div"), "advice",
         "take softmax({bare}, dim) in place of exp({bare}) divided by its sum: all "
         "of them became 0",
         lambda c: zeros.share_of(c) == "exp", words=zeros.exponents),
    Rule(_LOST, names_in("div"), "advice",
         "add logarithms, and take softmax of the sum, in place of products divided by their sum: "
         "all of them became 0", lambda c: zeros.share_of(c) == "mul"),
    Rule("zero divisor", names_in("div"), "advice",
         "take (c / {c.x}).clamp(max=1) in place of the smaller of {c.bare} and c, divided by "
         "{c.x}: where {c.bare} is 0 it is 1",
         lambda c: zeros.is_capped_ratio(c) and not zeros.is_weight_by_snr(c)),
    Rule("zero divisor", names_in("div"), "advice",
         "take (c / {c.x}).clamp(max=1), with the cap c: it is equal, and 1 where {c.bare} is 0; "
         "or, where the model predicts v, divide by ({c.x} + 1)", zeros.is_weight_by_snr),
    Rule("zero divisor", names_in("div"), "advice",
         "take atan2(a, b) in place of atan(a / b), likewise elsewhere on the line: they are equal "
         "for b above 0, and at 0 / 0 it is 0, and its gradient, too",
         lambda c: any(plain(each.kind) == "atan" for each in c.around.read_by), alone=True),
    Rule("zero divisor", _LOG | _DIVISIONS, "advice",
         "bound the error, {c.x}.clamp(min=1e-10): where two are equal it is 0, and its logarithm "
         "or reciprocal, as of a PSNR, infinite", zeros.is_error, alone=True),
    Rule(_LOST, _LOG | _DIVISIONS | _ROOTS, "advice",
         "add a floor in the line that makes {name}{place}, relative to the data, such as "
         "+ 1e-3 * data.var(0): a spread has collapsed to 0", _is_collapse, words=_collapse),
    Rule(_LOST, _LOG, "advice",
         "take the log of {c.x}.masked_fill({c.bare} == 0, 1): where {c.bare} is 0, so is what "
         "multiplies the log, and 0 * inf is NaN", zeros.is_weighed,
         rewrites=("{c.name}(a) -> {c.name}(a.masked_fill(a == 0, 1))",)),
    Rule("zero divisor", _LOG, "advice",
         "add 1 to the counts before they are divided by their sum{place}, as Laplace does: what "
         "was counted 0 times is rare, not impossible{bound}; an eps of {eps} makes {made} of it",
         lambda c: frequencies(c) is not None and not zeros.is_weighed(c),
         words=words_of_frequencies),
    Rule("zero divisor", _LOG, "advice",
         "of counts take log1p({c.bare}), or log({c.x}.clamp(min=1)): all of {c.bare} are whole "
         "numbers, and some are 0", lambda c: _is_log_of_counts(c) and _are_features(c),
         rewrites=("{c.name}(a) -> {c.name}(a.clamp(min=1))",)),
    Rule("zero divisor", _LOG, "advice",
         "drop the rows where {c.bare} is 0{c.share}, or take log({c.x}.clamp(min=1)): log1p would "
         "change the other rows, too",
         lambda c: _is_log_of_counts(c) and not _are_features(c),
         rewrites=("{c.name}(a) -> {c.name}(a.clamp(min=1))",)),
    Rule(_LOST, names_in("div"), "advice",
         "leave out where {c.dividend} is 0 before the division, by {c.dividend}[{c.dividend} > 0] "
         "or where: its logarithm is multiplied by {c.dividend}, and 0 * inf is NaN",
         zeros.is_ratio_in_divergence),
    Rule("zero divisor", _DIVISIONS, "advice",
         "begin {grid} above 0, or multiply by {point} what is divided by it, as of an equation: "
         "at {point} = 0 it has no value, and a where or an eps would give it a wrong one",
         lambda c: bool(words_of_grid(c)), words=words_of_grid),
    Rule("zero divisor", _DIVISIONS, "advice",
         "keep {table} away from 0 where it is made{place}, by clamp(min=1e-4), or leave out its "
         "entry that is 0: as two times that are equal, or the end of a schedule", _is_schedule,
         words=words_of_table),
    Rule("zero divisor", _DIVISIONS, "advice",
         "give what was counted 0 times the weight 0, by where({c.divisor} == 0, 0, ... / "
         "{c.divisor}.clamp(min=1)){defined}; a clamp alone gives it the largest",
         signs.weighs_by_counts, words=_defined, alone=True),
    Rule("zero divisor", _DIVISIONS, "advice",
         "take {c.counted}.clamp(min=1): it is whole numbers, as counts are, and some are 0",
         lambda c: signs.divides_by_whole_numbers(c) and not signs.is_count_of_mask(c)
         and not zeros.is_capped_ratio(c) and not zeros.is_ratio_in_divergence(c)),
    Rule(_LOST, _LOG, "advice",
         'take F.kl_div({q}, {p}, reduction="none") in place of {p} * ({p}.log() - {q})',
         _is_divergence, words=_divergence),
    Rule("zero divisor", names_in("div"), "advice",
         "bound the scale, {c.x}.clamp(min=1e-8): where all that is to be rounded is 0, as in a "
         "channel that was pruned, its largest magnitude is 0", zeros.is_scale_of_rounding),
    Rule("zero divisor", names_in("div"), "advice",
         "initialise this weight with numbers that are not 0, or leave the norm out (such as "
         "spectral_norm): it divides the weight by its own norm, which is 0",
         lambda c: zeros.is_weight_by_norm(c) and not zeros.is_scale_of_rounding(c)),
    Rule("zero divisor", names_in("div"), "advice",
         "take F.normalize({c.dividend}, dim=dim), or add an eps to the norm: a row is all zeros",
         lambda c: zeros.divides_by_own_norm(c) and not zeros.is_weight_by_norm(c)),
    Rule("zero divisor", names_in("div"), "advice",
         "add an eps to the norm, {c.x} + 1e-6: a norm is 0",
         lambda c: zeros.is_norm(c) and not zeros.divides_by_own_norm(c) and c.eps_has_gradient()
         and not is_factor_of_vectors(c)),
    Rule("zero divisor", names_in("div"), "advice",
         "{first}, or {second}: a norm is 0, and its factor infinite",
         lambda c: is_factor_of_vectors(c) and c.eps_has_gradient(), words=words_of_vectors),
    Rule("zero divisor", names_in("div"), "advice",
         "take F.cosine_similarity, which bounds the divisor, or {c.x}.clamp(min=1e-8): a vector "
         "is all zeros", lambda c: zeros.divides_by_two_norms(c) and c.eps_has_gradient()),
    Rule("zero divisor, rounding, domain", names_in("atanh"), "advice",
         "keep the samples as they were before tanh, and take their log_prob there; or bound what "
         "log_prob is given, {sample}.clamp(-1 + 5e-07, 1 - 5e-07): tanh has rounded them to 1",
         lambda c: bool(_sampled(c)["sample"]), words=_sampled),
    # Powers of numbers that may be negative.
    Rule("domain", _LOG | _POWERS | _ROOTS, "advice",
         "keep {c.x} from falling below 0 where it is lowered ({place}): take away no more than "
         "there is, by minimum, or clamp(min=0) what is left",
         lambda c: lowered.lowered_at(c) is not None and not _has_no_slope_at_zero(c),
         words=_lowered),
    Rule("domain", _LOG | _POWERS | _ROOTS, "advice",
         "keep {c.x} above 0 where it is lowered ({place}): multiply it by a share that stays, as "
         "exp(-what is taken / {c.x}), or clamp(min=1e-6) what is left: at 0 {c.name} has no "
         "derivative",
         lambda c: lowered.lowered_at(c) is not None and _has_no_slope_at_zero(c),
         words=_lowered),
    Rule("domain", _POWERS, "advice",
         "clamp what the first power reads, {c.base}.clamp(min=1e-6): a mean of powers may be "
         "negative, and has no root", signs.is_root_of_powers),
    Rule("domain", _POWERS, "advice",
         "clamp the base, {c.base}.clamp(min=1e-6), before the power: the gradient of its exponent "
         "is the log of the base",
         lambda c: signs.is_learned_exponent(c) and not signs.is_root_of_powers(c)),
    Rule("domain", _LOG | _POWERS | _ROOTS, "advice",
         "make positive what {c.layers} makes, by softplus or exp: {c.x} is computed of it, and a "
         "bound has no gradient",
         lambda c: signs.is_free_domain(c) and not c.is_of_layer() and c.is_of_layers()),
    # Log-space recursions.
    Rule("domain", names_in("sub"), "advice",
         "begin with torch.finfo({c.torch_dtype}).min in place of -inf: -inf - (-inf) is NaN",
         lambda c: signs.is_difference_of_masks(c) and not is_of_sampler(c)),
    # Sinkhorn's algorithm.
    Rule("overflow", names_in("exp"), "advice",
         "normalise in logarithms: subtract logsumexp along one dimension, then the other, and "
         "take exp last; a maximum alone leaves rows of 0", zeros.is_normalized_in_turn),
    Rule("overflow", names_in("exp"), "advice",
         "make cosines of the scores before they are divided: F.normalize both factors",
         zeros.is_normalized_in_turn),
)  # fmt: skip
