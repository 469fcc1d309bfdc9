"""What exactly the operand of a blamed logarithm or quotient is, for rules that rewrite it.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable

from fxguard.advice._patterns import (
    are_equal,
    factors_of,
    is_made_by,
    is_square_of,
    made_by,
    minus_one_of,
    one_minus_of,
    one_plus_of,
    terms_of,
)
from fxguard.advice.case import Case
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step

__all__ = [
    "is_difference_of_squares",
    "is_exp_minus_one",
    "is_log_of_one_plus",
    "is_log_of_product_with_exp",
    "is_log_of_products",
    "is_of",
    "is_of_running_product",
    "is_one_minus",
    "is_one_minus_returned",
    "is_one_minus_tanh_squared",
    "is_ratio_of_exp",
    "is_ratio_of_exps",
    "is_ratio_of_same_exp",
    "is_sigmoid_by_hand",
    "is_sum_of_densities",
    "is_sum_of_exp",
    "is_sum_of_exps",
    "is_weighted_sum_of_exp",
]

MOST_FACTORS = 16  # that are looked at


def _maker(case: Case) -> Step | None:
    """The operation that made the operand in question; for ``log1p``, that of 1 + its operand."""
    return made_by(case.around, case.around.culprit)


def _is(case: Case, value: int | None, name: str) -> bool:
    return is_made_by(case.around, value, name)


def _one_minus(case: Case) -> int | None:
    """The p of log(1 - p), or of log1p(-p)."""
    step = _maker(case)
    if case.name != "log1p":
        return one_minus_of(step)
    return step.inputs[0] if step is not None and plain(step.kind) == "neg" else None


# Logarithms and quotients: what the operand is.


def is_of(name: str) -> Callable[[Case], bool]:
    """It is the result of one operation."""
    return lambda case: case.name != "log1p" and _is(case, case.around.culprit, name)


def is_of_running_product(case: Case) -> bool:
    """It is the result of ``cumprod``, perhaps behind the 1 that it begins with."""
    step = _maker(case)
    if step is not None and plain(step.kind) in ("cat", "concat", "concatenate", "hstack"):
        made = [each for each in step.inputs if not _is_one(case, each)]
        step = made_by(case.around, made[0]) if len(made) == 1 else None
    return case.name != "log1p" and step is not None and plain(step.kind) == "cumprod"


def _is_one(case: Case, value: int) -> bool:
    found = case.around.range_of(value)
    return found is not None and found.abs_min == found.abs_max == 1


def is_one_minus(name: str) -> Callable[[Case], bool]:
    """It is 1 - the result of one operation."""
    return lambda case: _is(case, _one_minus(case), name)


def is_one_minus_returned(case: Case) -> bool:
    """It is 1 - what a model returned to a loss."""
    value = _one_minus(case)
    if value is None or made_by(case.around, value) is not None:
        return False
    return case.around.is_differentiated(value)


def is_one_minus_tanh_squared(case: Case) -> bool:
    """It is 1 - tanh(x)²: the change of a density under tanh."""
    square = is_square_of(made_by(case.around, _one_minus(case)))
    return _is(case, square, "tanh")


def is_log_of_one_plus(case: Case) -> bool:
    """It is log(1 + x)."""
    step = _maker(case)
    if step is None or plain(step.kind) != "log":
        return False
    return one_plus_of(made_by(case.around, step.inputs[0])) is not None


def is_exp_minus_one(case: Case) -> bool:
    """It is exp(x) - 1."""
    return _is(case, minus_one_of(_maker(case)), "exp")


def _ratio(case: Case) -> tuple[int, int] | None:
    """The numerator and the denominator of what the logarithm is taken of."""
    step = _maker(case)
    is_ratio = step is not None and plain(step.kind) == "div" and len(step.inputs) == 2
    return (step.inputs[0], step.inputs[1]) if is_ratio and step is not None else None


def is_ratio_of_exp(case: Case) -> bool:
    """It is exp(a) / b, of a tensor or a number."""
    step, ratio = _maker(case), _ratio(case)
    if step is not None and plain(step.kind) == "div" and not step.number_first:
        is_by_number = len(step.inputs) == 1 and bool(step.literals)
        return (is_by_number or ratio is not None) and _is(case, step.inputs[0], "exp")
    return False


def is_sigmoid_by_hand(case: Case) -> bool:
    """It is 1 / (1 + exp(-x)), or 1 minus that."""
    value = _one_minus(case)
    makers = [_maker(case), None if value is None else made_by(case.around, value)]
    return any(_is_reciprocal_of_one_plus_exp(case, step) for step in makers)


def _is_reciprocal_of_one_plus_exp(case: Case, step: Step | None) -> bool:
    if step is None or not step.inputs:
        return False
    is_by_number = plain(step.kind) == "div" and (step.number_first or len(step.inputs) == 1)
    if plain(step.kind) != "reciprocal" and not (is_by_number and step.literals == (1,)):
        return False
    inner = one_plus_of(made_by(case.around, step.inputs[0]))
    return inner is not None and _is(case, inner, "exp")


def is_ratio_of_exps(case: Case) -> bool:
    """It is exp(a) divided by a sum of exponentials."""
    ratio = _ratio(case)
    if ratio is None or not is_ratio_of_exp(case):
        return False
    terms = terms_of(case.around, made_by(case.around, ratio[1]))
    return bool(terms) and all(_is_exp_or_sum(case, term) for term in terms)


def _is_exp_or_sum(case: Case, value: int) -> bool:
    inner = terms_of(case.around, made_by(case.around, value))
    return _is(case, value, "exp") or (bool(inner) and all(_is(case, x, "exp") for x in inner))


def is_ratio_of_same_exp(case: Case) -> bool:
    """It is exp(x) / sum(exp(x))."""
    ratio = _ratio(case)
    if ratio is None or not is_ratio_of_exp(case):
        return False
    total = made_by(case.around, ratio[1])
    if total is None or plain(total.kind) != "sum":
        return False
    return are_equal(case.around, total.inputs[0], ratio[0])


def is_sum_of_exp(name: str) -> Callable[[Case], bool]:
    """It is the sum or the mean of exp(x)."""

    def fits(case: Case) -> bool:
        step = _maker(case)
        return step is not None and plain(step.kind) == name and _is(case, step.inputs[0], "exp")

    return fits


def is_sum_of_exps(case: Case) -> bool:
    """It is exp(a) + exp(b)."""
    step = _maker(case)
    terms = terms_of(case.around, step) if step is not None and plain(step.kind) == "add" else []
    return bool(terms) and all(_is_exp_or_sum(case, term) for term in terms)


def is_weighted_sum_of_exp(by: str) -> Callable[[Case], bool]:
    """It is the sum of w * exp(x).

    Args:
        by: ``"softmax"`` where that made w; "" for any w.
    """

    def fits(case: Case) -> bool:
        step = _maker(case)
        if step is None or plain(step.kind) != "sum":
            return False
        factors = factors_of(made_by(case.around, step.inputs[0]))
        others = [each for each in factors if not _is(case, each, "exp")]
        return len(others) == 1 and (not by or _is(case, others[0], by))

    return fits


def is_sum_of_densities(case: Case) -> bool:
    """It is a sum of products or quotients with an exponential: w * exp(x) / s."""
    step = _maker(case)
    if step is None or plain(step.kind) not in ("add", "mean", "sum"):
        return False
    todo = list(step.inputs[:1])
    if plain(step.kind) == "add":
        todo = terms_of(case.around, step)[-1:]  # that of the last turn of a loop
    for _ in range(MOST_FACTORS):
        maker = made_by(case.around, todo.pop()) if todo else None
        if maker is None:
            continue
        if plain(maker.kind) == "exp":
            return True
        if plain(maker.kind) in ("div", "mul"):
            todo += maker.inputs if plain(maker.kind) == "mul" else maker.inputs[:1]
    return False


def is_log_of_product_with_exp(case: Case) -> bool:
    """It is exp(a) * b."""
    step = _maker(case)
    is_by_number = step is not None and plain(step.kind) == "mul" and len(step.inputs) == 1
    factors = step.inputs if is_by_number and step is not None else factors_of(step)
    return any(_is(case, each, "exp") for each in factors)


def is_log_of_products(case: Case) -> bool:
    """It is a sum of products of rows, perhaps weighted: of densities of many dimensions."""
    step = _maker(case)
    if step is None or plain(step.kind) not in ("mean", "sum"):
        return False
    terms = factors_of(made_by(case.around, step.inputs[0])) or step.inputs[:1]
    return any(_is(case, each, "prod") for each in terms)


def is_difference_of_squares(case: Case) -> bool:
    """It is E[x²] - E[x]²."""
    step = _maker(case)
    if step is None or plain(step.kind) != "sub" or len(set(step.inputs)) != 2:
        return False
    mean, square = (made_by(case.around, value) for value in step.inputs)
    if mean is None or plain(mean.kind) != "mean":
        return False
    squared = is_square_of(made_by(case.around, mean.inputs[0]))
    averaged = made_by(case.around, is_square_of(square))
    if squared is None or averaged is None or plain(averaged.kind) != "mean":
        return False
    return are_equal(case.around, squared, averaged.inputs[0])
