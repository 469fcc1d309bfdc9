"""Signs for the rules for fixes: what an operand is, and what a result is used for.

Knows nothing of torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from fxguard.advice import becomes
from fxguard.advice._expressions import is_difference_of_squares
from fxguard.advice._patterns import is_square_of, made_by, minus_one_of, one_plus_of
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.entries import is_entry_of_table
from fxguard.advice.surroundings import CREATES, is_passed, is_scaling, names_of
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, ENTRIES, MOVES
from fxguard.plan.plan import Step
from fxguard.records import Role
from fxguard.source.assigned import statement_at

__all__ = [
    "choice_after",
    "count_less_one",
    "divides_by_number",
    "divides_by_whole_numbers",
    "has_impossible_input",
    "has_log_target",
    "is_by_weight_in_half",
    "is_chosen_after",
    "is_count_less_one",
    "is_count_of_mask",
    "is_deviation_by_squares",
    "is_difference",
    "is_difference_of_masks",
    "is_difference_with_square",
    "is_free_domain",
    "is_free_exponent",
    "is_learned_exponent",
    "is_masked_log",
    "is_masked_score",
    "is_masked_value",
    "is_missing_data",
    "is_near_limit",
    "is_negative_data",
    "is_of_squares",
    "is_of_weight",
    "is_root_by_hand",
    "is_root_of_powers",
    "is_square",
    "is_variance",
    "missing_count",
    "norm_follows",
    "only_norm_follows",
    "weighs_by_counts",
    "words_of_scheduled",
]

# These put together what is counted; the operand that is counted is their last one.
_COUNTS = ("bincount", "index_add", "scatter_add", "scatter_reduce", "sum")

# Their results may be whole numbers by chance.
_NO_COUNTS = frozenset(
    [
        *("abs", "amax", "div", "linalg_norm", "linalg_vector_norm", "max", "norm", "pow"),
        *("sqrt", "std", "sub", "var", "vector_norm"),
    ]
)

_FROM_END = re.compile(r"(\d+(?:\.\d*)?) - ([a-z_][\w.]*)")
_LESS_ONE = re.compile(r"(.+) - 1")  # of a count

WRITES = ("fill_", "masked_fill", "masked_fill_", "scatter", "scatter_", "setitem")
MOST_STEPS = 8  # from an operand back to the data
FILLED = names_in("contiguous float getitem nan_to_num select to view where")  # data is still data

_LOGARITHMS = ("log", "log_softmax", "logsumexp")  # they make logarithms of probabilities

# What the result is used for.


def is_chosen_after(case: Case) -> bool:
    """A ``where`` or a mask leaves out some of its elements."""
    return choice_after(case) is not None


def choice_after(case: Case) -> Step | None:
    """That operation; the result may have been scaled by numbers before."""
    choices = ("where", "masked_fill", "masked_fill_")
    read_by = case.around.ahead(
        [case.around.made], lambda step: is_passed(step) or is_scaling(step)
    )
    return next((step for step in read_by if step.kind in choices), None)


# What the operand in question is.


def is_masked_log(case: Case) -> bool:
    """Its infinite operand is a logarithm of probabilities of which some are masked."""
    behind = case.around.behind_all_of(case.infinite_operands())
    # By hand: x - logsumexp(x), x - exp(x).sum().log().
    behind += case.around.behind_all(step for step in behind if step.kind == "sub")
    return case.reads_mask() and not names_of(behind).isdisjoint(_LOGARITHMS)


def has_log_target(case: Case) -> bool:
    """Its targets are logarithms, of which one is -inf: the program says ``log_target=True``."""
    source = case.around.step.source
    says = source is not None and "log_target=True" in statement_at(source).replace(" ", "")
    return says and len(case.operands) > 1 and case.operands[1].low == -math.inf


def has_impossible_input(case: Case) -> bool:
    """Its input, not its target, holds -inf: the divergence from what is impossible is infinite."""
    are_masked = [each.low == -math.inf for each in case.operands[:2]]
    return are_masked == [True, False]


def is_masked_score(case: Case) -> bool:
    """Its infinite operand is an activation that was masked before."""
    around = case.around
    masked = [value for value in case.infinite_operands() if around.is_masked(value)]
    return any(not around.is_given(value) for value in masked) and any(
        not around.is_given(value)
        for step in around.behind_all_of(masked)
        if step.infinite_literal
        for value in step.inputs[:1]
        if around.behind(value)
    )


def is_masked_value(case: Case) -> bool:
    """Its infinite operand holds numbers of which some are masked, and none of them is 0."""
    found = map(case.around.range_of, case.infinite_operands())
    holds_numbers = any(each is not None and 0 < each.abs_min < math.inf for each in found)
    return case.reads_mask() and holds_numbers and not is_masked_score(case)


def is_count_of_mask(case: Case) -> bool:
    """It is a sum of what was given, such as a mask, or of ones."""
    if case.operands and case.operands[-1].dtype.startswith(("int", "uint")):
        return True
    sums = [step for step in case.around.culprit_made_by if plain(step.kind) in _COUNTS]
    counted = [value for step in sums for value in step.inputs[-1:]]
    # x / x.sum() is not a mean over a mask.
    read = case.around.step.inputs
    return any(
        (case.around.is_given(value) or _is_filled(case, value)) and value not in read
        for value in counted
    )


def _is_filled(case: Case, value: int) -> bool:
    """A constant tensor into which the program has written ones: ``m = zeros(n); m[i] = 1``."""
    for _ in range(MOST_STEPS):
        step = case.around.maker_of(value)
        if step is None or plain(step.kind) in CREATES:
            return step is not None
        is_one = step.kind in WRITES and step.literals[-1:] == (1.0,) and len(step.inputs) == 1
        if not (is_one or step.kind in CASTS) or not step.inputs:
            return False
        value = step.inputs[0]
    return False


def divides_by_number(case: Case) -> bool:
    """Its divisor is a number of the program, which is 0."""
    is_number = len(case.operands) == 2 and not case.operands[1].dtype and case.operands[1].low == 0
    return case.name == "div" and is_number and not case.around.step.number_first


def words_of_scheduled(case: Case) -> Mapping[str, str]:
    """``{"name": "power", "end": "2.0"}`` where that number is ``2.0 - power``; {} elsewhere."""
    found = _FROM_END.fullmatch(case.bare) if divides_by_number(case) else None
    return {} if found is None else {"end": found[1], "name": found[2]}


def count_less_one(case: Case) -> str:
    """The count if the same is one less, as for an unbiased variance: ``len(x)``; else ""."""
    found = _LESS_ONE.fullmatch(case.bare) if divides_by_number(case) else None
    return "" if found is None else found[1]


def is_count_less_one(case: Case) -> bool:
    """Its divisor is a count less one, ``mask.sum() - 1``, which is 0 for a group of one."""
    if not (is_count_of_mask(case) or _divides_by_whole_zero(case)):
        return False
    maker = made_by(case.around, case.around.culprit)
    if maker is not None:
        return minus_one_of(maker) is not None
    # Integers are in no graph.
    texts = [case.bare, *(source.code.partition("=")[2].strip() for _, source in case.assignments)]
    return any(_LESS_ONE.fullmatch(text) for text in texts)


def is_of_squares(case: Case) -> bool:
    """What is divided is a sum of squares, as for a variance; or a root is taken of the result."""
    around = case.around
    behind = [] if not around.step.inputs else around.behind(around.step.inputs[0])
    sums = [step for step in behind if plain(step.kind) in (*_COUNTS, "mean")]
    inner = [each for step in sums for value in step.inputs for each in around.behind(value)]
    # A mask may be multiplied with the squares.
    products = [step for step in inner if plain(step.kind) == "mul"]
    inner += [each for step in products for v in step.inputs for each in around.behind(v)]
    is_rooted = any(plain(step.kind) in ("sqrt", "rsqrt") for step in around.read_by)
    return is_rooted or any(is_square_of(step) is not None for step in (*behind, *inner))


def divides_by_whole_numbers(case: Case) -> bool:
    """Its divisor is whole numbers, some of them 0, and no gradient flows there."""
    maker = made_by(case.around, case.around.culprit)
    is_by_chance = maker is not None and plain(maker.kind) in _NO_COUNTS
    return not is_by_chance and _divides_by_whole_zero(case)


def weighs_by_counts(case: Case) -> bool:
    """It divides a number by one count for each class, as for weights of a loss."""
    is_vector = case.evidence is not None and case.evidence.dims == 1
    is_by = case.around.step.number_first or case.name == "reciprocal"
    return is_vector and is_by and divides_by_whole_numbers(case)


def _divides_by_whole_zero(case: Case) -> bool:
    tensors = [each for each in case.operands if each.dtype]
    culprit = case.around.culprit
    is_learned = culprit is not None and case.around.is_differentiated(culprit)
    return bool(tensors) and tensors[-1].is_whole and tensors[-1].low == 0 and not is_learned


def is_variance(case: Case) -> bool:
    """It is a variance, or a mean of squares."""
    step = made_by(case.around, case.around.culprit)
    if step is None or plain(step.kind) in ("std", "var"):
        return step is not None
    is_mean = plain(step.kind) == "mean"
    return is_mean and is_square_of(made_by(case.around, step.inputs[0])) is not None


def is_difference_with_square(case: Case) -> bool:
    """It is ``sq - mean ** 2`` of two averages, and not ``r ** 2 - x ** 2``."""
    step = made_by(case.around, case.around.culprit)
    return _is_less_square(case, step) and not is_difference_of_squares(case)


def is_deviation_by_squares(case: Case) -> bool:
    """It is divided by ``(sq - mean ** 2).sqrt()`` of two averages."""
    root = made_by(case.around, case.around.culprit)
    if root is None or plain(root.kind) != "sqrt":
        return False
    return _is_less_square(case, made_by(case.around, root.inputs[0]))


def _is_less_square(case: Case, step: Step | None) -> bool:
    if step is None or plain(step.kind) != "sub" or len(set(step.inputs)) != 2:
        return False
    first, second = (made_by(case.around, value) for value in step.inputs)
    return is_square_of(first) is None and is_square_of(second) is not None


def is_negative_data(case: Case) -> bool:
    """``log1p`` is taken of data that a model was given, perhaps with its gaps filled."""
    around, value = case.around, case.around.culprit
    for _ in range(MOST_STEPS):
        if value is None:
            return False
        step = around.maker_of(value)
        if step is None:
            return case.name == "log1p" and around.values[value].role is Role.INPUT
        if plain(step.kind) in ENTRIES:
            return case.name == "log1p"
        if not step.inputs or (step.counts and plain(step.kind) not in FILLED):
            return False
        value = step.inputs[0]
    return False


def is_missing_data(case: Case) -> bool:
    """The same of counts, of which -1 is none."""
    tensors = [each for each in case.operands if each.dtype]
    return is_negative_data(case) and bool(tensors) and tensors[0].is_whole


def missing_count(case: Case) -> int | None:
    """The y of ``lgamma(y + 1)`` where it is -1, and counts that were given; None elsewhere."""
    one_more = made_by(case.around, case.around.culprit)
    value = one_plus_of(one_more)
    tensors = [each for each in case.operands if each.dtype]
    is_given = value is not None and case.around.is_given(value)
    is_pole = bool(tensors) and tensors[0].is_whole and tensors[0].low == 0
    is_learned = value is not None and case.around.is_learned(value)
    return value if is_given and is_pole and not is_learned else None


def is_inverted_spread(case: Case) -> bool:
    """It is a deviation, and minus its logarithm is taken: that of a scale 1 / deviation."""
    step = made_by(case.around, case.around.culprit)
    is_spread = step is not None and plain(step.kind) in ("std", "var")
    return is_spread and any(plain(step.kind) == "neg" for step in case.around.read_by)


def is_difference(case: Case) -> bool:
    """It is a difference of two tensors."""
    step = made_by(case.around, case.around.culprit)
    return step is not None and plain(step.kind) == "sub" and len(set(step.inputs)) == 2


def is_free_domain(case: Case) -> bool:
    """It is finite, and what is computed may as well be positive, which a difference may not."""
    step = made_by(case.around, case.around.culprit)
    is_difference = step is not None and plain(step.kind) in ("rsub", "sub")
    if is_difference and case.name not in ("log", "log10", "log2", "rsqrt"):
        return False
    return not (case.reads_infinity() or is_difference_with_square(case))


def is_root_of_powers(case: Case) -> bool:
    """Its base is a mean of powers: ``x.pow(p).mean(-1).pow(1 / p)``."""
    step = made_by(case.around, case.around.culprit)
    if step is None or plain(step.kind) not in ("mean", "sum", "avg_pool2d", "adaptive_avg_pool2d"):
        return False
    inner = made_by(case.around, step.inputs[0])
    is_square = is_square_of(inner) is not None
    return inner is not None and plain(inner.kind) in ("float_power", "pow") and not is_square


def is_learned_exponent(case: Case) -> bool:
    """Its exponent is computed of a weight."""
    inputs = case.around.step.inputs
    if len(inputs) != 2 or case.around.step.literals:
        return False
    behind = {inputs[1], *(each for s in case.around.behind(inputs[1]) for each in s.inputs)}
    return any(case.around.values[each].role is Role.WEIGHT for each in behind)


def is_difference_of_masks(case: Case) -> bool:
    """It subtracts -inf from -inf, both of which began as numbers of the program."""
    are_infinite = [each.low == -math.inf for each in case.operands]
    return len(case.operands) == 2 and all(are_infinite) and case.reads_mask()


def is_root_by_hand(case: Case) -> bool:
    """It divides by a square root, whose derivative at 0 is infinite."""
    step = made_by(case.around, case.around.culprit)
    is_root = step is not None and plain(step.kind) == "sqrt"
    return is_root and not is_entry_of_table(case)


def is_of_weight(case: Case) -> bool:
    """It is a weight, possibly cast or with its sign changed."""
    value = case.around.culprit
    while value is not None and (step := case.around.maker_of(value)) is not None:
        is_passed = step.kind in CASTS | MOVES or plain(step.kind) == "neg"
        value = step.inputs[0] if is_passed and step.inputs else None
    return value is not None and case.around.values[value].role is Role.WEIGHT


# What the operation does, and what its result is used for.


def is_square(case: Case) -> bool:
    """It squares."""
    return is_square_of(case.around.step) is not None


def is_by_weight_in_half(case: Case) -> bool:
    """It computes in 16 bits on a weight."""
    return case.is_half() and is_of_weight(case)


def is_free_exponent(case: Case) -> bool:
    """It is an exponential of an activation that no sum or logarithm takes back."""
    taken_back = (
        becomes.is_logged,
        becomes.is_normalized,
        becomes.is_softplus,
        becomes.is_sigmoid_by_hand,
        becomes.is_tanh_by_hand,
        becomes.divides_by_one_plus,
    )
    return not is_by_weight_in_half(case) and not any(sign(case) for sign in taken_back)


def is_near_limit(case: Case) -> bool:
    """It computes in the dtype with the near limit, and does not square."""
    return case.dtype == "float16" and not is_square(case)


def norm_follows(case: Case) -> bool:
    """A norm removes any scale of its result, and the dtype's limit is near."""
    return case.dtype == "float16" and case.around.norm_ahead() is not None


def only_norm_follows(case: Case) -> bool:
    """The same, and no residual stream passes the norm for others to add to."""
    return norm_follows(case) and len(case.around.sums_ahead()) < 2
