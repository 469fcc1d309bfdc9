"""What a tensor holds that is not finite is counted as a plain loop counts it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from fxguard.measure.details import describe
from fxguard.measure.traceable import abs_min_max, collect, decode
from fxguard.records import Range
from support.exact_ranges import (
    floats,
    often,
)

pytestmark = [  # torch's own, where it first meets what is tested here
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
    pytest.mark.filterwarnings("ignore:Sparse CSR"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

NONZERO = torch.tensor([[0.0, -3.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.5]])
LAYOUTS = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_index_of_a_sparse_tensor_is_a_coordinate(layout: str) -> None:
    """The first bad element of a sparse tensor is named as of the dense one."""
    bad = NONZERO.clone()
    bad[1, 3] = math.nan
    assert describe(LAYOUTS[layout](bad)).first_index == (1, 3)


@often
@given(floats())
def test_description_counts_as_a_plain_loop(case: tuple[Tensor, np.ndarray]) -> None:
    """NaN, +inf and -inf are counted apart; the first bad element is the one numpy finds."""
    tensor, values = case
    elements = values.ravel().tolist()
    detail = describe(tensor)
    assert detail.numel == len(elements)
    assert detail.nan_count == sum(x != x for x in elements)
    assert detail.posinf_count == elements.count(math.inf)
    assert detail.neginf_count == elements.count(-math.inf)
    finite = [abs(x) for x in elements if math.isfinite(x)]
    assert detail.largest_finite == (max(finite) if finite else None)
    bad = np.argwhere(~np.isfinite(values))
    assert detail.first_index == (tuple(bad[0].tolist()) if len(bad) else None)


@often
@given(floats())
def test_range_and_description_agree(case: tuple[Tensor, np.ndarray]) -> None:
    """The range is finite exactly where the description finds nothing bad."""
    tensor, _ = case
    number = decode(*collect([abs_min_max(tensor)]).tolist()[0])
    severity = number.severity if isinstance(number, Range) else 0
    detail = describe(tensor)
    infinite = detail.posinf_count + detail.neginf_count
    assert severity == (2 if detail.nan_count else int(infinite > 0))


@pytest.mark.parametrize(
    ("item", "counts"),
    [
        (complex(math.nan, 0), (1, 0, 0)),
        (complex(-1, math.nan), (1, 0, 0)),
        (complex(math.inf, 0), (0, 1, 0)),
        (complex(-math.inf, 0), (0, 0, 1)),
        (complex(1, 2), (0, 0, 0)),
    ],
)
def test_complex_elements_count_once(item: complex, counts: tuple[int, int, int]) -> None:
    """A bad complex number is one bad element; an infinite one has its real part's sign."""
    detail = describe(torch.tensor([[1j, item]]))
    assert (detail.nan_count, detail.posinf_count, detail.neginf_count) == counts
    assert detail.first_index == ((0, 1) if any(counts) else None)


@pytest.mark.parametrize("item", [complex(0, math.inf), complex(0, -math.inf)])
def test_infinite_imaginary_parts_are_counted(item: complex) -> None:
    """An infinite imaginary part makes one infinite element."""
    detail = describe(torch.tensor([item]))
    assert detail.nan_count == 0
    assert detail.posinf_count + detail.neginf_count == 1
