"""The printed cause: what happened to the numbers, in the words of each operation.

``log made inf: log of zero`` says more than the name of the cause, which stays the same for all
operations. A new operation is one line here. Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxguard.advice.causes import number_beyond
from fxguard.formats import format_of
from fxguard.graph.evidence import Evidence
from fxguard.graph.poles import LAWS, LOSSES_OF_TARGETS, SINGULAR, SPREADS, plain

__all__ = ["degeneracy_in_words", "words_for"]

_LOG_OF_ZERO = "log of zero"
_LOG_OF_NEGATIVE = "log of a negative number"
_POWER_OF_NEGATIVE = "a fractional power of a negative number"
_ROOT_OF_NEGATIVE = "square root of a negative number"
_BY_ZERO = "division by zero"
_BY_DEVIATION = "division by a deviation of zero"
_BY_NORM = "division by a norm of zero"

# At a pole, where the result is infinite, or 0/0. `x` is the operand that is there.
AT_POLES = {
    "addcdiv": _BY_ZERO,
    "atanh": "atanh of {x:g}",
    "batch_norm": _BY_DEVIATION,
    "cosine_embedding_loss": _BY_NORM,
    "cosine_similarity": _BY_NORM,
    "digamma": "digamma of {x:g}, where it is infinite",
    "div": _BY_ZERO,
    "erfinv": "erfinv of {x:g}",
    "float_power": "zero to a negative power",
    "floor_divide": _BY_ZERO,
    "fmod": _BY_ZERO,
    "group_norm": _BY_DEVIATION,
    "instance_norm": _BY_DEVIATION,
    "layer_norm": _BY_DEVIATION,
    "lgamma": "lgamma of {x:g}, where it is infinite",
    "log": _LOG_OF_ZERO,
    "log10": _LOG_OF_ZERO,
    "log1p": _LOG_OF_ZERO,
    "log2": _LOG_OF_ZERO,
    "logit": _LOG_OF_ZERO,
    "ndtri": "ndtri of {x:g}",
    "normalize": _BY_NORM,
    "pairwise_distance": _BY_NORM,
    "poisson_nll_loss": _LOG_OF_ZERO,
    "pow": "zero to a negative power",
    "reciprocal": _BY_ZERO,
    "remainder": _BY_ZERO,
    "renorm": _BY_NORM,
    "rms_norm": _BY_NORM,
    "rsqrt": "division by the root of zero",
    "weight_norm": _BY_NORM,
    "xlog1py": _LOG_OF_ZERO,
    "xlogy": _LOG_OF_ZERO,
    **dict.fromkeys(SINGULAR, "a singular matrix"),
}

_DIFFERENCE = "inf - inf"
_OF_INF = "{name} of {x:g}"

# Where there is no result, or no unique one.
OUTSIDE = {
    "acos": "acos outside [-1, 1]",
    "acosh": "acosh below 1",
    "add": _DIFFERENCE,
    "addcdiv": "inf / inf or inf - inf",
    "addcmul": "0 * inf or inf - inf",
    "asin": "asin outside [-1, 1]",
    "atanh": "atanh outside [-1, 1]",
    "cos": _OF_INF,
    "digamma": _OF_INF,
    "div": "inf / inf",
    "entr": "entr of a negative number",
    "erfinv": "erfinv outside [-1, 1]",
    "float_power": _POWER_OF_NEGATIVE,
    "floor_divide": "inf divided by a number",
    "fmod": "remainder of inf",
    "frac": _OF_INF,
    "gelu": _OF_INF,
    "hardswish": _OF_INF,
    "lerp": "lerp with inf",
    "log": _LOG_OF_NEGATIVE,
    "log10": _LOG_OF_NEGATIVE,
    "log1p": _LOG_OF_NEGATIVE,
    "log2": _LOG_OF_NEGATIVE,
    "logit": "logit outside [0, 1]",
    "mish": _OF_INF,
    "mul": "0 * inf",
    "ndtri": "ndtri outside [0, 1]",
    "pow": _POWER_OF_NEGATIVE,
    "remainder": "remainder of inf",
    "rsqrt": _ROOT_OF_NEGATIVE,
    "rsub": _DIFFERENCE,
    "silu": _OF_INF,
    "sin": _OF_INF,
    "sinc": _OF_INF,
    "softsign": _OF_INF,
    "sqrt": _ROOT_OF_NEGATIVE,
    "sub": _DIFFERENCE,
    "tan": _OF_INF,
    "xlog1py": _LOG_OF_NEGATIVE,
    "xlogy": _LOG_OF_NEGATIVE,
}


def words_for(
    cause: str, evidence: Evidence | None, *, of_mask: bool = False, lost_eps: float | None = None
) -> str:
    """The cause as it is printed; "" if its name says enough, or nothing more is known.

    Args:
        cause: of :func:`~fxguard.advice.causes.cause_of`.
        evidence: the operation, at the first bad element; None if there was no closer look.
        of_mask: whether the infinity that it read is that of a mask.
        lost_eps: an eps of the program that is 0 in the dtype.

    Example:
        >>> zero = Operand(0.0, 0.0, dtype="float32")
        >>> words_for("zero divisor", Evidence("log", "float32", (0,), -math.inf, (zero,)))
        'log of zero'
    """
    if evidence is not None and cause == "underflow" and lost_eps is not None:
        return f"underflow: {lost_eps:g} is 0 in {evidence.dtype}"
    if evidence is not None and cause == "empty":
        return _nothing_in(evidence)
    if evidence is None or cause not in ("zero divisor", "domain", "overflow"):
        return ""
    if cause == "overflow":
        return _number_text(evidence)
    if evidence.inner is not None and evidence.same is not None and math.isfinite(evidence.same):
        return words_for(cause, evidence.inner, of_mask=of_mask)
    text = _told(cause, evidence)
    is_of_mask = of_mask and cause == "domain" and "inf" in text
    return f"{text} of a mask" if is_of_mask else text


def _told(cause: str, evidence: Evidence) -> str:
    name, operands = plain(evidence.kind), evidence.operands
    tensors = [operand for operand in operands if operand.dtype]
    if name == "logdet" and cause == "domain":
        return "a negative determinant"
    if name not in LAWS and cause == "domain":
        return _infinities_in([end for x in tensors for end in (x.low, x.high)])
    numbers = [operand.low for operand in operands]
    if cause == "zero divisor" and name == "div" and not any(numbers[:2]):
        return "0 / 0"
    text = (AT_POLES if cause == "zero divisor" else OUTSIDE).get(name, "")
    return text.format(name=name, x=numbers[0] if numbers else math.nan)


def _nothing_in(evidence: Evidence) -> str:
    """``a single element has no deviation``: what is empty, or too short; "" if not known."""
    name = plain(evidence.kind)
    if name in LOSSES_OF_TARGETS:
        return "no valid target"
    counts = [operand.count for operand in evidence.operands if operand.dtype]
    if 0 in counts:
        return "no element to compute it from"
    if name in SPREADS and counts[:1] == [1]:
        return "a single element has no deviation"
    return ""


def _number_text(evidence: Evidence) -> str:
    number, form = number_beyond(evidence), format_of(evidence.dtype)
    if number is None or form is None:
        return ""
    return f"{number:g} does not fit {form.name}: the largest number is {form.max:.6g}"


def degeneracy_in_words(gradient: Evidence) -> str:
    """Why a decomposition has no gradient: ``equal eigenvalues``."""
    if gradient.degeneracy.startswith("eigenvalues"):
        return "equal eigenvalues"
    if gradient.degeneracy.startswith("singular values"):
        return "equal singular values"
    return "a matrix without full rank"


def _infinities_in(numbers: Sequence[float]) -> str:
    """``it read -inf``: what a sum, a product or a loss of rows has read."""
    found = {f"{number:+g}" for number in numbers if math.isinf(number)}
    return f"it read {' and '.join(sorted(found))}" if found else ""
