"""The numbers at the first bad element, as one line: ``at [5, 0]: 0.0 / 0.0``.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxguard.advice.causes import cause_of, is_lost, lost_eps, overflowed_on_the_way
from fxguard.formats import FORMATS
from fxguard.graph.evidence import Evidence, Operand
from fxguard.graph.poles import ATTENTION, LAWS, LOSSES_OF_TARGETS, PRODUCTS, SPREADS, Law, plain
from fxguard.graph.tables import CASTS, ENTRIES, LOSSES, MEANS_OF_NUMBERS, UNINITIALISED

__all__ = ["DIMS_OF_HEADS", "gradient_text", "operands_text"]

SUMS = frozenset({"cumsum", "mean", "nansum", "sum"})
_OF_ROWS = ("log_softmax", "softmax", "softmin")
LONGEST = 170  # characters
DIGITS = (4, 8, 10, 12, 17)  # of a number
OF_EXPONENT = 1e-3  # by which an exponent may be rounded
EXPONENTIALS = ("exp", "exp2", "expm1", "cosh", "sinh")
_WIDE = "; in float64"  # how the numbers of that begin
DIMS_OF_HEADS = 4  # samples, heads, and two more


# An element of their results is made from all of an operand, not from a row.
READS_ALL = (
    *("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
    *("gru", "lstm", "multi_head_attention_forward", "rnn_relu", "rnn_tanh"),
)


def operands_text(evidence: Evidence, *, of_heads: bool = False, of_state: str = "") -> str:
    """The operands of an operation at the first bad element of its result, in one line.

    Args:
        evidence: the operation, at that element.
        of_heads: whether dimension 1 of its result are the heads of an attention.
        of_state: with which rounded numbers a run in float64 began, ``from float32 buffers on``.

    Example:
        >>> zero = Operand(0.0, 0.0, dtype="float32")
        >>> operands_text(Evidence("div", "float32", (5, 0), math.nan, (zero, zero), share=12))
        'at [5, 0]: 0.0 / 0.0 (likewise in 11 more elements)'
    """
    if evidence.kind in ENTRIES:
        return ""  # nothing was computed
    place = f"at {list(evidence.index)}: " if evidence.index else ""
    text = place + _expression(evidence) + _in_float64(evidence)
    if of_state:
        text = text.replace(_WIDE, f"{_WIDE}, {of_state},")
    tail = _tail(evidence, of_heads=of_heads)
    if len(text) + len(tail) > LONGEST:
        text = text[: LONGEST - len(tail) - 1] + "…"
    return text + tail


def gradient_text(gradient: Evidence, came_in: float | None, label: str) -> str:
    """The same for a backward: the operands, and the gradients at that element.

    Args:
        gradient: the operation, at the first bad element of the gradient that it returned.
        came_in: the gradient of its result there; None if not known.
        label: label of the operand, "input[0]".

    Example:
        >>> zero = Operand(0.0, 0.0, dtype="float32")
        >>> gradient_text(Evidence("sqrt", "float32", (3,), math.inf, (zero,)), 1.0, "input[0]")
        'at [3]: sqrt(0.0); grad of output 1.0, grad of input[0] inf'
    """
    place = f"at {list(gradient.index)}: " if gradient.index else ""
    output = "" if came_in is None else f"grad of output {_short(came_in)}, "
    text = f"{place}{_expression(gradient)}; {output}grad of {label} {_short(gradient.number)}"
    tail = _tail(gradient)
    if len(text) + len(tail) > LONGEST:
        text = text[: LONGEST - len(tail) - 1] + "…"
    return text + tail


def _expression(evidence: Evidence) -> str:
    name, operands = plain(evidence.kind), evidence.operands
    tensors = [operand for operand in operands if operand.dtype]
    if evidence.degeneracy:
        return f"{name}: {evidence.degeneracy}"
    if evidence.inner is not None:
        return f"inside {name}, {_expression(evidence.inner)}"
    if evidence.kind in CASTS and tensors:
        form = FORMATS.get(evidence.dtype)
        if evidence.number == 0:
            least = 0.0 if form is None else form.smallest
            return f"{tensors[0].low:.6g} as {evidence.dtype}, which begins at {least:.1g}"
        limit = math.inf if form is None else form.max
        return f"{tensors[0].low:.6g} as {evidence.dtype}, whose maximum is {limit:.6g}"
    if name == "ctc_loss":
        return evidence.alignment or "a target has no alignment with its input"
    if evidence.kind in UNINITIALISED:
        return f"{name}: whatever the memory held"
    if name == ATTENTION and evidence.masked_row:
        return "no key is left to its query"
    if name in LOSSES_OF_TARGETS and cause_of(evidence) == "empty":
        return f"{name} without a valid target"
    law = LAWS.get(name)
    is_short = law is not None and len(operands) < law.arity  # as of a mask, which is no number
    is_of_rows = any(operand.count != 1 for operand in tensors) or name in SPREADS
    if (law is None or is_short) and not is_of_rows:
        rest = ", …" if is_short else ""
        law = Law(f"{name}({', '.join('{}' for _ in operands)}{rest})")
    if law is not None and len(operands) >= law.arity:
        return _formula(law, evidence)
    rows = [operand for operand in tensors if operand.count != 1]
    if name in PRODUCTS and len(rows) > 1:
        left, right = rows[:2]
        # In the gradient of a weight, both are whole.
        if left.count != right.count or left.is_all or right.is_all:
            return f"{name} of numbers {_range(left)} and {_range(right)}"
        return f"a row {_range(left)} times a column {_range(right)} ({_elements(left.count)})"
    is_infinite = (x for x in tensors if math.isinf(x.low) or math.isinf(x.high))
    first = next(is_infinite, tensors[0]) if name in LOSSES else tensors[0]
    if first.count == 0 or (name in SPREADS and first.count == 1):
        return f"{name} of {_elements(first.count)} is NaN"
    of_row = "" if first.is_all else " of the row"
    if first.low == first.high == -math.inf:
        return f"all {_elements(first.count)}{of_row} are -inf"
    if name in MEANS_OF_NUMBERS and math.isnan(first.low):
        return f"all {_elements(first.count)}{of_row} are NaN"
    whole = "numbers" if name in READS_ALL or first.is_all else "a row"
    what = "zeros" if first.low == first.high == 0 else f"{whole} {_range(first)}"
    text = f"{name} of {what} ({_elements(first.count)})"
    eps = lost_eps(evidence)
    return text if eps is None else f"{text}, eps {eps:g} is 0 in {evidence.dtype}"


def _formula(law: Law, evidence: Evidence) -> str:
    """The operation with its numbers, and with those of float64 if they tell another story."""
    operands = evidence.operands[: law.arity]
    if plain(evidence.kind) in ("div", "pow") and _is_backwards(law, operands, evidence.same):
        operands = operands[::-1]
    number = _exponent if plain(evidence.kind) in EXPONENTIALS else _number
    text = law.text.format(*map(number, operands))
    if not any(_is_another_story(operand, evidence.dtype) for operand in operands):
        return text
    return f"{text}{_WIDE} {law.text.format(*map(_wide_number, operands))}"


def _is_backwards(law: Law, operands: Sequence[Operand], same: float | None) -> bool:
    """Whether Python's ``1 / x`` was read as ``div(x, 1)``.

    Either only one has a pole there, or only one gives the number that float64 does.
    """
    if operands[-1].dtype:
        return False
    numbers = [(operand.low, operand.high) for operand in operands]
    dividend, divisor = (low for low, _ in numbers)
    if law is LAWS["div"] and same is not None and math.isfinite(same) and dividend and divisor:
        is_turned = math.isclose(divisor / dividend, same, rel_tol=1e-3)
        return is_turned and not math.isclose(dividend / divisor, same, rel_tol=1e-3)
    return bool(law.verdict(numbers[::-1])) and not law.verdict(numbers)


def _in_float64(evidence: Evidence) -> str:
    same = evidence.same
    if same is None or evidence.inner or evidence.kind in CASTS:
        return ""
    if evidence.number and lost_eps(evidence):  # it is shown as 0 if the eps was lost
        return ""
    if math.isfinite(same):
        text = f" is {same:.6g} in float64"
        if overflowed_on_the_way(evidence):
            text += f", which {evidence.operands[0].dtype} holds: it overflows on the way"
        return text
    is_exponential = plain(evidence.kind) in EXPONENTIALS
    if is_exponential and all(math.isfinite(operand.low) for operand in evidence.operands):
        return " is inf in float64, too"
    return ""


def _tail(evidence: Evidence, *, of_heads: bool = False) -> str:
    """How many elements share the problem, and the sample."""
    found = []
    if evidence.sample is not None:
        found.append(f"in sample {evidence.sample}")
    length = _length_of_rows(evidence)
    share, unit = evidence.share // length, "element" if length == 1 else "row"
    if share > 1:
        more = share - 1
        others = f"{more} more {unit}{'s' if more > 1 else ''}"
        is_all = evidence.share == evidence.numel
        text = f"likewise in {f'all {share} {unit}s' if is_all else others}"
        if length == 1 and (alike := evidence.alike) is not None and alike < share:
            text = _unlike(alike, share - alike, evidence)
        elif not is_all and _is_of_any(evidence):
            text = f"and {_short(evidence.number)} in {others}"
        where = "" if is_all else shared_place(evidence, of_heads=of_heads)
        found.append(text + (f", {where}" if where else ""))
    elif length > 1 and (head := _head(evidence, of_heads=of_heads)):
        found.append(f"in {head}")
    return f" ({'; '.join(found)})" if found else ""


def _unlike(alike: int, others: int, evidence: Evidence) -> str:
    """The same where some are bad in float64, too, and some are not.

    Args:
        alike: how many are as the first.
        others: how many are not.
        evidence: at the first.
    """
    is_finite = evidence.same is not None and math.isfinite(evidence.same)
    bad = "NaN" if math.isnan(evidence.number) else "inf"
    told = f"{bad} in float64, too" if is_finite else "finite in float64"
    same = f"likewise in {alike - 1} more; " if alike > 1 else ""
    return f"{same}in {others} more element{'s' if others > 1 else ''} it is {told}"


def _length_of_rows(evidence: Evidence) -> int:
    """How many elements a row has that is masked whole, of a softmax; else 1."""
    tensors = [operand for operand in evidence.operands if operand.dtype]
    if plain(evidence.kind) not in _OF_ROWS or not tensors:
        return 1
    row = tensors[0]
    is_whole = row.low == row.high == -math.inf and evidence.share % max(row.count, 1) == 0
    return max(row.count, 1) if is_whole else 1


def _is_of_any(evidence: Evidence) -> bool:
    """Whether one infinity in a row would have done, where all of the row is infinite."""
    tensors = [operand for operand in evidence.operands if operand.dtype]
    is_whole = bool(tensors) and tensors[0].low == tensors[0].high == -math.inf
    return is_whole and tensors[0].count > 1 and plain(evidence.kind) in SUMS


def shared_place(evidence: Evidence, *, of_heads: bool = False) -> str:
    """``all in column 4 of 12``: what the bad elements have in common; "" if nothing."""
    last = evidence.dims - 1
    if head := _head(evidence, of_heads=of_heads):
        return f"all in {head}"
    for dim, index, size in reversed(evidence.shared):
        if dim == last and evidence.dims > 1:
            return f"all in column {index} of {size}"
        if dim > 0 or (evidence.dims > 1 and evidence.sample is None):
            is_matrix = evidence.dims == 2
            place = (
                f"in row {index} of {size}" if is_matrix else f"at index {index} of dimension {dim}"
            )
            return f"all {place}"
    return ""


def _head(evidence: Evidence, *, of_heads: bool) -> str:
    """``head 2 of 4``, where all bad elements are of one head; else ""."""
    if not of_heads or evidence.dims != DIMS_OF_HEADS:
        return ""
    heads = [(index, size) for dim, index, size in evidence.shared if dim == 1]
    return f"head {heads[0][0]} of {heads[0][1]}" if heads else ""


def _is_another_story(operand: Operand, dtype: str) -> bool:
    """Whether float64 has a number on the other side of a pole or a domain's border."""
    x, wide = operand.low, operand.wide
    if wide is None or not operand.dtype or math.isnan(wide):
        return False
    is_bad = math.isinf(x) != math.isinf(wide)
    is_at_end = x in (0, 1, -1) and wide != x
    is_beyond = (x < 0) != (wide < 0) or (abs(x) > 1) != (abs(wide) > 1)
    return is_lost(operand, dtype) or is_bad or is_at_end or is_beyond


def _number(operand: Operand) -> str:
    if operand.count != 1:
        return _range(operand)
    return _short(operand.low) if operand.dtype else _digits(operand.low)


def _exponent(operand: Operand) -> str:
    """A number with the digits that its exponential takes to be right by a thousandth."""
    text = _number(operand)
    if operand.count != 1 or not operand.dtype or not math.isfinite(operand.low):
        return text
    digits = (f"{operand.low:.{count}g}" for count in range(DIGITS[0], DIGITS[1]))
    is_near = (each for each in digits if abs(float(each) - operand.low) < OF_EXPONENT)
    return text if abs(float(text) - operand.low) < OF_EXPONENT else next(is_near, text)


def _wide_number(operand: Operand) -> str:
    wide = operand.wide
    if wide is None or not operand.dtype:
        return _number(operand)
    return _short(wide, other=operand.low)


def _short(number: float, *, other: float | None = None) -> str:
    """Four digits, more where it takes them, and a point if it would look like an integer."""
    text = _digits(number, other=other)
    return f"{text}.0" if text.lstrip("-").isdigit() else text


def _digits(number: float, *, other: float | None = None) -> str:
    """As many digits as tell a number from 1 and -1, the ends of many domains, and from another."""
    for count in DIGITS:
        text = f"{number:.{count}g}"
        is_at_end = abs(float(text)) == 1 != abs(number)
        is_other = other is not None and number != other and text == f"{other:.{count}g}"
        if not (is_at_end or is_other):
            break
    return text


def _range(operand: Operand) -> str:
    return f"from {_short(operand.low)} to {_short(operand.high)}"


def _elements(count: int) -> str:
    return f"{count} element" if count == 1 else f"{count} elements"
