"""Details of one tensor: which non-finite elements it holds, how many, and where."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fxguard.measure.traceable import inside, magnitudes, numbers
from fxguard.records import Severity

__all__ = [
    "Detail",
    "are_counts",
    "are_logs_of_counts",
    "describe",
    "least_above_zero",
    "not_finite_in",
]


@dataclass(frozen=True, slots=True)
class Detail:
    """The non-finite elements of a tensor."""

    numel: int
    nan_count: int
    posinf_count: int
    neginf_count: int
    largest_finite: float | None  # magnitude; None if no element is finite
    first_index: tuple[int, ...] | None  # None if every element is finite
    rows: tuple[int, ...] = ()  # the first indices of dimension 0 with such elements
    row_count: int | None = None  # how many there are; None for fewer than two dimensions
    columns: tuple[int, ...] = ()  # of a matrix with bad rows: the few that hold all such elements
    loop: str = ""  # the higher-order operation that made it repeatedly, "scan"; "" if none
    iteration: int = 0  # of the innermost such operation: the first that was not finite
    magnitudes: tuple[
        float, ...
    ] = ()  # the largest in each earlier iteration, if it leads to the next

    @property
    def bad_count(self) -> int:
        """How many elements are not finite."""
        return self.nan_count + self.posinf_count + self.neginf_count

    @property
    def severity(self) -> Severity:
        """Finite, inf or NaN."""
        if self.nan_count:
            return Severity.NAN
        return Severity.INF if self.posinf_count or self.neginf_count else Severity.FINITE


MOST_ROWS = 3  # named
LEAST_COUNTS, MOST_COUNTS = 16, 4096  # elements from which they are known as counts
MOST_ELEMENTS = 2**20  # of a tensor that is looked through for its smallest element
LARGEST_LOG = 9.0  # above it float32 does not tell logarithms of whole numbers from others


def not_finite_in(value: Tensor) -> str:
    """What a tensor holds beside finite numbers: ``NaN``, or its infinities with their signs.

    Example:
        >>> not_finite_in(torch.tensor([1.0, -torch.inf, torch.inf]))
        'inf and -inf'
    """
    if bool(value.isnan().any()):
        return "NaN"
    infinite = value[value.isinf()]
    real = infinite.real if infinite.is_complex() else infinite
    signs = (("inf", real > 0), ("-inf", real < 0))
    return " and ".join(sign for sign, found in signs if bool(found.any()))


def are_counts(value: Tensor, lowest: int = 0) -> bool:
    """Whether the elements of a tensor are whole numbers, none negative, and some above 1.

    Args:
        value: a dense tensor of real numbers; of a long one the first elements are looked at.
        lowest: of the elements; -1 where that stands for what was not counted.
    """
    if value.is_complex():
        return False
    numbers = value.detach().flatten()[:MOST_COUNTS].double()
    if (
        not numbers.numel()
        or not lowest == float(numbers.min()) < 1 < float(numbers.max()) < math.inf
    ):
        return False
    return bool((numbers == numbers.round()).all())


def least_above_zero(value: Tensor) -> float | None:
    """The smallest magnitude of a tensor's elements that are not 0.

    Args:
        value: a dense tensor of real numbers.

    Returns:
        None if there is no such element, if one is not finite, or if the tensor is a long one.
    """
    if value.is_complex() or value.numel() > MOST_ELEMENTS:
        return None
    sizes = value.detach().flatten().double().abs()
    sizes = sizes[sizes != 0]
    return float(sizes.min()) if sizes.numel() and bool(sizes.isfinite().all()) else None


def are_logs_of_counts(value: Tensor) -> bool:
    """Whether the finite elements of a tensor are natural logarithms of whole numbers.

    Args:
        value: a dense tensor of real numbers.
    """
    finite = value.detach().flatten()[:MOST_COUNTS].double()
    finite = finite[finite.isfinite()]
    if (
        finite.numel() < LEAST_COUNTS
        or not 0 <= float(finite.min()) <= float(finite.max()) < LARGEST_LOG
    ):
        return False
    counts = finite.exp()
    return bool(((counts - counts.round()).abs() <= 1e-5 * counts).all())


def describe(value: Tensor) -> Detail:
    """Count the non-finite elements of ``value``, and find the first.

    Args:
        value: a tensor for which :func:`fxguard.measure.traceable.has_numbers` holds, of any
            layout and shape.
    """
    if parts := inside(value):
        details = [describe(part) for part in parts]
        return next((detail for detail in details if detail.first_index is not None), details[0])
    if not value.is_nested and value.layout is not torch.strided:
        value = value.to_dense()  # to find the index
    dense = numbers(value)
    size = magnitudes(dense)
    nan = torch.isnan(size)
    bad = nan | torch.isinf(size)
    # An infinite complex number counts once, by the sign of its real part.
    negative = bad & ~nan & ((dense.real if dense.is_complex() else dense) < 0)
    finite = size[~bad]
    indices = bad.nonzero()
    rows = bad.flatten(1).any(1).nonzero().flatten() if bad.dim() > 1 else None
    return Detail(
        numel=dense.numel(),
        nan_count=int(nan.sum()),
        posinf_count=int((bad & ~nan).sum() - negative.sum()),
        neginf_count=int(negative.sum()),
        largest_finite=float(finite.max()) if finite.numel() else None,
        first_index=tuple(int(i) for i in indices[0]) if len(indices) else None,
        rows=() if rows is None else tuple(map(int, rows[:MOST_ROWS])),
        row_count=None if rows is None else len(rows),
        columns=_few_columns(bad),
    )


def _few_columns(bad: Tensor) -> tuple[int, ...]:
    """The columns of a matrix that hold all bad elements of several rows; () unless few of many."""
    if bad.dim() != 2 or int(bad.any(1).sum()) < 2:
        return ()
    found = bad.any(0).nonzero().flatten()
    is_few = 0 < len(found) <= MOST_ROWS and 2 * len(found) <= bad.shape[1]
    return tuple(map(int, found)) if is_few else ()
