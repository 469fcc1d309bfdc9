"""The findings of a closer look at one operation with a bad result. Knows nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Evidence", "Operand"]


@dataclass(frozen=True, slots=True)
class Operand:
    """The part of an operand from which the first bad element of a result was made.

    That is one element if the operation works elementwise, the row if it reduces or normalizes
    rows, and otherwise the whole operand.
    """

    low: float  # the smallest of these elements, signed, as the model had them; NaN if one is NaN
    high: float  # the largest
    # The same in the wide form, computed in float64 throughout; None if not known.
    wide_low: float | None = None
    wide_high: float | None = None
    count: int = 1  # how many elements there are
    dtype: str = ""  # "float16"; "" for a Python number
    name: str = ""  # of the parameter, if it was given by keyword
    # Whether all elements of the whole operand are whole numbers, and some are above 1: counts. If
    # the element is -1, that is the lowest of all, else 0 is.
    is_whole: bool = False
    is_all: bool = False  # whether it is all of a tensor of several rows
    # The smallest magnitude above 0 in the whole operand, if that is 0 here, needs no gradient, and
    # is no large tensor; None if not known.
    least: float | None = None
    needs_gradient: bool | None = None  # None if not known, as of a number

    @property
    def number(self) -> float | None:
        """The single element, signed; None if there are several."""
        return self.low if self.count == 1 else None

    @property
    def wide(self) -> float | None:
        """The single element in the wide form."""
        return self.wide_low if self.count == 1 else None


@dataclass(frozen=True, slots=True)
class Evidence:
    """One operation at the first bad element of its result."""

    kind: str  # "div", "softmax", ...
    dtype: str  # of its result, "float16"
    index: tuple[int, ...]  # of the element
    number: float  # what it made there: inf, -inf or NaN
    operands: tuple[Operand, ...]  # tensors and Python numbers, in the order of the arguments
    # Its result there in float64: on the model's operands, and on those of the wide form. None if
    # not known.
    same: float | None = None
    wide: float | None = None
    # The largest magnitude of the whole result in float64, on the model's operands; inf if an
    # element is infinite there too; None if not known.
    needed: float | None = None
    share: int = 1  # how many elements of the result are bad
    # How many of them, too, are finite in float64 on the model's operands, or are not, as the first
    # is; None if not known.
    alike: int | None = None
    numel: int = 1  # number of elements of the result
    # The dimensions along which all bad elements have one index: (dimension, index, its size).
    shared: tuple[tuple[int, int, int], ...] = ()
    dims: int = 0  # dimensions of the result
    sample: int | None = None  # index in the batch of the model's inputs, if there is one
    masked_row: bool = False  # whether it read a row in which every element is -inf
    # The operation inside a composite one (``normalize``) that failed first; None if this is one
    # kernel, or could not be examined.
    inner: Evidence | None = None
    # For the gradient of a decomposition: "eigenvalues 0 and 1 are equal, 2"; "" if not the reason.
    degeneracy: str = ""
    # For ``ctc_loss``: "sample 3: 7 labels with 3 repeats need 10 frames, the input has 9".
    alignment: str = ""
    not_judged: str = ""  # why `same` or `wide` is not known: "no float64 kernel for X"
