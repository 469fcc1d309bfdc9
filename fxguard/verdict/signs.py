"""Signs for the rules for fixes: what an operand is, and what a result is used for.

Knows nothing of torch.
"""

from __future__ import annotations

from fxguard.graph.poles import PRODUCTS, plain
from fxguard.records import Role
from fxguard.verdict.case import Case
from fxguard.verdict.surroundings import is_passed, names_of

__all__ = [
    "adds_exponentials",
    "is_by_hand_sigmoid",
    "is_by_weight_in_half",
    "is_chosen_after",
    "is_count_of_mask",
    "is_difference_of_squares",
    "is_exp_minus_one",
    "is_free_exponent",
    "is_logged",
    "is_masked_log",
    "is_masked_score",
    "is_near_limit",
    "is_normalized",
    "is_of_sigmoid",
    "is_of_softmax",
    "is_of_tanh",
    "is_of_weight",
    "is_one_minus_exp",
    "is_one_minus_sigmoid",
    "is_one_minus_tanh_squared",
    "is_one_plus",
    "is_ratio_of_exp",
    "is_ratio_of_softmaxes",
    "is_scaled_after",
    "is_softplus",
    "is_square",
    "is_sum_of_exp",
    "is_taken_from_one",
    "is_weighted",
    "norm_follows",
]

_SQUARES = ("mul", "pow", "square")
_SUMMED = ("add", "div", "mean", "sum")

# What the result is used for.


def is_chosen_after(case: Case) -> bool:
    """A ``where`` or a mask leaves out some of its elements."""
    choices = ("where", "masked_fill", "masked_fill_")
    return any(step.kind in choices for step in case.around.read_by)


# What the operand in question is.


def is_of_softmax(case: Case) -> bool:
    """A softmax made it."""
    return "softmax" in names_of(case.around.culprit_made_by)


def is_of_sigmoid(case: Case) -> bool:
    """A sigmoid made it."""
    return "sigmoid" in names_of(case.around.culprit_made_by) and not is_taken_from_one(case)


def is_one_minus_sigmoid(case: Case) -> bool:
    """It is 1 - sigmoid(x), or log1p's -sigmoid(x)."""
    return "sigmoid" in names_of(case.around.culprit_made_by) and is_taken_from_one(case)


def is_taken_from_one(case: Case) -> bool:
    """It is 1 - p, or log1p's -p."""
    if case.name == "log1p":
        return "neg" in names_of(case.around.culprit_made_by)
    return _is_by_one(case, "sub", "rsub")


def is_exp_minus_one(case: Case) -> bool:
    """It is exp(x) - 1."""
    return "exp" in names_of(case.around.culprit_made_by) and _is_by_one(case, "sub")


def is_one_plus(case: Case) -> bool:
    """It is 1 + x."""
    return _is_by_one(case, "add")


def _is_by_one(case: Case, *names: str) -> bool:
    made_by = case.around.culprit_made_by
    return any(plain(step.kind) in names and 1 in step.literals for step in made_by)


def is_one_minus_exp(case: Case) -> bool:
    """It is 1 - exp(x), or log1p's -exp(x)."""
    return "exp" in names_of(case.around.culprit_made_by) and is_taken_from_one(case)


def is_one_minus_tanh_squared(case: Case) -> bool:
    """It is 1 - tanh(x)²: the change of a density under tanh."""
    squares = [s for s in case.around.culprit_made_by if plain(s.kind) in _SQUARES]
    return is_taken_from_one(case) and "tanh" in names_of(case.around.behind_all(squares))


def is_of_tanh(case: Case) -> bool:
    """A tanh made it."""
    return "tanh" in names_of(case.around.culprit_made_by)


def is_ratio_of_exp(case: Case) -> bool:
    """It is an exponential divided by a sum of them."""
    ratios = [step for step in case.around.culprit_made_by if plain(step.kind) == "div"]
    above = [step.inputs[0] for step in ratios if step.inputs]  # integers are not measured
    return any("exp" in names_of(case.around.behind(value)) for value in above)


def is_sum_of_exp(case: Case) -> bool:
    """It is a sum or mean of exponentials, possibly weighted."""
    made_by = case.around.culprit_made_by
    sums = [step for step in made_by if plain(step.kind) in {"mean", "sum"} | PRODUCTS]
    behind = case.around.behind_all(sums)
    weighted = [step for step in behind if plain(step.kind) == "mul"]
    return "exp" in names_of((*behind, *case.around.behind_all(weighted)))


def is_difference_of_squares(case: Case) -> bool:
    """It is E[x²] - E[x]²."""
    for step in case.around.culprit_made_by:
        if plain(step.kind) == "sub" and len(set(step.inputs)) == 2:
            sides = [names_of(case.around.behind(value)) for value in step.inputs]
            if all(side & {*_SQUARES, "mean"} for side in sides):
                return True
    return False


def is_masked_log(case: Case) -> bool:
    """Its infinite operand is a logarithm of probabilities of which some are masked."""
    behind = case.around.behind_all_of(case.infinite_operands())
    return case.reads_mask() and not names_of(behind).isdisjoint(("log", "log_softmax"))


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


def is_count_of_mask(case: Case) -> bool:
    """It is the sum of a mask."""
    operands = () if case.evidence is None else case.evidence.operands
    if operands and operands[-1].dtype.startswith(("int", "uint")):
        return True
    sums = [step for step in case.around.culprit_made_by if plain(step.kind) == "sum"]
    counted = [value for step in sums for value in step.inputs]
    # x / x.sum() is not a mean over a mask.
    read = case.around.step.inputs
    return any(case.around.is_given(value) and value not in read for value in counted)


def is_of_weight(case: Case) -> bool:
    """It is a weight, possibly cast or with its sign changed."""
    culprit = case.around.culprit
    values = case.around.values
    passed = filter(is_passed, case.around.culprit_made_by)
    made_by = [value for step in passed for value in step.inputs]
    roots = made_by if culprit is None else [culprit, *made_by]
    return any(values[value].role is Role.WEIGHT for value in roots)


# What the operation does, and what its result is used for.


def is_square(case: Case) -> bool:
    """It squares."""
    step = case.around.step
    is_power = case.name == "pow" and 2 in step.literals
    is_product = case.name == "mul" and len(set(step.inputs)) == 1 and not step.literals
    return is_power or is_product or case.name == "square"


def is_by_weight_in_half(case: Case) -> bool:
    """It computes in 16 bits on a weight."""
    return case.is_half() and is_of_weight(case)


def is_free_exponent(case: Case) -> bool:
    """It is an exponential of an activation that no sum or logarithm takes back."""
    taken_back = (is_logged, is_normalized, is_softplus, is_by_hand_sigmoid)
    return not is_by_weight_in_half(case) and not any(sign(case) for sign in taken_back)


def adds_exponentials(case: Case) -> bool:
    """It sums exponentials."""
    behind = [s for value in case.around.step.inputs for s in case.around.behind(value)]
    further = [step for step in behind if plain(step.kind) in ("add", "mul")]
    return "exp" in names_of((*behind, *case.around.behind_all(further)))


def is_weighted(case: Case) -> bool:
    """Its result is multiplied by its own operand: p * log(p)."""
    culprit = case.around.culprit
    made_by = [value for s in case.around.culprit_made_by for value in s.inputs]
    roots = {*made_by, *(() if culprit is None else (culprit,))}
    products = (step for step in case.around.read_by if plain(step.kind) == "mul")
    return any(roots.intersection(step.inputs) for step in products)


def is_ratio_of_softmaxes(case: Case) -> bool:
    """It divides by a softmax, and the logarithm of the result is taken."""
    return is_of_softmax(case) and "log" in names_of(case.around.read_by)


def is_softplus(case: Case) -> bool:
    """The logarithm of 1 + its result is taken."""
    read_by = case.around.read_by
    adds_one = any(plain(s.kind) == "add" and 1 in s.literals for s in read_by)
    return "log1p" in names_of(read_by) or (adds_one and "log" in names_of(read_by))


def is_by_hand_sigmoid(case: Case) -> bool:
    """Its result is divided by 1 + the same."""
    return any(
        plain(step.kind) == "div"
        and any(
            plain(s.kind) == "add" and 1 in s.literals for s in case.around.behind(step.inputs[-1])
        )
        for step in case.around.read_by
    )


def is_scaled_after(case: Case) -> bool:
    """Its result is made smaller by a number."""
    return any(map(case.is_scale, case.around.read_by))


def is_logged(case: Case) -> bool:
    """The logarithm of a sum or a ratio of its results is taken."""
    if is_softplus(case):
        return False
    steps = case.around.read_by
    for _ in range(2):
        steps += case.around.ahead_all(s for s in steps if plain(s.kind) in _SUMMED)
    return not names_of(steps).isdisjoint(("log", "log2", "log10"))


def is_normalized(case: Case) -> bool:
    """Its results are only divided by their sum."""
    if is_logged(case):
        return False
    read_by = case.around.read_by
    sums = [step for step in read_by if plain(step.kind) in ("mean", "sum")]
    return "div" in names_of(case.around.ahead_all(sums))


def is_near_limit(case: Case) -> bool:
    """It computes in the dtype with the near limit, and does not square."""
    return case.dtype == "float16" and not is_square(case)


def norm_follows(case: Case) -> bool:
    """A norm removes any scale of its result, and the dtype's limit is near."""
    return case.dtype == "float16" and case.around.norm_ahead() is not None


def only_norm_follows(case: Case) -> bool:
    """The same, and no residual stream passes the norm for others to add to."""
    return norm_follows(case) and len(case.around.sums_ahead()) < 2
