"""Gradients beside one another: what moves one of them, and not most."""

from __future__ import annotations

from torch import Tensor

from fxguard.history._series import Series

__all__ = ["beside_others"]

FEW = 6  # gradients of which nobody says what most of them do


def beside_others(series: list[Series], values: Tensor) -> tuple[list[int], Tensor]:
    """The norms of gradients, less what most of them have moved by.

    A batch, a loss that is scaled and a norm that is clipped move all of them: one by one, they are
    noisy. A hook, or micro-batches that add up in a part of the weights, moves some.

    Args:
        series: the columns.
        values: octaves, a line for each step; NaN is not measured.

    Returns:
        The positions of the gradients, and a column for each; none where there are few.
    """
    places = [at for at, known in enumerate(series) if known.is_gradient]
    if len(places) < FEW:
        return [], values[:, :0]
    gradients = values[:, places]
    moved = gradients - gradients.nanmedian(dim=0).values
    return places, gradients - moved.nanmedian(dim=1, keepdim=True).values
