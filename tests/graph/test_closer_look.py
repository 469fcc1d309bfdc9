"""What stood at the first bad element of a product, whatever the shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fxguard.graph.closer_look import evidence_of
from fxguard.graph.operations import read_call


@pytest.mark.parametrize(
    ("function", "column"),
    [
        (torch.matmul, (10.0, 40.0)),
        (torch.mm, (10.0, 40.0)),
        (functional.linear, (30.0, 40.0)),
    ],
    ids=["matmul", "mm", "linear"],
)
def test_square_operands_of_a_product_are_a_row_and_a_column(
    function: Callable[[Tensor, Tensor], Tensor], column: tuple[float, float]
) -> None:
    """Not one element of each, though their shapes are that of the result."""
    left = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    right = torch.tensor([[10.0, 20.0], [40.0, 30.0]])
    if function is functional.linear:
        right = torch.tensor([[30.0, 40.0], [10.0, 20.0]])
    made = function(left, right).index_put(
        (torch.tensor(0), torch.tensor(0)), torch.tensor(torch.inf)
    )
    wide = (left.double(), 2 * right.double())
    found = evidence_of(
        read_call(function, (left, right), {}), (left, right), {}, made, wide_args=wide
    )
    assert found is not None
    first, second = found.operands
    assert (first.low, first.high, first.count) == (1.0, 2.0, 2)
    assert (second.low, second.high, second.count) == (*column, 2)
    assert (second.wide_low, second.wide_high) == (2 * column[0], 2 * column[1])


@pytest.mark.parametrize(("samples", "sample"), [(3, 2), (2, None), (None, None)])
def test_a_sample_is_named_where_the_first_dimension_is_that_of_the_batch(
    samples: int | None, sample: int | None
) -> None:
    """Two features are no two samples."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0]])
    found = evidence_of(read_call(torch.log, (x,), {}), (x,), {}, x.log(), samples=samples)
    assert found is not None
    assert (found.index, found.sample) == ((2, 1), sample)
