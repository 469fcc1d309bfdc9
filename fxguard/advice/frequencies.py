"""Relative frequencies: counts divided by their sum, whose logarithm is -inf for what never occurs.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxguard.advice._patterns import made_by
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.written_operands import operand_in
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.records import Source
from fxguard.source.counted import are_counted_at, are_indicators_at, divided_at

__all__ = ["frequencies", "words_of_frequencies"]

MOST_STEPS = 16  # from a logarithm to the quotient
LARGEST_COUNT = 2**24  # up to which float32 holds all whole numbers

_HANDED_ON = frozenset(map(plain, MOVES | SELECTS | CASTS))
_COUNTERS = names_in("bincount histc index_add one_hot scatter_add")
_COUNTED = _COUNTERS | names_in("add cat index_put nansum setitem stack sum")
_SUMS = names_in("nansum sum")


@dataclass(frozen=True, slots=True)
class Frequencies:
    """Where counts were divided, and by how much."""

    source: Source | None
    total: float | None = None  # None if it is not known, or not one number
    is_scaled: bool = False  # whether the quotient was divided again, as by what is expected


def frequencies(case: Case) -> Frequencies | None:
    """The counts, divided by a number, that a logarithm is taken of; None if it is not certain."""
    around, value, is_scaled = case.around, case.around.culprit, False
    if value is None or around.is_learned(value):
        return None
    for _ in range(MOST_STEPS):
        step = around.maker_of(value)
        if step is None:
            return _by_text(operand_in(around), around.step.source, is_scaled)
        name = plain(step.kind)
        if not step.inputs:
            return _by_text("", step.source, is_scaled) or _by_text(
                operand_in(around), around.step.source, is_scaled
            )
        if name == "div" and not step.number_first and _are_counts(case, step):
            return Frequencies(step.source, _total(case, step), is_scaled)
        if name == "mean" and _is_indicator(case, step.inputs[0]):
            return Frequencies(step.source, None, is_scaled)
        if name == "div" and not step.number_first:
            is_scaled = True
        elif step.counts and name not in _HANDED_ON:
            return None
        value = step.inputs[0]
    return None


def _by_text(text: str, read_at: Source | None, is_scaled: bool) -> Frequencies | None:
    found = None if read_at is None else divided_at(text, read_at)
    return None if found is None else Frequencies(found, None, is_scaled)


def _are_counts(case: Case, step: Step) -> bool:
    """What a quotient divides is whole numbers, some of them 0, and it divides by their sum.

    By another number if the program says that they count.
    """
    found = case.around.range_of(step.inputs[0])
    if found is None or found.abs_min != 0 or not _is_count(found.abs_max):
        return False
    total = made_by(case.around, step.inputs[1]) if len(step.inputs) == 2 else None
    is_sum = total is not None and plain(total.kind) in _SUMS
    root = _root(case, step.inputs[0])
    is_own = is_sum and total is not None and _root(case, total.inputs[0]) == root
    maker = case.around.maker_of(root)
    may_count = maker is None or not maker.inputs or plain(maker.kind).rstrip("_") in _COUNTED
    whole = _largest(case, step.inputs[1]) if len(step.inputs) == 2 else None
    if is_own and may_count and found.abs_max > 1 and whole is not None and _is_count(whole):
        return True
    return _is_counted(case, step.inputs[0])


def _is_counted(case: Case, value: int) -> bool:
    """The program counts it, by the name of an operation or by its text."""
    for _ in range(MOST_STEPS):
        step = case.around.maker_of(value)
        if step is None:
            return False
        name = plain(step.kind).rstrip("_")
        if name in _COUNTERS:
            return True
        if not step.inputs:
            return step.source is not None and are_counted_at(step.source)
        if name in _SUMS:
            return _is_indicator(case, step.inputs[0])
        if step.counts and name not in _HANDED_ON:
            return False
        value = step.inputs[0]
    return False


def _is_indicator(case: Case, value: int) -> bool:
    """It is 1 where something is, and 0 elsewhere, by its numbers and by the program's text."""
    found, root = case.around.range_of(value), _root(case, value)
    step = case.around.maker_of(root)
    are_both = found is not None and (found.abs_min, found.abs_max) == (0, 1)
    if not are_both or step is None or step.inputs or step.source is None:
        return False
    return are_indicators_at(step.source)


def _root(case: Case, value: int) -> int:
    """The value whose elements another one holds."""
    for _ in range(MOST_STEPS):
        step = case.around.maker_of(value)
        if step is None or not step.inputs:
            return value
        if step.counts and plain(step.kind) not in _HANDED_ON:
            return value
        value = step.inputs[0]
    return value


def _is_count(number: float) -> bool:
    return 1 <= number <= LARGEST_COUNT and number % 1 == 0


def _largest(case: Case, value: int) -> float | None:
    found = case.around.range_of(value)
    return None if found is None else found.abs_max


def _total(case: Case, step: Step) -> float | None:
    """The number by which all are divided."""
    if len(step.inputs) == 1:
        return step.literals[0] if len(step.literals) == 1 else None
    found = case.around.range_of(step.inputs[1])
    return None if found is None or found.abs_min != found.abs_max else found.abs_max


def words_of_frequencies(case: Case) -> Mapping[str, str]:
    """Where the counts are divided, and the bound below which no frequency lies."""
    found = frequencies(case)
    if found is None:
        return dict.fromkeys(("place", "bound", "eps", "made"), "it")
    least = case.least_above_zero
    bound = ""
    if not found.is_scaled and found.total is not None and _is_count(found.total):
        bound = f", or take {case.name}({case.x}.clamp(min=1 / {found.total:.0f}))"
    elif not found.is_scaled and least is not None:
        bound = f", or take {case.name}({case.x}.clamp(min={least:.3g})), the smallest other number"
    return {
        "place": "" if found.source is None else f" ({found.source.place})",
        "bound": bound,
        "eps": case.near_zero,
        "made": f"{case.log_of(float(case.near_zero)):.0f}",
    }
