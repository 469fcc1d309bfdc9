"""Decompositions without a gradient, told by results that LAPACK may return on one CPU or another.

The results are written by hand: which roundings a decomposition has depends on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fxguard.graph.spectra import degeneracy, without_gradient

DTYPES = [torch.float32, torch.float64]
FIRST = (0, 0)  # an element of a gradient


def eigen(values: Sequence[float], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What ``eigh`` returns for a diagonal matrix."""
    return torch.tensor(values, dtype=dtype), torch.eye(len(values), dtype=dtype)


def singular(
    rows: int, columns: int, values: Sequence[float], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``svd`` returns for a diagonal matrix with so many rows and columns."""
    return (
        torch.eye(rows, len(values), dtype=dtype),
        torch.tensor(values, dtype=torch.empty((), dtype=dtype).real.dtype),
        torch.eye(len(values), columns, dtype=dtype),
    )


def triangle(diagonal: Sequence[float], dtype: torch.dtype, above: float = 0.0) -> list[Tensor]:
    """What ``qr`` returns for a triangular matrix."""
    r = torch.diag(torch.tensor(diagonal, dtype=dtype))
    r += torch.full_like(r, above).triu(1)
    return [torch.eye(len(diagonal), dtype=dtype), r]


def is_singular(kind: str, result: Sequence[Tensor], *gradients: int) -> bool:
    lost = without_gradient(kind, tuple(result), gradients)
    return lost is not None and bool(lost)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_is_equal_up_to_roundings(dtype: torch.dtype) -> None:
    """One step of the dtype between two numbers is no distance; a thousand steps are one."""
    eps = torch.finfo(dtype).eps
    for steps, words in (
        (0, "eigenvalues 1 and 2 are equal, 2"),
        (1, "eigenvalues 1 and 2 are equal up to rounding, 2"),
        (1000, ""),
    ):
        result = eigen([1, 2, 2 * (1 + steps * eps)], dtype)
        for kind in ("linalg_eigh", "linalg_eig"):
            assert degeneracy(kind, result, FIRST) == words
            assert is_singular(kind, result, 1) == bool(words)


@pytest.mark.parametrize("dtype", DTYPES)
def test_roundings_are_those_of_the_largest(dtype: torch.dtype) -> None:
    """Next to an eigenvalue of 3, those of a matrix of ones are 0 and a rounding."""
    eps = torch.finfo(dtype).eps
    rounded = eigen([-eps, eps / 4, 3], dtype)
    assert degeneracy("linalg_eigh", rounded, FIRST).startswith("eigenvalues 0 and 1 are equal up")
    assert is_singular("linalg_eigh", rounded, 0, 1)
    alone = eigen([-eps, eps / 4, 3 * eps], dtype)
    assert degeneracy("linalg_eigh", alone, FIRST) == ""
    assert not is_singular("linalg_eigh", alone, 0, 1)


def test_those_that_are_equal_in_every_bit_are_named_first() -> None:
    values = [1.0, 1 + 2**-52, 5.0, 5.0]
    assert degeneracy("linalg_eigh", eigen(values, torch.float64), FIRST) == (
        "eigenvalues 2 and 3 are equal, 5"
    )
    signed = eigen([-0.0, 0.0, 1.0], torch.float64)
    assert degeneracy("linalg_eigh", signed, FIRST).startswith("eigenvalues 0 and 1 are equal, 0")


def test_rows_that_are_zero_are_named() -> None:
    """A matrix that is padded; one with two equal eigenvalues of 0 may have none."""
    padded = torch.zeros(5, 5)
    padded[:2, :2] = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    told = degeneracy("linalg_eigh", torch.linalg.eigh(padded), FIRST)
    assert told == "eigenvalues 0 and 1 are equal, 0, as rows 2 to 4 of the matrix are 0"
    apart = torch.diag(torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 2.0, 0.0]))
    told = degeneracy("linalg_eigh", torch.linalg.eigh(apart), FIRST)
    assert told.endswith(", as rows 0, 2 and 3 more of the matrix are 0")
    v = torch.linalg.qr(torch.tensor([[1.0, 2, 3], [2, 1, 5], [3, 3, 1]])).Q
    pair = v.new_tensor([0.0, 0.0, 2.0]), v
    assert degeneracy("linalg_eigh", pair, FIRST) == "eigenvalues 0 and 1 are equal, 0"


def test_values_alone_have_a_gradient() -> None:
    """It is that of their sum where they are equal."""
    assert without_gradient("linalg_eigh", eigen([2, 2], torch.float64), (0,)) is None
    assert without_gradient("svd", singular(2, 2, [2, 2], torch.float64), (1,)) is None
    for positions in ((0,), (2,), (0, 1, 2)):
        assert is_singular("svd", singular(2, 2, [2, 2], torch.float64), *positions)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "bad"),
    [
        (2, 2, torch.float64, False),
        (3, 2, torch.float64, True),
        (2, 3, torch.float64, True),
        (2, 2, torch.complex128, True),
    ],
)
def test_a_singular_value_of_0(rows: int, columns: int, dtype: torch.dtype, bad: bool) -> None:
    """As torch has it where the 0 is exact; a rounding in its place makes no difference."""
    matrix = torch.zeros(rows, columns, dtype=dtype)
    matrix[0, 0] = 1
    matrix.requires_grad_()
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    assert values[1] == 0
    (left.abs().sum() + right.abs().sum()).backward()
    assert bool(matrix.grad.isfinite().all()) != bad
    for zero, words in (
        (0.0, "singular value 1 is 0"),
        (2**-54, "singular value 1 is 0 up to rounding"),
    ):
        result = singular(rows, columns, [1, zero], dtype)
        assert is_singular("linalg_svd", result, 0, 1, 2) == bad
        assert degeneracy("linalg_svd", result, FIRST) == (words if bad else "")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_that_depends_on_those_before_it(dtype: torch.dtype) -> None:
    """Its part that is new is a rounding of its length; the first such column is named."""
    eps = torch.finfo(dtype).eps
    for diagonal in ([-2, 0, 0], [-2, eps / 4, eps**2], [-2, -eps / 4, 1]):
        result = triangle(diagonal, dtype, above=-2.0)
        assert degeneracy("linalg_qr", result, FIRST) == (
            "column 1 is a combination of the columns before it"
        )
        assert is_singular("linalg_qr", result, 0)
    assert degeneracy("qr", triangle([0, 1], dtype), FIRST) == "column 0 is 0"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_short_column_is_no_dependent_one(dtype: torch.dtype) -> None:
    """It points elsewhere, however short it is."""
    for result in (triangle([1, 1e-30], dtype), triangle([1, 1e-3, 1], dtype, above=1.0)):
        assert degeneracy("linalg_qr", result, FIRST) == ""
        assert not is_singular("linalg_qr", result, 0)


def test_each_matrix_of_a_batch_by_itself() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 3.0]])
    result = (values, torch.eye(2).expand(2, 2, 2))
    found = without_gradient("linalg_eigh", result, (1,))
    assert found is not None
    assert found.tolist() == [False, True]
    assert degeneracy("linalg_eigh", result, (0, 1, 1)) == ""
    assert degeneracy("linalg_eigh", result, (1, 0, 0)) == "eigenvalues 0 and 1 are equal, 3"


def test_others_are_no_decompositions() -> None:
    """Nor is what returned its values alone, or a matrix without elements."""
    values, vectors = eigen([1, 1], torch.float32)
    assert degeneracy("linalg_eigvalsh", values, FIRST) == ""
    assert without_gradient("linalg_eigvalsh", values, (0,)) is None
    assert without_gradient("linalg_inv", vectors, (0,)) is None
    empty = torch.zeros(0, 0)
    assert not is_singular("linalg_eigh", torch.linalg.eigh(empty), 1)
    assert not is_singular("linalg_svd", torch.linalg.svd(empty), 0)
    assert not is_singular("linalg_qr", torch.linalg.qr(empty), 0)
