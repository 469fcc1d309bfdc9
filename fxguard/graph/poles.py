"""Poles and domains of operations by name: where exact arithmetic has no finite result.

A new operation is one line here. Names are those of :func:`fxguard.graph.operations.name_of`,
simplified by :func:`plain`. Nothing here knows torch.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = [
    "ATTENTION",
    "DEFAULT_EPS",
    "LAWS",
    "LOSSES_OF_TARGETS",
    "MEANS",
    "PRODUCTS",
    "SINGULAR",
    "SOFTMAXES",
    "SPREADS",
    "SUMS",
    "Law",
    "plain",
]


@dataclass(frozen=True, slots=True)
class Law:
    """One elementwise operation in exact mathematics."""

    text: str  # how its numbers are written: "{} / {}"
    # Whether operands are at a pole, where the result is infinite, or 0/0.
    pole: Callable[..., bool] = lambda *_: False
    # Whether there is no real result, or no unique limit: inf - inf.
    outside: Callable[..., bool] = lambda *_: False

    @property
    def arity(self) -> int:
        """The number of operands."""
        return self.text.count("{}")

    def verdict(self, operands: Sequence[tuple[float, float]]) -> str:
        """The verdict of exact arithmetic on operands: ``"zero divisor"``, ``"domain"`` or ``""``.

        Args:
            operands: the smallest and the largest number of each, in order.

        Example:
            >>> LAWS["div"].verdict([(0.0, 0.0), (0.0, 0.0)])
            'zero divisor'
        """
        if len(operands) < self.arity:
            return ""
        ends = list(itertools.product(*map(set, operands[: self.arity])))
        if any(self.pole(*numbers) for numbers in ends):
            return "zero divisor"
        return "domain" if any(self.outside(*numbers) for numbers in ends) else ""


def _is_whole(x: float) -> bool:
    return math.isfinite(x) and x == math.floor(x)


def _is_pole_of_gamma(x: float) -> bool:
    return x <= 0 and _is_whole(x)


def _is_zero_times_inf(x: float, y: float) -> bool:
    return (x == 0 and math.isinf(y)) or (y == 0 and math.isinf(x))


def _are_infinite(x: float, y: float) -> bool:
    return math.isinf(x) and math.isinf(y)


def _pow_outside(x: float, y: float) -> bool:
    return x < 0 and math.isfinite(x) and math.isfinite(y) and not _is_whole(y)


_POWER = Law("pow({}, {})", lambda x, y: x == 0 and y < 0, _pow_outside)
_LOG = Law("log({})", lambda x: x == 0, lambda x: x < 0)
_REMAINDER = Law("{} % {}", lambda x, y: y == 0, lambda x, y: math.isinf(x))
_VANISHES_AT_MINUS_INF = {"outside": lambda x: x == -math.inf}
_OSCILLATES = {"outside": math.isinf}

LAWS: dict[str, Law] = {
    "acos": Law("acos({})", outside=lambda x: abs(x) > 1),
    "acosh": Law("acosh({})", outside=lambda x: x < 1),
    "add": Law("{} + {}", outside=lambda x, y: _are_infinite(x, y) and x != y),
    "addcdiv": Law(
        "{} + {} / {}",
        lambda x, y, z: z == 0,
        lambda x, y, z: _are_infinite(y, z) or _are_infinite(x, y),
    ),
    "addcmul": Law(
        "{} + {} * {}",
        outside=lambda x, y, z: _is_zero_times_inf(y, z) or _are_infinite(x, y * z),
    ),
    "asin": Law("asin({})", outside=lambda x: abs(x) > 1),
    "atanh": Law("atanh({})", lambda x: abs(x) == 1, lambda x: abs(x) > 1),
    "cos": Law("cos({})", **_OSCILLATES),
    "cosh": Law("cosh({})"),
    "digamma": Law("digamma({})", _is_pole_of_gamma, lambda x: x == -math.inf),
    "div": Law("{} / {}", lambda x, y: y == 0, _are_infinite),
    "entr": Law("entr({})", outside=lambda x: x < 0),
    "erfinv": Law("erfinv({})", lambda x: abs(x) == 1, lambda x: abs(x) > 1),
    "exp": Law("exp({})"),
    "exp2": Law("exp2({})"),
    "expm1": Law("expm1({})"),
    "float_power": _POWER,
    "floor_divide": Law("{} // {}", lambda x, y: y == 0, lambda x, y: math.isinf(x)),
    "fmod": _REMAINDER,
    "frac": Law("frac({})", **_OSCILLATES),
    "gelu": Law("gelu({})", **_VANISHES_AT_MINUS_INF),
    "hardswish": Law("hardswish({})", **_VANISHES_AT_MINUS_INF),
    "lerp": Law("lerp({}, {}, {})", outside=lambda *numbers: any(map(math.isinf, numbers))),
    "lgamma": Law("lgamma({})", _is_pole_of_gamma),
    "log": _LOG,
    "log10": Law("log10({})", _LOG.pole, _LOG.outside),
    "log1p": Law("log1p({})", lambda x: x == -1, lambda x: x < -1),
    "log2": Law("log2({})", _LOG.pole, _LOG.outside),
    "logit": Law("logit({})", lambda x: x in (0, 1), lambda x: x < 0 or x > 1),
    "mish": Law("mish({})", **_VANISHES_AT_MINUS_INF),
    "mul": Law("{} * {}", outside=_is_zero_times_inf),
    "ndtri": Law("ndtri({})", lambda x: x in (0, 1), lambda x: x < 0 or x > 1),
    "pow": _POWER,
    "reciprocal": Law("1 / {}", lambda x: x == 0),
    "remainder": _REMAINDER,
    "rsqrt": Law("rsqrt({})", lambda x: x == 0, lambda x: x < 0),
    "rsub": Law("rsub({}, {})", outside=lambda x, y: _are_infinite(x, y) and x == y),
    "silu": Law("silu({})", **_VANISHES_AT_MINUS_INF),
    "sin": Law("sin({})", **_OSCILLATES),
    "sinc": Law("sinc({})", **_OSCILLATES),
    "sinh": Law("sinh({})"),
    "softsign": Law("softsign({})", **_OSCILLATES),
    "sqrt": Law("sqrt({})", outside=lambda x: x < 0),
    "square": Law("square({})"),
    "sub": Law("{} - {}", outside=lambda x, y: _are_infinite(x, y) and x == y),
    "tan": Law("tan({})", **_OSCILLATES),
    "xlog1py": Law(
        "xlog1py({}, {})",
        lambda x, y: x != 0 and y == -1,
        lambda x, y: (x != 0 and y < -1) or (math.isinf(x) and y == 0),
    ),
    "xlogy": Law(
        "xlogy({}, {})",
        lambda x, y: x != 0 and y == 0,
        lambda x, y: (x != 0 and y < 0) or (math.isinf(x) and y == 1),
    ),
}

# Operations on rows or on a whole tensor.

MEANS = frozenset("mean median nanmean nanmedian nanquantile quantile".split())

# These need more elements than their correction, which is 1 by default.
SPREADS = frozenset("corrcoef cov std std_mean var var_mean".split())

# Sums, and operations that sum inside: an infinity among other numbers leaves no finite sum.
SUMS = frozenset(
    """
    cumprod cumsum index_add nansum prod scatter_add sum trace
    """.split()
)
PRODUCTS = frozenset(
    """
    addbmm addmm addmv addr baddbmm bilinear bmm chain_matmul conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d convolution dot einsum inner kron linear
    matmul mm multi_dot mv outer tensordot vdot vecdot
    """.split()
)

# A row in which every element is -inf leaves no number.
ATTENTION = "multi_head_attention_forward"  # which reads its masks itself
SOFTMAXES = frozenset(
    """
    gumbel_softmax log_softmax logcumsumexp logsumexp multi_head_attention
    multi_head_attention_forward multihead_attention safe_softmax scaled_dot_product_attention
    softmax softmin transformer_encoder_layer_fwd
    """.split()
)

# A mean over the targets that are not ignored, of which there may be none.
LOSSES_OF_TARGETS = frozenset("cross_entropy linear_cross_entropy nll_loss".split())

# No finite result for a singular matrix.
SINGULAR = frozenset("cond det inv inverse logdet pinv pinverse slogdet solve".split())

# These divide by a norm or a deviation, and add an eps or clamp by one: torch's default. None if
# there is none.
DEFAULT_EPS: dict[str, float | None] = {
    "batch_norm": 1e-5,
    "cosine_embedding_loss": 1e-8,
    "cosine_similarity": 1e-8,
    "group_norm": 1e-5,
    "instance_norm": 1e-5,
    "layer_norm": 1e-5,
    "normalize": 1e-12,
    "pairwise_distance": 1e-6,
    "poisson_nll_loss": 1e-8,
    "renorm": None,
    "rms_norm": None,
    "weight_norm": None,
}

# Other names of the same operations.
_ALIASES = {
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arctanh": "atanh",
    "batch_norm_legit": "batch_norm",
    "cross_entropy_loss": "cross_entropy",
    "ctcloss": "ctc_loss",
    "divide": "div",
    "fused_rms_norm": "rms_norm",
    "gammaln": "lgamma",
    "multiply": "mul",
    "nll_loss2d": "nll_loss",
    "nll_loss_forward": "nll_loss",
    "nll_loss_nd": "nll_loss",
    "nllloss": "nll_loss",
    "psi": "digamma",
    "rmsnorm": "rms_norm",
    "subtract": "sub",
    "true_divide": "div",
    "weight_norm_interface": "weight_norm",
}


def plain(kind: str) -> str:
    """The name of an operation without the marks of its call form.

    Example:
        >>> plain("div_"), plain("special_logit"), plain("_softmax"), plain("LayerNorm")
        ('div', 'logit', 'softmax', 'layer_norm')
    """
    name = re.sub("(?<=[a-z])(?=[A-Z])", "_", kind).lower().strip("_")
    name = name.removeprefix("special_").removeprefix("linalg_").removeprefix("native_")
    return _ALIASES.get(name, name)
