"""One batch of a model as data: its operations, what they read and made, and where they stand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxguard.measure.at_hand import own_arithmetic
from fxguard.records import Source

__all__ = [
    "NOT_RECORDED",
    "NO_NUMBERS",
    "RANKS",
    "Leaf",
    "Numbers",
    "Operation",
    "Recording",
    "Ref",
    "Value",
    "numbers_of",
]

RANKS = "ranks"  # how many there are, if it is of several, in `Recording.about`
NOT_RECORDED = "operations that were not recorded"  # how many, in `Recording.about`


class Ref(NamedTuple):
    """A tensor among the arguments of an operation, by the number of its value."""

    value: int


class Numbers(NamedTuple):
    """Five numbers of a tensor that do not change where its elements change places.

    They are those of its finite elements, and how many others it has.
    """

    sum: float
    sum_of_magnitudes: float
    sum_of_squares: float
    largest: float
    not_finite: int


NO_NUMBERS = Numbers(math.nan, math.nan, math.nan, math.nan, 0)  # of what has no elements here


@dataclass(frozen=True, slots=True)
class Value:
    """What one tensor held when it was made."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    numbers: Numbers

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that no recorded operation made."""

    value: int
    kind: str  # "weight", "buffer", "input", or "other": made before, or by what was not recorded
    name: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of ATen, as it was called."""

    name: str  # "aten.mm.default"
    args: tuple[Any, ...]  # with a `Ref` in the place of each tensor
    kwargs: Mapping[str, Any]
    made: tuple[int | None, ...]  # values of its results, in order; None for what is no tensor
    written: tuple[tuple[int, int], ...]  # operands that it wrote: before, and what they hold now
    module: str  # in which it ran
    source: Source | None
    rank: int | None = None  # which ran it, where several are one recording
    label: str = ""  # what people call it, where that is not its kind

    @property
    def kind(self) -> str:
        """``mm`` of ``aten.mm.default``."""
        return self.name.split(".")[1] if self.name.count(".") else self.name

    @property
    def title(self) -> str:
        """The operation with its module: ``layers.0.mlp mm``."""
        of = "" if self.rank is None else f"rank {self.rank}: "
        return f"{of}{self.module} {self.label or self.kind}".strip()


@dataclass(slots=True)
class Recording:
    """One batch of one model.

    Attributes:
        name: what it is: class and dtype.
        values: what was made, in order; an operation reads and makes them by number.
        operations: in the order in which they ran.
        leaves: the values that no operation made.
        outputs: the values that the model returned, with their names.
        data: elements of those values that were kept.
        about: versions and settings, as text or numbers.
    """

    name: str
    values: list[Value] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    outputs: list[tuple[str, int]] = field(default_factory=list)
    data: dict[int, Tensor] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    is_foreign: bool = False  # whether it came from a file: what an operation allocates is checked

    @property
    def title(self) -> str:
        """What it is, how large, and by which torch: for people."""
        return f"{self.name}, {len(self.operations)} operations, torch {self.about.get('torch')}"


def numbers_of(tensor: Tensor) -> Numbers:
    """The five numbers of a tensor, computed in float64.

    Example:
        >>> numbers_of(torch.tensor([[3.0], [-4.0]]))
        Numbers(sum=-1.0, sum_of_magnitudes=7.0, sum_of_squares=25.0, largest=4.0, not_finite=0)
    """
    with own_arithmetic():
        x = tensor.detach()
        if x.is_complex():
            x = torch.view_as_real(x.resolve_conj())
        x = x.to(torch.float64)
        finite = torch.isfinite(x)
        others = x.numel() - int(finite.sum())
        if others:
            x = x[finite]
        if not x.numel():
            return Numbers(0.0, 0.0, 0.0, 0.0, others)
        magnitudes = x.abs()
        return Numbers(
            float(x.sum()),
            float(magnitudes.sum()),
            float((x * x).sum()),
            float(magnitudes.max()),
            others,
        )
