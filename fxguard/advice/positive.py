"""Where a number that must be positive is made: what let it be 0, and what else reads it.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxguard.advice._patterns import divides_by, is_square_of, readers_of
from fxguard.advice.surroundings import Surroundings
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.records import Role

__all__ = [
    "LAYERS",
    "OWN_LAYERS",
    "POSITIVE",
    "cut_at_zero",
    "free_layers",
    "free_parameters",
    "made_at",
    "other_pole",
    "other_steep",
]

# What a model's last layer may be: its numbers have no sign by themselves.
LAYERS = frozenset(
    [
        *("addmm", "baddbmm", "bmm", "embedding", "layer_norm", "linear", "matmul", "mm"),
        *(f"{name}{n}d" for name in ("conv", "conv_transpose") for n in (1, 2, 3)),
    ]
)
# Those that read weights by themselves.
OWN_LAYERS = LAYERS - frozenset(["baddbmm", "bmm", "matmul", "mm"])

MOST_STEPS = 64  # in one walk
MOST_VALUES = 2048  # of a walk to parameters, which loops make long


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PASSED = MOVES | SELECTS | CASTS
_JOINS = _names("cat concat concatenate hstack stack vstack")
_CLAMPS = _names("clamp clamp_min clip hardtanh")
_RELUS = _names("relu relu6 threshold")
_PRODUCTS = _names("baddbmm bmm einsum matmul mm mul")
_GAMMAS = _names("digamma lgamma polygamma")
_POLES = _names("log log10 log2 reciprocal rsqrt")

# Their results are negative for no operand.
POSITIVE = _RELUS | _names(
    "abs cosh exp exp2 norm sigmoid softmax softplus sqrt square std var vector_norm"
)
# Sums and products of what they read, elementwise or as matrices: a sign goes through.
_COMBINES = frozenset(map(plain, _PASSED)) | _names(
    """
    add baddbmm bmm diag div einsum eye full matmul mean mm mul neg ones outer rsub sub sum tensor
    zeros
    """
)


def made_at(around: Surroundings, value: int | None, number: float | None = None) -> Step | None:
    """The operation that computed a value, behind moves, selections and casts; None if given.

    That of a model, whose output the value is, counts as well.

    Args:
        around: the surroundings.
        value: the value.
        number: an element of it, which tells of several tensors that were joined which one is
            meant; None: the first.
    """
    for _ in range(MOST_STEPS):
        step = None if value is None else around.maker_of(value)
        if step is None and value is not None:
            return around.made_before(value)
        if step is None or not step.inputs or (step.counts and step.kind not in _PASSED):
            return step
        value = step.inputs[0]
        if plain(step.kind) in _JOINS and len(step.inputs) > 1 and number is not None:
            value = next((x for x in step.inputs if _may_hold(around, x, number)), None)
            if value is None:
                return step
    return None


def _may_hold(around: Surroundings, value: int, number: float) -> bool:
    """Whether an element of a value may be this number; not if its range is unknown."""
    found = around.range_of(value)
    # What a row tells is of float32.
    return found is not None and (
        found.abs_min * (1 - 1e-6) <= abs(number) <= found.abs_max * (1 + 1e-6)
    )


def cut_at_zero(around: Surroundings) -> Step | None:
    """The operation that made the operand 0 where something else was negative: a relu, a clamp.

    The operand of a gamma function may be a sum of what it made.
    """
    step = made_at(around, around.culprit)
    is_sum = step is not None and plain(step.kind) == "sum" and bool(step.inputs)
    if step is not None and is_sum and plain(around.step.kind) in _GAMMAS:
        step = made_at(around, step.inputs[0])
    if step is None:
        return None
    name = plain(step.kind)
    return step if name in _RELUS or (name in _CLAMPS and step.literals[:1] == (0.0,)) else None


def other_pole(around: Surroundings) -> Step | None:
    """Another operation that has a pole where the operand, or what it is computed from, is 0."""
    for step, read in _readers_of_zero(around):
        has_pole = plain(step.kind) in _POLES or divides_by(step, read)
        if step is not around.step and has_pole:
            return step
    return None


def other_steep(around: Surroundings) -> Step | None:
    """Another operation whose value or derivative is infinite where the operand is 0."""
    found = other_pole(around)
    for step, read in () if found is not None else _readers_of_zero(around):
        if step is not around.step and step.inputs[:1] == (read,) and _is_steep(step):
            return step
    return found


def _is_steep(step: Step) -> bool:
    """A root, or a power whose exponent may be below 1."""
    name = plain(step.kind)
    is_power = name in ("float_power", "pow") and not step.number_first
    return name == "sqrt" or (is_power and all(n < 1 for n in step.literals))


def _readers_of_zero(around: Surroundings) -> Iterator[tuple[Step, int]]:
    """What computes with the operand where it is 0, or with what it comes of, and reads of it.

    Of a table of which the operand is an entry, other entries are not 0 because of that.
    """
    for value, is_whole in _same_zero(around):
        for step, read in readers_of(around, value):
            maker = around.maker_of(read)
            is_entry = read != value and maker is not None and maker.kind in SELECTS
            if not (is_entry and is_whole):
                yield step, read


def _same_zero(around: Surroundings) -> Iterator[tuple[int, bool]]:
    """The operand, what it is a view of, and what is 0 where it is: of a square or a root.

    Yields:
        the value, and whether the operand is only some entries of it.
    """
    value, is_whole = around.culprit, False
    for _ in range(MOST_STEPS):
        if value is None:
            return
        yield value, is_whole
        step = around.maker_of(value)
        if step is None or not step.inputs:
            return
        is_kept = not step.counts or step.kind in _PASSED or plain(step.kind) == "sqrt"
        is_whole = is_whole or step.kind in SELECTS
        value = step.inputs[0] if is_kept else is_square_of(step)


def free_parameters(around: Surroundings) -> list[str]:
    """The parameters that the operand grows with, and that may turn negative.

    Returns:
        Their names; [] if there are none, or if data or a layer computed the operand as well.
    """
    todo = [(around.culprit, False)]
    seen, names = set[tuple[int | None, bool]](), dict[str, None]()
    while todo and len(seen) < MOST_VALUES:
        value, is_subtracted = pair = todo.pop(0)
        if value is None or pair in seen:
            continue
        seen.add(pair)
        if around.values[value].role is Role.WEIGHT and not is_subtracted:
            names[around.values[value].name] = None
        if around.values[value].role is Role.INPUT:
            return []
        step = around.maker_of(value)
        if step is None or plain(step.kind) in POSITIVE or is_square_of(step) is not None:
            continue
        if step.counts and plain(step.kind) not in _COMBINES:
            return []
        if _multiplies_parameters(around, step):
            return []  # the sign of one of them is not that of the product
        for position, read in enumerate(step.inputs):
            todo.append((read, is_subtracted != _is_subtracted(step, position)))
    return list(names)


def free_layers(around: Surroundings) -> list[Step]:
    """The layers whose results, of any sign, the operand grows with through sums and products.

    Returns:
        [] if something else than layers and positive numbers computed it as well.
    """
    todo = [(around.culprit, False)]
    seen, found = set[tuple[int | None, bool]](), list[Step]()
    while todo and len(seen) < MOST_VALUES:
        value, is_subtracted = pair = todo.pop(0)
        if value is None or pair in seen:
            continue
        seen.add(pair)
        step = around.maker_of(value)
        if step is None or plain(step.kind) in POSITIVE or is_square_of(step) is not None:
            continue
        if plain(step.kind) in OWN_LAYERS:
            found += [] if is_subtracted or any(step is each for each in found) else [step]
            continue
        if plain(step.kind) == "sub" and not step.number_first:
            return []  # a positive number may be too small
        if step.counts and plain(step.kind) not in _COMBINES:
            return []
        for position, read in enumerate(step.inputs):
            todo.append((read, is_subtracted != _is_subtracted(step, position)))
    lines = {each.source: each for each in found}
    return list(lines.values())


def _multiplies_parameters(around: Surroundings, step: Step) -> bool:
    """Whether parameters are in both factors of a product."""
    if plain(step.kind) not in _PRODUCTS or len(set(step.inputs)) < 2:
        return False
    return all(_leads_to_parameter(around, value) for value in step.inputs)


def _leads_to_parameter(around: Surroundings, value: int) -> bool:
    todo, seen = [value], set[int]()
    while todo and len(seen) < MOST_STEPS:
        each = todo.pop()
        if around.values[each].role is Role.WEIGHT:
            return True
        seen.add(each)
        step = around.maker_of(each)
        todo += [read for read in (() if step is None else step.inputs) if read not in seen]
    return False


def _is_subtracted(step: Step, position: int) -> bool:
    name = plain(step.kind)
    if name in ("neg", "rsub"):
        return position == 0
    is_first = step.number_first or position > 0
    return name == "sub" and is_first
