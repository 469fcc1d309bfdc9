"""What exactly becomes of the result of a blamed operation, for rules that rewrite it.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fxguard.advice._patterns import (
    are_equal,
    factors_of,
    is_made_by,
    is_square_of,
    made_by,
    minus_one_of,
    one_plus_of,
    readers_of,
    terms_of,
)
from fxguard.advice.case import Case
from fxguard.advice.surroundings import is_passed, names_of
from fxguard.advice.written_operands import titled, written_operand
from fxguard.formats import FORMATS
from fxguard.graph.poles import plain
from fxguard.graph.tables import LIMITERS
from fxguard.plan.plan import Step
from fxguard.source.named import operand_text

__all__ = [
    "adds_exponentials",
    "divides_by_one_plus",
    "is_bounded_after",
    "is_inverse_softplus",
    "is_logged",
    "is_logged_by",
    "is_normalized",
    "is_of_masked_softmax",
    "is_product_with_log",
    "is_ratio_of_softmaxes",
    "is_ratio_to_softmax",
    "is_scaled_after",
    "is_scaled_sigmoid_by_hand",
    "is_sigmoid_by_hand",
    "is_softplus",
    "is_summed_in_turn",
    "is_tanh_by_hand",
    "is_weighted",
    "is_weighted_given",
    "is_weighted_ratio",
    "weights_of",
    "words_of_log",
]

_LOGS = ("log", "log10", "log2")
_ADDS = ("add", "neg", "sub", *_LOGS)  # what leads from a logarithm to a product with it
MOST_STEPS = 4  # from a logarithm to what it is multiplied by
MOST_VALUES = 64  # from a sum to the quotient by it


def _is(case: Case, value: int | None, name: str) -> bool:
    return is_made_by(case.around, value, name)


# Logarithms: what becomes of them.


def _products(case: Case) -> list[tuple[Step, int]]:
    """The products that read the result, also behind a difference of logarithms."""
    found, todo = [], [case.around.made]
    for _ in range(MOST_STEPS):
        later: list[int] = []
        for value in todo:
            for step, read in readers_of(case.around, value):
                if plain(step.kind) == "mul":
                    found.append((step, read))
                elif plain(step.kind) in _ADDS or is_square_of(step) is not None:
                    later += step.outputs
        todo = later
    return found


def weights_of(case: Case) -> list[int]:
    """The other factors of the products that read the result."""
    pairs = _products(case)
    return [value for step, read in pairs for value in factors_of(step) if value != read]


def is_weighted(case: Case) -> bool:
    """Its result is multiplied by its own operand: p * log(p)."""
    around, culprit = case.around, case.around.culprit
    if culprit is None:
        return False
    return any(are_equal(around, value, culprit) for value in weights_of(case))


def is_product_with_log(case: Case) -> bool:
    """A product with the logarithm of a given 0, of which no gradient is asked."""
    values = case.infinite_operands()
    is_free = not any(map(case.around.is_differentiated, values))
    return is_free and case.reads_log_of_zero() and any(each.low == 0 for each in case.operands)


def words_of_log(case: Case) -> Mapping[str, str]:
    """``{"log": "log (model.py:6)", "x": "s"}`` of what the logarithm of 0 made infinite; or {}."""
    if any(each.low == 0 for each in case.operands):
        return {}
    todo = [(value, case.around.step) for value in case.infinities()]
    for _ in range(MOST_VALUES):
        if not todo:
            break
        value, reader = todo.pop(0)
        step = case.around.maker_of(value)
        if step is None:
            # It may have no gradient, and be in no graph.
            written = "" if reader.source is None else operand_text(reader.source.code, "log")
            if written and reader.source is not None:
                return {"log": f"log ({reader.source.place})", "x": written}
        elif step.infinite_literal:
            return {}
        elif plain(step.kind) in _LOGS:
            return {"log": titled(step), "x": written_operand(step) or "x"}
        elif is_passed(step) or plain(step.kind) in ("add", "div", "mul", "neg", "sub"):
            todo += [(each, step) for each in step.inputs]
    return {}


def is_of_masked_softmax(case: Case) -> bool:
    """Its operand is a softmax of masked scores, by which the logarithm is multiplied."""
    step = made_by(case.around, case.around.culprit)
    is_softmax = step is not None and plain(step.kind) == "softmax"
    return is_softmax and step is not None and is_weighted(case) and _is_masked(case, step)


def _is_masked(case: Case, softmax: Step) -> bool:
    scores = softmax.inputs[0]
    return not case.around.is_given(scores) and case.around.is_masked(scores)


def is_weighted_given(case: Case) -> bool:
    """The same, and nothing computed it: no gradient flows back."""
    culprit = case.around.culprit
    return is_weighted(case) and culprit is not None and _is_target(case, culprit)


def _is_target(case: Case, value: int) -> bool:
    """Whether a value was given and needs no gradient; what a model returned does, in a loss."""
    return case.around.is_given(value) and not case.around.is_differentiated(value)


# Quotients whose logarithm is taken.


def _is_logged_ratio(case: Case) -> bool:
    read_by = [plain(step.kind) for step, _ in readers_of(case.around, case.around.made)]
    return "log" in read_by and len(case.around.step.inputs) == 2


def is_ratio_of_softmaxes(case: Case) -> bool:
    """It divides one softmax by another, and the logarithm of the result is taken."""
    sides = case.around.step.inputs
    return _is_logged_ratio(case) and all(_is(case, value, "softmax") for value in sides)


def is_ratio_to_softmax(case: Case) -> bool:
    """It divides something by a softmax, and the logarithm of the result is taken."""
    is_by_softmax = _is_logged_ratio(case) and is_made_by(
        case.around, case.around.step.inputs[1], "softmax"
    )
    return is_by_softmax and not is_ratio_of_softmaxes(case)


def is_weighted_ratio(case: Case) -> bool:
    """The same for a given p, by which the logarithm is multiplied: p * log(p / q)."""
    if not is_ratio_to_softmax(case):
        return False
    p = case.around.step.inputs[0]
    return _is_target(case, p) and p in weights_of(case)


# Exponentials that overflow: what becomes of them.


def is_softplus(case: Case) -> bool:
    """The logarithm of 1 + its result is taken."""
    for step, _ in readers_of(case.around, case.around.made):
        if plain(step.kind) == "log1p":
            return True
        if one_plus_of(step) is not None:
            after = readers_of(case.around, step.outputs[0])
            if any(plain(each.kind) == "log" for each, _ in after):
                return True
    return False


def _by_one_plus(case: Case) -> list[Step]:
    """The quotients by 1 + its result."""
    found = []
    alike = dict.fromkeys((case.around.made, *_computed_again(case)))
    for step in (step for value in alike for step, _ in readers_of(case.around, value)):
        if one_plus_of(step) is not None:
            for each, read in readers_of(case.around, step.outputs[0]):
                is_divided = plain(each.kind) == "div" and each.inputs[-1:] == (read,)
                if plain(each.kind) == "reciprocal" or is_divided:
                    found.append(each)
    return found


def is_sigmoid_by_hand(case: Case) -> bool:
    """Its result is divided by 1 + the same."""
    return any(are_equal(case.around, x, case.around.made) for x in _dividends(case))


def is_scaled_sigmoid_by_hand(case: Case) -> bool:
    """A product with its result is divided by 1 + its result: ``a * exp(x) / (1 + exp(x))``."""
    makers = (made_by(case.around, value) for value in _dividends(case))
    factors = [value for maker in makers for value in factors_of(maker)]
    return any(are_equal(case.around, x, case.around.made) for x in factors)


def _dividends(case: Case) -> list[int]:
    return [step.inputs[0] for step in _by_one_plus(case) if len(step.inputs) == 2]


def is_tanh_by_hand(case: Case) -> bool:
    """Its result minus 1 is divided by 1 + the same."""
    less = [minus_one_of(made_by(case.around, value)) for value in _dividends(case)]
    return any(x is not None and are_equal(case.around, x, case.around.made) for x in less)


def divides_by_one_plus(case: Case) -> bool:
    """Something else, or a number, is divided by 1 + its result."""
    makers = [names_of(case.around.behind(value)) for value in _dividends(case)]
    is_of_exp = any("exp" in names for names in makers) or is_scaled_sigmoid_by_hand(case)
    return bool(_by_one_plus(case)) and not is_of_exp


def is_bounded_after(case: Case) -> bool:
    """A clamp bounds its result, or a sum of it."""
    steps = case.around.read_by
    for _ in range(2):
        summed = [step for step in steps if plain(step.kind) in ("add", "mul", "sub")]
        steps = [*steps, *case.around.ahead_all(summed)]
    return any(step.kind in LIMITERS for step in steps)


def is_inverse_softplus(case: Case) -> bool:
    """The logarithm of its result minus 1 is taken."""
    for step, read in readers_of(case.around, case.around.made):
        if minus_one_of(step) == read:
            after = readers_of(case.around, step.outputs[0])
            if any(plain(each.kind) == "log" for each, _ in after):
                return True
    return False


def is_logged(case: Case) -> bool:
    """The logarithm of a sum or a ratio of its results is taken."""
    if is_softplus(case) or is_inverse_softplus(case):
        return False
    steps = case.around.read_by
    for _ in range(2):
        summed = [
            step
            for step in steps
            if plain(step.kind) in ("cumsum", "div", "mean", "sum")
            or (plain(step.kind) == "add" and _adds_exponentials_alone(case, step))
        ]
        steps = [*steps, *case.around.ahead_all(summed)]
    return not names_of(steps).isdisjoint(_LOGS)


def is_summed_in_turn(case: Case) -> bool:
    """A running sum of its results is taken, which may be computed twice."""
    alike = {case.around.made, *_computed_again(case)}
    readers = (step for value in alike for step, _ in readers_of(case.around, value))
    return "cumsum" in names_of(readers)


def _adds_exponentials_alone(case: Case, step: Step) -> bool:
    """Whether all tensors that an addition reads are exponentials, or made of them."""
    made = {case.around.made, *_computed_again(case)}
    return all(
        term in made or _is(case, term, "exp") or _is(case, term, "sum") for term in step.inputs
    )


def is_logged_by(log: str, of: str) -> Callable[[Case], bool]:
    """The logarithm of its result is taken, and it adds or averages exponentials.

    Args:
        log: the logarithm.
        of: the name of the operation: ``sum``, ``mean``, ``add``.
    """

    def fits(case: Case) -> bool:
        if case.name != of:
            return False
        step, around = case.around.step, case.around
        terms = terms_of(around, step) if of == "add" else list(step.inputs[:1])
        names = [plain(reader.kind) for reader, _ in readers_of(around, around.made)]
        return bool(terms) and log in names and all(_is(case, term, "exp") for term in terms)

    return fits


def is_normalized(case: Case) -> bool:
    """Its results are divided by their own sum, and nothing else reads them."""
    if is_logged(case):
        return False
    around = case.around
    alike = {around.made, *_computed_again(case)}
    readers = [step for value in alike for step, _ in readers_of(around, value)]
    sums = [step for step in readers if plain(step.kind) in ("mean", "sum")]
    of_sums = [pair for total in sums for pair in readers_of(around, total.outputs[0])]
    quotients = [
        step for step, read in of_sums if plain(step.kind) == "div" and step.inputs[-1:] == (read,)
    ]
    are_own = all(are_equal(around, step.inputs[0], around.made) for step in quotients)
    return (
        bool(quotients)
        and are_own
        and len(quotients) == len(of_sums)
        and all(any(step is each for each in (*sums, *quotients)) for step in readers)
    )


def _computed_again(case: Case) -> list[int]:
    """Results of the same operation on the same operands."""
    around = case.around
    again = [step.outputs[0] for step in around.steps_of(around.step.kind) if step.outputs]
    return [value for value in again if are_equal(around, value, around.made)]


def adds_exponentials(case: Case) -> bool:
    """It sums exponentials, by which something is divided later."""
    behind = [s for value in case.around.step.inputs for s in case.around.behind(value)]
    further = [step for step in behind if plain(step.kind) in ("add", "mul")]
    if "exp" not in names_of((*behind, *case.around.behind_all(further))):
        return False
    todo, seen = [case.around.made], {case.around.made}
    while todo and len(seen) <= MOST_VALUES:
        for step, read in readers_of(case.around, todo.pop(0)):
            if plain(step.kind) == "div" and len(step.inputs) == 2 and step.inputs[1] == read:
                return True
            if plain(step.kind) in ("add", "mul", "sum"):
                todo += [each for each in step.outputs if each not in seen]
                seen.update(step.outputs)
    return False


def is_scaled_after(case: Case) -> bool:
    """It multiplies two operands and adds nothing, and a number makes its result small enough."""
    reads_two = len(case.around.step.inputs) == 2
    scales = [step for step in case.around.read_by if case.is_scale(step)]
    return reads_two and bool(scales) and _fits_scaled(case, scales[0])


def _fits_scaled(case: Case, scale: Step) -> bool:
    """Whether the largest result fits the dtype once it is scaled, as far as both are known."""
    form = FORMATS.get(case.dtype)
    needed = None if case.evidence is None else case.evidence.needed
    if form is None or needed is None or not scale.literals:
        return True
    number = abs(scale.literals[-1]) or 1.0
    scaled = needed * number if plain(scale.kind) == "mul" else needed / number
    return scaled < form.max
