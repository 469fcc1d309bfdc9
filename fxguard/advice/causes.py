"""Why an operation made something bad: overflow, a zero divisor, an empty mean.

Knows nothing of torch. The rules read an :class:`~fxguard.graph.evidence.Evidence` and the table
of poles and domains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fxguard.advice.surroundings import ROOTS, Surroundings
from fxguard.formats import FORMATS, format_of
from fxguard.graph.evidence import Evidence, Operand
from fxguard.graph.poles import (
    DEFAULT_EPS,
    LAWS,
    LOSSES_OF_TARGETS,
    MEANS,
    PRODUCTS,
    SINGULAR,
    SOFTMAXES,
    SPREADS,
    SUMS,
    plain,
)
from fxguard.graph.tables import ENTRIES, UNINITIALISED
from fxguard.records import Role

__all__ = [
    "cause_of",
    "cause_of_given",
    "is_lost",
    "lost_eps",
    "needed_by",
    "number_beyond",
    "overflowed_on_the_way",
]

# How far float64 may miss the border of a domain, relative to the number or to 1.
ROUNDED = 1e-9
# A kernel may round numbers just below the limit up to infinity.
NEARLY = 0.99

# These hold or add numbers of the program; those compute with them.
_HOLD_NUMBERS = frozenset({"add", "rsub", "scalar_tensor", "setitem", "sub", "tensor", "where"})
_OF_NUMBERS = _HOLD_NUMBERS | {"addcdiv", "addcmul", "div", "float_power", "mul", "pow"}

# The largest magnitude of a logarithm in float64: a larger number is not a log(0). A number that
# overflowed may have been scaled since, but not by more than the root of its dtype's range.
LARGEST_LOGARITHM = 745


def cause_of_given(role: Role) -> str:
    """The cause if no operation made the bad value: ``"weight"`` or ``"data"``."""
    return "data" if role is Role.INPUT else "weight"


def cause_of(evidence: Evidence, around: Surroundings | None = None) -> str:
    """Why an operation made something bad, as in :attr:`~fxguard.findings.Origin.cause`.

    Args:
        evidence: the operation, at the first bad element.
        around: the graph around it, if known: it reveals a root of an eps that is 0.

    Example:
        >>> x, y = Operand(454.0, 454.0, dtype="float16"), Operand(485.0, 485.0, dtype="float16")
        >>> cause_of(Evidence("mul", "float16", (0, 3), math.inf, (x, y), same=220190.0))
        'overflow'
    """
    if evidence.kind in UNINITIALISED:
        return "memory"
    if number_beyond(evidence) is not None:
        return "overflow"
    same = evidence.same
    if same is not None and math.isfinite(same):
        is_beyond = _is_beyond(same, evidence.dtype)
        return "overflow" if is_beyond else _cause_inside(evidence)
    if evidence.kind in ENTRIES:
        return "data"
    law = _law_of(evidence)
    if not law and _overflows_everywhere(evidence):
        return "overflow"
    if any(map(_overflowed_before, evidence.operands)):
        return "overflow"
    lost = any(is_lost(operand, evidence.dtype) for operand in evidence.operands)
    is_sound = evidence.wide is not None and math.isfinite(evidence.wide)
    if is_sound or (evidence.wide is None and lost):
        lost = lost or (around is not None and _is_root_of_nothing(evidence, around))
        return "underflow" if lost else "rounding"
    if law == "domain" and _is_rounded_out(evidence):
        return "rounding"
    return law or "unknown"


def is_lost(operand: Operand, dtype: str) -> bool:
    """Whether an operand is 0 only because its dtype cannot hold such a small number.

    Args:
        operand: an operand of the operation.
        dtype: dtype of the operation's result, used if the operand has none.
    """
    if operand.wide_low is None or operand.wide_high is None or operand.low or operand.high:
        return False
    form = format_of(operand.dtype or dtype)
    largest = max(abs(operand.wide_low), abs(operand.wide_high))
    return form is not None and form.loses(largest)


def number_beyond(evidence: Evidence) -> float | None:
    """A number of the program because of which an operation overflows; None if there is none.

    A sum and what holds numbers fail with a number beyond the dtype of the result; a product with
    one beyond the dtype in which kernels compute, which for 16 bits is float32.

    Example:
        >>> x, number = Operand(0.5, 0.5, dtype="float32"), Operand(1e39, 1e39)
        >>> number_beyond(Evidence("mul", "float32", (0,), math.inf, (x, number), same=5e38))
        1e+39
    """
    name, same = plain(evidence.kind), evidence.same
    form = format_of(evidence.dtype)
    if form is None or math.isnan(evidence.number) or name not in _OF_NUMBERS:
        return None
    fits = same is not None and not _is_beyond(same, evidence.dtype)
    if form.name in ("bfloat16", "float16") and not fits and name not in _HOLD_NUMBERS:
        form = FORMATS["float32"]
    numbers = (operand.low for operand in evidence.operands if not operand.dtype)
    return next(filter(form.overflows, numbers), None)


def overflowed_on_the_way(evidence: Evidence) -> bool:
    """Whether a result is infinite that the dtype of its operands holds, as of a norm's squares."""
    dtypes = {operand.dtype for operand in evidence.operands if operand.dtype}
    form = FORMATS.get(dtypes.pop()) if len(dtypes) == 1 else None
    is_known = form is not None and evidence.same is not None and math.isinf(evidence.number)
    if not is_known or form is None or evidence.same is None:
        return False
    return evidence.same != 0 and not form.overflows(evidence.same)


def needed_by(evidence: Evidence) -> float | None:
    """The largest magnitude of a result in float64, also of ``torch.tensor(1e39)``.

    That has no operand to widen: it is computed in the default dtype, again.
    """
    number = number_beyond(evidence)
    is_held = plain(evidence.kind) in _HOLD_NUMBERS and evidence.needed == math.inf
    return abs(number) if is_held and number is not None else evidence.needed


def lost_eps(evidence: Evidence) -> float | None:
    """The eps of an operation that is 0 in its dtype, given or torch's default."""
    form = format_of(evidence.dtype)
    literals = [operand.low for operand in evidence.operands if not operand.dtype]
    has_eps = any(0 < x < 0.1 for x in literals)  # others are dimensions and powers
    own = None if has_eps else DEFAULT_EPS.get(plain(evidence.kind))
    lost = (eps for eps in (*literals, own) if eps is not None and form and form.loses(eps))
    return next(lost, None)


def _is_root_of_nothing(evidence: Evidence, around: Surroundings) -> bool:
    """Whether an operand is 0 because it is the root of an eps or a square that is 0.

    An eps that was added to the operand counts as well.
    """
    form = format_of(evidence.dtype)
    roots = (step for step in around.culprit_made_by if plain(step.kind) in ROOTS)
    behind = around.behind_all(roots)
    sums = [step for step in around.culprit_made_by if plain(step.kind) == "add"]
    numbers = (number for step in (*behind, *sums) for number in step.literals)
    loses_eps = form is not None and any(map(form.loses, numbers))
    zeros = (each for each in evidence.operands if each.dtype and each.low == each.high == 0)
    wide = max((abs(each.wide_low) for each in zeros if each.wide_low is not None), default=0.0)
    return loses_eps or (bool(behind) and form is not None and form.loses(wide * wide))


def _is_rounded_out(evidence: Evidence) -> bool:
    """Whether operands are outside a domain only by roundings, possibly those of float64.

    The cosine of two equal vectors is 1.001 in float16, and may be 1.0000000000000002 in float64.
    """

    def moved(operand: Operand, by: float) -> Operand:
        if operand.wide is None or operand.wide == operand.low:
            return operand
        number = operand.wide + by * max(abs(operand.wide), 1.0)
        return replace(operand, low=number, high=number)

    name, operands = plain(evidence.kind), evidence.operands
    moves = [tuple(moved(x, by) for x in operands) for by in (ROUNDED, -ROUNDED)]
    differs = any(x.dtype and x.wide not in (None, x.low) for x in operands)
    return name in LAWS and differs and any(not _elementwise(name, each) for each in moves)


def _is_beyond(number: float, dtype: str) -> bool:
    form = format_of(dtype)
    return form is not None and abs(number) >= NEARLY * form.max


def _cause_inside(evidence: Evidence) -> str:
    """The cause in a kernel that fails although its exact result is an ordinary number."""
    if evidence.inner is not None:
        return cause_of(evidence.inner)
    form = format_of(evidence.dtype)
    read = [(_magnitude(each), each.count) for each in evidence.operands if "float" in each.dtype]
    # The largest number that sums of squares and products may reach on the way.
    if any(_is_beyond(max(x, x * x) * count, evidence.dtype) for x, count in read):
        return "overflow"
    if math.isinf(evidence.number) and _is_large(evidence):
        return "overflow"
    divides = plain(evidence.kind) in DEFAULT_EPS
    if lost_eps(evidence) or (divides and form and any(form.loses(x * x) for x, _ in read)):
        return "underflow"
    return "rounding"


def _is_large(evidence: Evidence) -> bool:
    """Whether the exact result is so large that numbers on the way to it may not fit the dtype.

    The Bessel function i0(x) is computed as exp(x) times something small.
    """
    form = format_of(evidence.dtype)
    same = evidence.same
    return form is not None and same is not None and abs(same) >= form.max**0.5


def _magnitude(operand: Operand) -> float:
    return max(abs(operand.low), abs(operand.high))


def _is_finite(operand: Operand) -> bool:
    return math.isfinite(operand.low) and math.isfinite(operand.high)


def _overflows_everywhere(evidence: Evidence) -> bool:
    """Whether finite operands away from poles gave an infinity, or infinities that cancel."""
    if not all(map(_is_finite, evidence.operands)):
        return False
    made = evidence.number if evidence.same is None else evidence.same
    sums = plain(evidence.kind) in SUMS | PRODUCTS
    return math.isinf(made) or (evidence.same is None and sums)


def _overflowed_before(operand: Operand) -> bool:
    """Whether an operand is infinite only because an earlier value did not fit the dtype."""
    if _is_finite(operand) or operand.wide_low is None or operand.wide_high is None:
        return False
    wide = max(abs(operand.wide_low), abs(operand.wide_high))
    form = FORMATS.get(operand.dtype)
    least = max(LARGEST_LOGARITHM, 0 if form is None else form.max**0.5)
    return least < wide < math.inf


def _law_of(evidence: Evidence) -> str:
    """The verdict of exact arithmetic on the model's operands; "" if nothing is wrong."""
    name, operands = plain(evidence.kind), evidence.operands
    tensors = [operand for operand in operands if operand.dtype]
    if name in LAWS:
        # A handwritten softmax subtracts the row's maximum.
        is_row = evidence.masked_row and all(operand.high == -math.inf for operand in tensors)
        return "masked row" if is_row and name == "sub" else _elementwise(name, operands)
    if any(operand.count == 0 for operand in tensors):
        return "empty"
    if evidence.masked_row and name in SOFTMAXES:
        return "masked row"
    if name in MEANS and any(math.isnan(operand.low) for operand in tensors):
        return "empty"  # nanmean ignores NaN
    if any(not _is_finite(operand) for operand in tensors):
        rows = tensors[:1] if name in SOFTMAXES else []
        return "masked row" if any(row.high == -math.inf for row in rows) else "domain"
    if name == "ctc_loss":
        return "no alignment"
    if name == "logdet" and math.isnan(evidence.number):
        return "domain"  # a determinant below 0; of a singular matrix it is -inf
    if evidence.same is None and any(operand.count > 1 for operand in tensors):
        return ""  # the inside of a kernel may have failed
    if name in DEFAULT_EPS or name in SINGULAR:
        return "zero divisor"
    means_nothing = name in SPREADS | MEANS | LOSSES_OF_TARGETS and math.isnan(evidence.number)
    return "empty" if means_nothing else ""


def _elementwise(name: str, operands: Sequence[Operand]) -> str:
    law = LAWS[name]
    numbers = [(operand.low, operand.high) for operand in operands]
    # Outside graphs, 1 / x is read as div(x, 1), and 2 ** x as pow(x, 2).
    reversed_ = numbers[: law.arity][::-1]
    reads_backwards = name in ("div", "pow") and any(not each.dtype for each in operands[1:2])
    return law.verdict(numbers) or (law.verdict(reversed_) if reads_backwards else "")
