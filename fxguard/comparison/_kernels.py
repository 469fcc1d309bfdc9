"""What kernels round on the way to a result: numbers that are larger than the result itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxguard.comparison._rounding import ROUNDINGS, in_double, size_of

__all__ = ["rounded_inside"]

BY_MATMUL = 25  # rows of one side from which on `cdist` multiplies matrices, if not told otherwise
Inside = Callable[[Any, Any, float], Tensor | float]


def rounded_inside(kind: str, args: Any, kwargs: Any, unit: float, like: Tensor) -> Tensor | None:
    """Numbers that the kernel of an operation rounds on the way to each element of its result.

    Moving the operands does not show them: they cancel, or are no function of one operand.

    Args:
        kind: the operation.
        args: what it reads, positional.
        kwargs: and named.
        unit: the relative error of one rounding.
        like: its result.

    Returns:
        None if there are none that are larger than the result.
    """
    inside = INSIDE.get(kind)
    if inside is None:
        return None
    try:
        found = inside(args, kwargs, unit)
    except (IndexError, KeyError, TypeError, RuntimeError):  # called in another way
        return None
    if not isinstance(found, Tensor):
        return torch.full(like.shape, found, dtype=torch.float64, device=like.device)
    return found if found.shape == like.shape else None


def _operand(args: Any, kwargs: Any, unit: float) -> Tensor:
    """``1 + erf(x)`` of a negative x cancels, and is then multiplied by x."""
    given: Tensor = args[0] if args else kwargs["input"]
    return given.abs()


def _distance(args: Any, kwargs: Any, unit: float) -> Tensor | float:
    """``|x|² + |y|² - 2 x·y`` cancels where x and y are near, and what is left has its root taken.

    With s = |x|² + |y|², the square is off by k roundings of s. So its root d is off by k s / d
    roundings, and by the root of k s roundings at most, near 0.
    """
    x, y = in_double(args[0]), in_double(args[1])
    p = args[2] if len(args) > 2 else kwargs.get("p", 2.0)
    mode = args[3] if len(args) > 3 else kwargs.get("compute_mode") or ""
    long = max(x.shape[-2], y.shape[-2]) > BY_MATMUL or mode == "use_mm_for_euclid_dist"
    if p != 2 or not long or mode == "donot_use_mm_for_euclid_dist":
        return 0.0
    squares = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
    apart = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.minimum(squares / apart, (squares / (ROUNDINGS * unit)).sqrt())


def _positions(args: Any, kwargs: Any, unit: float) -> float:
    """A position in an image is as large as the image, and an element changes by twice its size."""
    image: Tensor = args[0] if args else kwargs["input"]
    return 2 * max(image.shape[2:]) * size_of(in_double(image))


def _clamped(args: Any, kwargs: Any, unit: float) -> Tensor:
    """``1 - eps`` is rounded, and its distance from 1 is eps."""
    x = in_double(args[0] if args else kwargs["input"])
    eps = args[1] if len(args) > 1 else kwargs.get("eps")
    if eps is None:
        return torch.zeros_like(x)
    return torch.where((x > 1 - 2 * eps) | (x < 2 * eps), 1 / eps, 0.0)


def _one(args: Any, kwargs: Any, unit: float) -> float:
    """``1 - cosine``."""
    return 1.0


INSIDE: dict[str, Inside] = {
    "gelu": _operand,
    "tanhshrink": _operand,
    "cdist": _distance,
    "interpolate": _positions,
    "upsample": _positions,
    "grid_sample": _positions,
    "grid_sampler": _positions,
    "logit": _clamped,
    "cosine_embedding_loss": _one,
}
