"""Decompositions whose gradient is infinite: equal eigenvalues or singular values, lost rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxguard.graph.poles import plain

__all__ = ["degeneracy"]


def degeneracy(kind: str, result: Any, index: Sequence[int]) -> str:
    """Why a decomposition has no finite gradient at a matrix; "" if that is not the reason.

    Args:
        kind: the operation.
        result: what it returned.
        index: of an element of the bad gradient, which tells the matrix of a batch.

    Example:
        >>> degeneracy("linalg_eigh", torch.linalg.eigh(torch.eye(2)), (0, 0))
        'eigenvalues 0 and 1 are equal, 1'
    """
    find = _KINDS.get(plain(kind))
    if find is None or not isinstance(result, (tuple, list)) or len(result) < 2:
        return ""
    return find(result, tuple(index[:-2]))


def _of_eigenvalues(result: Sequence[Tensor], batch: tuple[int, ...]) -> str:
    return _equal("eigenvalues", result[0].detach()[batch])


def _of_singular_values(result: Sequence[Tensor], batch: tuple[int, ...]) -> str:
    values = result[1].detach()[batch]
    if text := _equal("singular values", values):
        return text
    zeros = (values == 0).nonzero()
    return f"singular value {int(zeros[0])} is 0" if len(zeros) else ""


def _of_rank(result: Sequence[Tensor], batch: tuple[int, ...]) -> str:
    """A zero on the diagonal of R, up to roundings."""
    diagonal = torch.diagonal(result[1].detach()[batch]).abs()
    if not diagonal.numel():
        return ""
    least = int(diagonal.argmin())
    if float(diagonal[least]) > len(diagonal) * torch.finfo(diagonal.dtype).eps * diagonal.max():
        return ""
    return f"column {least} is a combination of the columns before it" if least else "column 0 is 0"


def _equal(what: str, values: Tensor) -> str:
    """The first two that are equal."""
    same = (values[:, None] == values[None, :]).triu(1).nonzero()
    if not len(same):
        return ""
    one, other = (int(i) for i in same[0])
    return f"{what} {one} and {other} are equal, {values[one].item():.6g}"


_KINDS: dict[str, Callable[[Sequence[Tensor], tuple[int, ...]], str]] = {
    "eig": _of_eigenvalues,
    "eigh": _of_eigenvalues,
    "qr": _of_rank,
    "svd": _of_singular_values,
}
