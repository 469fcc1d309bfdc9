"""Decompositions whose gradient is infinite: equal eigenvalues or singular values, lost rank.

Eigenvalues that are equal in exact arithmetic come out of LAPACK equal or a rounding apart, which
depends on the CPU. The gradient divides by their distance: it is infinite on one CPU, and a large
number without a meaning on another. So what is equal up to roundings counts as equal here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxguard.graph.poles import plain

__all__ = ["degeneracy", "without_gradient"]

# Integer matrices of up to 64 columns came out of LAPACK at most half of n * eps from singular. The
# rest is for other CPUs.
ROOM = 2


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
    known = _known(kind, result)
    if known is None:
        return ""
    batch = tuple(index[:-2])
    return known.names([part.detach()[batch] for part in result])


def without_gradient(kind: str, result: Any, gradients: Collection[int]) -> Tensor | None:
    """Which matrices of a batch a decomposition has no finite gradient at, in exact arithmetic.

    Args:
        kind: the operation.
        result: what it returned.
        gradients: positions in the result of what has a gradient. That of eigenvalues and singular
            values alone is finite.

    Returns:
        A mask with the shape of the batch; None if the operation is no such decomposition.

    Example:
        >>> batch = torch.stack([torch.eye(2), torch.diag(torch.tensor([1.0, 2.0]))])
        >>> without_gradient("linalg_eigh", torch.linalg.eigh(batch), (1,))
        tensor([ True, False])
    """
    known = _known(kind, result)
    if known is None or set(gradients) <= known.always:
        return None
    return known.has_none([part.detach() for part in result])


@dataclass(frozen=True, slots=True)
class _Decomposition:
    """How the results of one decomposition tell that it has no gradient."""

    names: Callable[[Sequence[Tensor]], str]  # of one matrix: the reason, or ""
    has_none: Callable[[Sequence[Tensor]], Tensor]  # of a batch: a mask
    always: frozenset[int]  # the positions of results that always have a gradient


def _known(kind: str, result: Any) -> _Decomposition | None:
    found = _DECOMPOSITIONS.get(plain(kind))
    is_whole = isinstance(result, (tuple, list)) and len(result) >= 2
    return found if is_whole else None


# Eigenvalues and singular values.


def _equal(values: Tensor) -> Tensor:
    """Which pairs are equal up to roundings; each pair once."""
    apart = (values[..., :, None] - values[..., None, :]).abs()
    return (apart <= _rounding(values)[..., None, None]).triu(1)


def _rounding(values: Tensor) -> Tensor:
    """By how much roundings change each of the values: the largest counts for all."""
    count = values.shape[-1]
    magnitudes = values.abs()
    largest = magnitudes.amax(-1) if count else magnitudes.sum(-1)
    return ROOM * count * torch.finfo(values.dtype).eps * largest


def _pair(what: str, values: Tensor) -> str:
    """The first two that are equal, or else the first two that are equal up to roundings."""
    exactly = (values[:, None] == values[None, :]).triu(1)
    for pairs, equal in ((exactly, "equal"), (_equal(values), "equal up to rounding")):
        if bool(pairs.any()):
            one, other = (int(i) for i in pairs.nonzero()[0])
            number = values[one].item() + 0.0  # -0 as 0
            return f"{what} {one} and {other} are {equal}, {number:.6g}"
    return ""


def _names_eigenvalues(result: Sequence[Tensor]) -> str:
    return _pair("eigenvalues", result[0])


def _names_of_symmetric(result: Sequence[Tensor]) -> str:
    text = _pair("eigenvalues", result[0])
    rows = _zero_rows(result) if text.endswith(", 0") else []
    if len(rows) < 2:
        return text
    return f"{text}, as rows {_told(rows)} of the matrix are 0"


def _told(rows: list[int]) -> str:
    if len(rows) == 2:
        return f"{rows[0]} and {rows[1]}"
    if rows == list(range(rows[0], rows[-1] + 1)):
        return f"{rows[0]} to {rows[-1]}"
    return f"{rows[0]}, {rows[1]} and {len(rows) - 2} more"


def _zero_rows(result: Sequence[Tensor]) -> list[int]:
    """The rows of a symmetric matrix that are 0 up to roundings: of its vectors times values."""
    values, vectors = result
    largest = (vectors * values).abs().amax(-1)
    return largest.le(_rounding(values)).nonzero().flatten().tolist()


def _has_equal_eigenvalues(result: Sequence[Tensor]) -> Tensor:
    return _equal(result[0]).flatten(-2).any(-1)


def _names_singular_values(result: Sequence[Tensor]) -> str:
    if text := _pair("singular values", result[1]):
        return text
    zeros = _zeros(result).nonzero()
    if not len(zeros):
        return ""
    first = int(zeros[0])
    return f"singular value {first} is 0{'' if result[1][first] == 0 else ' up to rounding'}"


def _has_bad_singular_values(result: Sequence[Tensor]) -> Tensor:
    return _equal(result[1]).flatten(-2).any(-1) | _zeros(result).any(-1)


def _zeros(result: Sequence[Tensor]) -> Tensor:
    """Which singular values a gradient divides by that are 0 up to roundings.

    It divides by none if the matrix is square and real.
    """
    left, values, right = result
    is_square = left.shape[-2] == max(right.shape[-2:])
    zeros = values <= _rounding(values)[..., None]
    return zeros & (left.is_complex() or not is_square)


# Rank.


def _dependent(result: Sequence[Tensor]) -> Tensor:
    """Which columns are combinations of those before them: R has a 0 there, up to roundings.

    A column is rounded by a part of its own length.
    """
    q, r = result
    diagonal = torch.diagonal(r, dim1=-2, dim2=-1).abs()
    lengths = torch.linalg.vector_norm(r[..., : diagonal.shape[-1]], dim=-2)
    longer_side = max(q.shape[-2], r.shape[-1])
    return diagonal.le(ROOM * longer_side * torch.finfo(r.dtype).eps * lengths)


def _names_column(result: Sequence[Tensor]) -> str:
    columns = _dependent(result).nonzero()
    if not len(columns):
        return ""
    first = int(columns[0])
    return f"column {first} is a combination of the columns before it" if first else "column 0 is 0"


def _has_lost_rank(result: Sequence[Tensor]) -> Tensor:
    return _dependent(result).any(-1)


_EIGENVALUES = _Decomposition(_names_eigenvalues, _has_equal_eigenvalues, frozenset({0}))
_DECOMPOSITIONS = {
    "eig": _EIGENVALUES,
    "eigh": _Decomposition(_names_of_symmetric, _has_equal_eigenvalues, frozenset({0})),
    "qr": _Decomposition(_names_column, _has_lost_rank, frozenset()),
    "svd": _Decomposition(_names_singular_values, _has_bad_singular_values, frozenset({1})),
}
