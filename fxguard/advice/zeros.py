"""Signs of why a number is 0: products of many, variances, weights of nothing, norms.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fxguard.advice import becomes
from fxguard.advice._patterns import factors_of, is_square_of, made_by, readers_of
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.positive import LAYERS
from fxguard.advice.surroundings import is_scaling, names_of
from fxguard.advice.written_operands import without_parentheses, written_operand
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.records import Role
from fxguard.source.added import is_added_at
from fxguard.source.weighed import is_weighed_at

__all__ = [
    "NORMS",
    "divides_by_own_norm",
    "divides_by_two_norms",
    "exponents",
    "is_capped_ratio",
    "is_error",
    "is_feature",
    "is_norm",
    "is_normalized_in_turn",
    "is_of_whole_numbers",
    "is_ratio_in_divergence",
    "is_scale_of_rounding",
    "is_share_in_turn",
    "is_spread_of_data",
    "is_weighed",
    "is_weight_by_norm",
    "is_weight_by_snr",
    "repeated_products",
    "share_of",
    "spread_of_data",
]

MOST_STEPS = 400  # of a walk through a recursion
LEAST_TURNS = 4  # of a recursion, so that it is one
MOST_BACK = 12  # operations from a sum to the products that it adds

_PASSED = frozenset(map(plain, MOVES | SELECTS | CASTS)) | {"index_select", "setitem", "where"}
_PRODUCTS = names_in("bmm dot einsum matmul mm mul mv")
_SUMS = names_in("mean nansum sum")
_READ_FEATURES = LAYERS | names_in("gru lstm multi_head_attention_forward rnn_relu rnn_tanh")
_TO_FEATURES = _PASSED | names_in("batch_norm div dropout mul sub")
_STACKS = names_in("cat concat concatenate dstack hstack stack vstack")
NORMS = names_in("norm vector_norm linalg_norm linalg_vector_norm")
_AVERAGES = _SUMS | _PRODUCTS | names_in("div median")
_LARGEST = names_in("amax max")
_ROUNDED = names_in("ceil floor round trunc")
_COMPARISONS = names_in("eq ge gt le logical_and logical_not logical_or lt ne tril triu")
# They are 0 where their operand is.
_KEEPS_ZERO = _PASSED | names_in(
    "abs clamp clamp_max clip div gt minimum mul ne pow relu sign sqrt square tanh"
)


# Logarithms of what weighs them.


def is_weighed(case: Case) -> bool:
    """Its result is multiplied by its operand, or by what is 0 where that is.

    If the product has not run yet, the program's text tells.
    """
    if becomes.is_weighted(case) or _is_weighed_by_zero(case):
        return True
    source, ran_on = case.around.step.source, bool(case.around.readers_of(case.around.made))
    return source is not None and not ran_on and is_weighed_at(source, case.name)


def _is_weighed_by_zero(case: Case) -> bool:
    """A weight computed from the operand is 0 where it is: ``(x / 10).pow(0.75) * log(x)``."""
    culprit = case.around.culprit
    if culprit is None:
        return False
    root, weights = _root(case, culprit), list(becomes.weights_of(case))
    if any(_is_zero_with(case, value, root) for value in weights):
        return True
    ratio = case.around.maker_of(root)
    is_ratio = ratio is not None and plain(ratio.kind) == "div" and not ratio.number_first
    dividend = None
    if is_ratio and ratio is not None and ratio.inputs:
        dividend = _root(case, ratio.inputs[0])
    return dividend is not None and dividend in [_root(case, value) for value in weights]


def is_ratio_in_divergence(case: Case) -> bool:
    """It divides p by q, and p weighs the logarithm of the result: p * log(p / q)."""
    around, read = case.around, case.around.step.inputs
    if case.name != "div" or len(read) != 2:
        return False
    logs = [step for step, _ in readers_of(around, around.made) if plain(step.kind) == "log"]
    for log in logs:
        other = replace(case, around=around.of(log))
        if _root(case, read[0]) in [_root(case, value) for value in becomes.weights_of(other)]:
            return True
    return False


def _root(case: Case, value: int) -> int:
    """The value whose elements another one holds."""
    for _ in range(MOST_BACK):
        step = case.around.maker_of(value)
        if step is None or not step.inputs:
            return value
        if step.counts and step.kind not in MOVES | CASTS:
            return value
        value = step.inputs[0]
    return value


def _is_zero_with(case: Case, value: int, root: int) -> bool:
    for _ in range(MOST_BACK):
        if value == root:
            return True
        step = case.around.maker_of(value)
        if step is None or not step.inputs or step.number_first:
            return False
        name = plain(step.kind)
        if name not in _KEEPS_ZERO or (name == "pow" and min(step.literals, default=0) <= 0):
            return False
        if name in ("clamp", "clip") and any(low > 0 for low in step.literals[:-1]):
            return False
        if name in ("gt", "ne") and step.literals != (0,):
            return False
        value = step.inputs[0]
    return False


# Products of many numbers.


def repeated_products(case: Case) -> list[Step]:
    """The product that a recursion repeats, which led to the operand: its turns, the last first.

    Between its turns there are only products, sums and what moves or selects: nothing that keeps
    the numbers from becoming 0. [] if there are few.
    """
    if case.around.culprit is None:
        return []
    by_line: dict[tuple[str, int], list[Step]] = {}
    for step in dict.fromkeys(_multiplied(case, case.around.culprit)):
        if step.source is not None:
            by_line.setdefault(step.source.position, []).append(step)
    products = [
        [step for step in steps if plain(step.kind) in _PRODUCTS]
        for steps in sorted(by_line.values(), key=len, reverse=True)
    ]
    repeated = next(filter(None, products), [])
    return repeated if len(repeated) >= LEAST_TURNS else []


def _multiplied(case: Case, value: int) -> Iterator[Step]:
    """The operations that led to a value through products, sums and moves, nearest first."""
    todo, seen = [value], {value}
    for _ in range(MOST_STEPS):
        if not todo:
            return
        step = case.around.maker_of(todo.pop(0))
        if step is None:
            continue
        name = plain(step.kind)
        if step.counts and name not in _PASSED | _PRODUCTS | _SUMS:
            continue
        yield step
        todo += [each for each in step.inputs if each not in seen]
        seen.update(step.inputs)


def share_of(case: Case) -> str:
    """What made the numbers that are divided by their own sum: ``w / w.sum()``.

    Returns:
        ``"exp"``, ``"prod"``, ``"cumprod"``, ``"prod of exp"``; ``"mul"`` where one of two factors
        is made so; "" for others.
    """
    part = _own_part(case)
    if part is None:
        return ""
    name = plain(part.kind)
    if name == "exp":  # what it read may be too far behind
        return name
    if not part.inputs:
        return ""
    if name in ("cumprod", "prod"):
        return f"{name} of exp" if _is_made_by(case, part.inputs[0], "exp") else name
    if any(_is_mask(case, each) for each in factors_of(part)):
        return ""
    factors = [made_by(case.around, each) for each in factors_of(part)]
    made = [plain(each.kind) for each in factors if each is not None]
    if not {"cumprod", "exp", "prod"}.isdisjoint(made):
        return "mul"
    return ""


def _is_mask(case: Case, value: int) -> bool:
    """Whether a factor is made of a comparison, or of numbers that are not floating-point."""
    step: Step | None = None
    for _ in range(MOST_BACK):
        step = case.around.maker_of(value)
        if step is None or not step.inputs or step.kind not in MOVES | SELECTS | CASTS:
            break
        value = step.inputs[0]
    if step is None:
        dtype = case.around.values[value].dtype
        return bool(dtype) and "float" not in dtype
    return (step.kind in CASTS and not step.inputs) or plain(step.kind) in _COMPARISONS


def exponents(case: Case) -> Mapping[str, str]:
    """What that operation was given, as the program has it."""
    part = _own_part(case)
    if part is None:
        return {"z": "z", "bare": "z"}
    step = made_by(case.around, part.inputs[0]) if part.inputs else None
    is_exp = plain(part.kind) != "exp" and step is not None and plain(step.kind) == "exp"
    text = written_operand(step if is_exp and step is not None else part) or "z"
    return {"z": text, "bare": without_parentheses(text)}


def _own_part(case: Case) -> Step | None:
    """The operation that made what is divided by its own sum."""
    read = case.around.step.inputs
    if case.name != "div" or len(read) != 2:
        return None
    total = made_by(case.around, read[1])
    if total is None or plain(total.kind) not in _SUMS:
        return None
    whole, part = (made_by(case.around, each) for each in (total.inputs[0], read[0]))
    return part if part is not None and whole is part else None


def _is_made_by(case: Case, value: int, name: str) -> bool:
    step = made_by(case.around, value)
    return step is not None and plain(step.kind) == name


# Variances.


def is_spread_of_data(case: Case) -> bool:
    """It is a weighted mean of squares, of which one may collapse: as a mixture's variance is."""
    return spread_of_data(case) is not None


def spread_of_data(case: Case) -> Case | None:
    """The same in the first turn of a loop where that is known."""
    cases = (replace(case, around=each) for each in case.around.alike())
    return next(filter(_is_spread_of_data, cases), None)


def _is_spread_of_data(case: Case) -> bool:
    step = made_by(case.around, case.around.culprit)
    for _ in range(MOST_BACK):
        if step is None or not step.inputs:
            return False
        name = plain(step.kind)
        if name in ("div", "mul", "sqrt") and (name != "mul" or step.literals):
            step = made_by(case.around, step.inputs[0])
        elif name == "matmul" or (name in _SUMS and step.inputs):
            are_weighted = name == "matmul"
            return any(_is_square_of_sum(case, value, are_weighted) for value in step.inputs)
        else:
            return False
    return False


def _is_square_of_sum(case: Case, value: int, are_weighted: bool) -> bool:
    """Whether a sum adds squares of deviations: weighted ones, or those from an average."""
    step = made_by(case.around, value)
    factors = factors_of(step)
    squares = [is_square_of(made_by(case.around, each)) for each in factors]
    found = [each for each in (*squares, is_square_of(step)) if each is not None]
    differences = [made_by(case.around, each) for each in found]
    are_weighted = are_weighted or bool(factors)
    is_summed = are_weighted or case.around.step.inputs[-1:] != (value,)
    return is_summed and any(
        x is not None and plain(x.kind) == "sub" and (are_weighted or _is_from_average(case, x))
        for x in differences
    )


def _is_from_average(case: Case, difference: Step) -> bool:
    """Whether an average is subtracted: else what is squared is an error, not a deviation."""
    # Where one of the two is not known, the other may be what is subtracted.
    subtracted = difference.inputs[1:] or difference.inputs
    averages = (made_by(case.around, value) for value in subtracted)
    return any(x is not None and plain(x.kind) in _AVERAGES for x in averages)


def is_error(case: Case) -> bool:
    """It is a mean of squared differences of two tensors, neither of them an average."""
    step = made_by(case.around, case.around.culprit)
    if step is None or plain(step.kind) == "mse_loss":
        return step is not None
    if plain(step.kind) not in _SUMS or not step.inputs:
        return False
    square = is_square_of(made_by(case.around, step.inputs[0]))
    made = made_by(case.around, square)
    is_difference = made is not None and plain(made.kind) == "sub" and not made.literals
    return made is not None and is_difference and not _is_from_average(case, made)


# Divisors.


def is_norm(case: Case) -> bool:
    """It divides by a norm."""
    step = made_by(case.around, case.around.culprit)
    return case.name == "div" and step is not None and plain(step.kind) in NORMS


def divides_by_own_norm(case: Case) -> bool:
    """The same, and it is that of the dividend: ``x / x.norm()``."""
    step = made_by(case.around, case.around.culprit)
    if not is_norm(case) or step is None or len(case.around.step.inputs) != 2:
        return False
    dividend = _root(case, case.around.step.inputs[0])
    return dividend == _root(case, step.inputs[0])


def is_by_own_sum(case: Case) -> bool:
    """It divides again and again by the sum of what is divided, perhaps as a row holds it."""
    step = case.around.step
    alike = [x for x in case.around.steps if (x.kind, x.source) == (step.kind, step.source)]
    if case.name != "div" or len(step.inputs) != 2 or len(alike) < 2:
        return False
    dividend, todo = _root(case, step.inputs[0]), [step.inputs[1]]
    for _ in range(MOST_STEPS):
        made = case.around.maker_of(todo.pop(0)) if todo else None
        if made is None:
            continue
        if plain(made.kind) == "sum":
            return any(_root(case, each) == dividend for each in made.inputs[:1])
        if not made.counts or plain(made.kind) in _PASSED | {"setitem"}:
            todo += made.inputs
    return False


def is_weight_by_norm(case: Case) -> bool:
    """It divides a weight by what is computed of it, as ``spectral_norm`` does."""
    if case.name != "div" or len(case.around.step.inputs) != 2:
        return False
    weight, divisor = (_root(case, value) for value in case.around.step.inputs)
    if case.around.values[weight].role is not Role.WEIGHT:
        return False
    todo, seen = [divisor], {divisor}
    for _ in range(MOST_BACK):
        step = case.around.maker_of(todo.pop(0)) if todo else None
        if step is not None:
            new = {_root(case, value) for value in step.inputs} - seen
            seen |= new
            todo += new
    return divisor != weight and weight in seen


def is_scale_of_rounding(case: Case) -> bool:
    """It divides by what is made of the largest magnitude of the same, and then rounds."""
    if case.name != "div" or len(case.around.step.inputs) != 2:
        return False
    maker = made_by(case.around, case.around.culprit)
    while maker is not None and is_scaling(maker):
        maker = made_by(case.around, maker.inputs[0])
    if maker is None or plain(maker.kind) not in _LARGEST:
        return False
    of, magnitude = maker.inputs[0], made_by(case.around, maker.inputs[0])
    if magnitude is not None and plain(magnitude.kind) == "abs":
        of = magnitude.inputs[0]
    is_own = _root(case, of) == _root(case, case.around.step.inputs[0])
    return is_own and not names_of(case.around.read_by).isdisjoint(_ROUNDED)


def divides_by_two_norms(case: Case) -> bool:
    """It divides by the product of two norms: a cosine."""
    factors = factors_of(made_by(case.around, case.around.culprit))
    made = [made_by(case.around, each) for each in factors]
    return len(made) == 2 and all(x is not None and plain(x.kind) in NORMS for x in made)


def is_capped_ratio(case: Case) -> bool:
    """It divides the smaller of x and a bound by x: ``minimum(x, c) / x``."""
    if case.name != "div" or len(case.around.step.inputs) != 2:
        return False
    part, whole = case.around.step.inputs
    step = case.around.maker_of(part)
    if step is None or not step.inputs:
        return False
    name = plain(step.kind)
    is_smaller = name in ("clamp_max", "min", "minimum") or (
        name == "clamp" and bool(step.literals)
    )
    return is_smaller and _root(case, whole) in [_root(case, each) for each in step.inputs]


def is_weight_by_snr(case: Case) -> bool:
    """It is such a ratio, of the ratio of a signal to noise: Min-SNR (Hang et al., 2023)."""
    return is_capped_ratio(case) and "snr" in case.bare.lower()


def is_of_whole_numbers(case: Case) -> bool:
    """All elements of its operand are whole numbers, some of them above 1: counts."""
    return bool(case.operands) and case.operands[0].is_whole


def is_feature(case: Case) -> bool:
    """A layer reads its result, perhaps beside others, or scaled; or may, as nothing else does."""
    todo, seen, others = [case.around.made], {case.around.made}, 0
    while todo and len(seen) <= MOST_STEPS:
        value = todo.pop(0)
        for step in case.around.readers_of(value):
            name = plain(step.kind)
            if name in _READ_FEATURES or name in _STACKS:
                return True
            if name in _TO_FEATURES and step.inputs[:1] == (value,):
                todo += [each for each in step.outputs if each not in seen]
                seen.update(step.outputs)
            else:
                others += 1
    source = case.around.step.source
    return not others and (source is None or not is_added_at(source, case.name))


def is_share_in_turn(case: Case) -> bool:
    """What is divided by its own sum began as an exponential that is normalised in turn."""
    step = None if len(case.around.step.inputs) != 2 else case.around.step
    for _ in range(MOST_BACK):
        if step is None or not step.inputs or plain(step.kind) not in ("div", "mul"):
            break
        step = made_by(case.around, step.inputs[0])
    if step is None or plain(step.kind) != "exp":
        return False
    return is_normalized_in_turn(replace(case, around=case.around.of(step)))


def is_normalized_in_turn(case: Case) -> bool:
    """It is divided by its own sums along two dimensions, one after the other, as by Sinkhorn."""
    value, found = case.around.made, 0
    for _ in range(MOST_STEPS):
        divided = None
        for step, read in readers_of(case.around, value):
            is_first = step.inputs[:1] == (read,)
            if plain(step.kind) not in ("div", "mul") or not is_first or not step.outputs:
                continue
            divisor = made_by(case.around, step.inputs[-1]) if len(step.inputs) == 2 else None
            is_own = divisor is not None and "sum" in names_of(
                [divisor, *case.around.behind_all([divisor])]
            )
            found += is_own
            divided = step.outputs[0]
            break
        if divided is None or found >= 3:
            return found >= 3
        value = divided
    return False
