"""What a closer look at one operation that made something bad has seen. Knows nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Evidence", "Operand"]


@dataclass(frozen=True, slots=True)
class Operand:
    """What an operation read, as far as the first bad element of its result was made of it.

    That is one element where the operation works element by element, the row where it reduces or
    normalizes rows, and else the whole operand.
    """

    low: float  # the smallest of these elements, signed, as the model had them; NaN where one is
    high: float  # the largest
    # The same in the wide form, in which everything was computed in float64 from the beginning;
    # None where that is not known.
    wide_low: float | None = None
    wide_high: float | None = None
    count: int = 1  # how many elements there are
    dtype: str = ""  # "float16"; "" for a Python number
    name: str = ""  # of the parameter, where it was given by keyword

    @property
    def number(self) -> float | None:
        """The one element, signed; None where there are many."""
        return self.low if self.count == 1 else None

    @property
    def wide(self) -> float | None:
        """The one element in the wide form."""
        return self.wide_low if self.count == 1 else None


@dataclass(frozen=True, slots=True)
class Evidence:
    """One operation, at the first bad element of what it made."""

    kind: str  # "div", "softmax", ...
    dtype: str  # of its result, "float16"
    index: tuple[int, ...]  # of the element
    number: float  # what it made there: inf, -inf or NaN
    operands: tuple[Operand, ...]  # tensors and Python numbers, in the order of the arguments
    # What it makes there in float64: of the operands that the model had, and of those of the wide
    # form. None where that is not known.
    same: float | None = None
    wide: float | None = None
    # The largest magnitude of the whole result in float64, of the operands that the model had; inf
    # where an element is infinite then too; None where that is not known.
    needed: float | None = None
    share: int = 1  # how many elements of the result are bad
    numel: int = 1  # of how many
    sample: int | None = None  # the index in the batch of the model's inputs, where it has one
    masked_row: bool = False  # it read a row in which every element is -inf
    # The operation inside a composite one (``normalize``) that failed first; None where this is
    # one kernel, or nobody could look.
    inner: Evidence | None = None
    not_judged: str = ""  # why `same` or `wide` is not known: "no float64 kernel for X"
