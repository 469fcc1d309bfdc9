"""The operands and results of an operation in another dtype, as rows of a frame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from fxguard import trees
from fxguard.graph.nodes import label_of
from fxguard.measure.at_hand import dtype_of, range_of
from fxguard.records import Range, Row

__all__ = ["rows_of", "tensors_in"]

Path = tuple[int, ...]


def rows_of(name: str, values: Mapping[Path, Tensor], low: Iterable[Tensor]) -> list[Row]:
    """Rows with the ranges of some tensors and the dtypes of their counterparts.

    Args:
        name: prefix of the labels: "input", "output", "grad of input".
        values: the tensors in float64, by path.
        low: the same tensors in the dtype.
    """
    rows = []
    for (path, value), same in zip(values.items(), low, strict=True):
        label, found = label_of(name, path), range_of(value)
        if isinstance(found, Range):
            rows.append(Row(label, found.abs_min, found.abs_max, dtype=dtype_of(same)))
        else:
            rows.append(Row(label, note=found, dtype=dtype_of(same)))
    return rows


def tensors_in(values: Any) -> dict[Path, Tensor]:
    """Every tensor in the arguments of an operation, numbered in their order."""
    tensors = (x for x in trees.tree_leaves(values) if isinstance(x, Tensor))
    return {(number,): x for number, x in enumerate(tensors)}
