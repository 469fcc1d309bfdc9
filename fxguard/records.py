"""Frozen data: what is known about a value, a row, a frame. Knows nothing of torch."""

from __future__ import annotations

import enum
import math
import os.path
from dataclasses import dataclass

__all__ = [
    "BACKWARD",
    "GRADIENT",
    "NOT_MEASURED",
    "Fingerprint",
    "Frame",
    "Range",
    "Role",
    "Row",
    "RowRole",
    "Severity",
    "Source",
    "title_of",
]

NOT_MEASURED = "not measured"  # the note in place of a range that was not measured


def title_of(module: str, kind: str) -> str:
    """The title of an operation or of a call of a module: ``encoder.block.0 mul``.

    Args:
        module: qualified name; ``""`` for the root module, which leaves the bare kind.
        kind: the operation, or the class of the module.
    """
    return f"{module} {kind}".strip()


class Severity(enum.IntEnum):
    """How bad a value is; larger is worse."""

    FINITE = 0
    INF = 1
    NAN = 2

    @classmethod
    def of(cls, abs_max: float) -> Severity:
        """The severity of a tensor, by its largest magnitude.

        Example:
            >>> Severity.of(math.inf) < Severity.of(math.nan)
            True
        """
        if math.isnan(abs_max):
            return cls.NAN
        return cls.INF if math.isinf(abs_max) else cls.FINITE

    @property
    def problem(self) -> str:
        """``"inf"`` or ``"nan"``, as in reports; ``""`` if finite."""
        return ("", "inf", "nan")[self]


class Role(enum.Enum):
    """What a value is in its graph or batch."""

    MADE = "made"  # by an operation
    INPUT = "input"
    WEIGHT = "weight"
    BUFFER = "buffer"
    CONSTANT = "constant"  # an attribute of the graph that is neither a weight nor a buffer

    @property
    def is_given(self) -> bool:
        """Whether no operation made the value."""
        return self is not Role.MADE

    @property
    def is_standing(self) -> bool:
        """Whether the model keeps the value from call to call."""
        return self in (Role.WEIGHT, Role.BUFFER)


@dataclass(frozen=True, slots=True)
class Range:
    """The magnitude range of one tensor."""

    abs_min: float  # zeros count; NaN when any element is NaN
    abs_max: float  # inf when any element is infinite, NaN when any is NaN

    @property
    def severity(self) -> Severity:
        """Finite, inf or NaN."""
        return Severity.of(self.abs_max)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A few numbers that depend on every element of one tensor, to compare it without its elements.

    Elements are numbered in the order of their indices (row-major), whatever their memory layout; a
    complex number is two elements. :mod:`fxguard.measure.fingerprints` takes fingerprints.
    """

    count: int = 0  # elements
    # How many of these are NaN, infinite, or the largest magnitude of the dtype, as in masks. The
    # numbers below describe the other elements; 0 if there are none.
    left_out: int = 0
    mean: float = 0.0
    norm: float = 0.0  # L2: sqrt(sum(x_i ** 2))
    # sum(s_i * x_i) / sqrt(taken), for each of several sequences of signs s_i, +1 or -1.
    projections: tuple[float, ...] = ()
    # True: taken from the captured graph in a second, eager run; a compiler ran another form of the
    # graph.
    of_eager_run: bool = False
    note: str = ""  # why there are no numbers; "" if there are

    @property
    def taken(self) -> int:
        """How many elements the numbers describe."""
        return self.count - self.left_out

    @property
    def rms(self) -> float:
        """The root of the mean square of these elements: ``norm / sqrt(taken)``."""
        return self.norm / math.sqrt(self.taken) if self.taken else 0.0


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the user's code, outside torch itself."""

    file: str  # full path, as Python knows it
    line: int  # counted from 1
    code: str  # the text of that line without indentation; "" if it cannot be read

    def __str__(self) -> str:
        return f"{self.place}: {self.code}" if self.code else self.place

    @property
    def place(self) -> str:
        """``modeling_t5.py:109``."""
        return f"{os.path.basename(self.file)}:{self.line}"

    @property
    def position(self) -> tuple[str, int]:
        """Where the line is, whatever its text."""
        return self.file, self.line


BACKWARD = " (backward)"  # suffix of a backward frame's kind, in titles
GRADIENT = "grad of "  # prefix of a backward row's label


class RowRole(enum.Enum):
    """What a row of a frame shows."""

    PARAMETER = "parameter"
    INPUT = "input"
    OUTPUT = "output"

    @classmethod
    def of(cls, label: str) -> RowRole:
        """The role for the whole label of a row: ``input_proj`` is the name of a parameter.

        Example:
            >>> RowRole.of("output[0] (after layer_norm)")
            <RowRole.OUTPUT: 'output'>
        """
        if label.startswith(GRADIENT):  # a backward reads the gradient of what the forward made
            came_in = cls.of(label.removeprefix(GRADIENT)) is cls.OUTPUT
            return cls.INPUT if came_in else cls.OUTPUT
        for role in (cls.OUTPUT, cls.INPUT):
            if label.startswith(role.value):
                rest = label[len(role.value) :]
                return role if not rest or rest.startswith(("[", " (")) else cls.PARAMETER
        return cls.PARAMETER


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a frame: a parameter, an input or an output."""

    label: str  # "weight", "input[0]", "input[attention_mask]", "output[1]", ...
    abs_min: float | None = None  # None if there is no number; then `note` says why
    abs_max: float | None = None
    note: str = ""  # "", "None", "not a tensor", "empty", "meta", "changed since"
    dtype: str = ""  # of the tensor, "float16"; "" if not known
    fingerprint: Fingerprint | None = None  # in trace files; None if nobody asked for it
    mask: bool = False  # whether its infinities are there on purpose

    @property
    def role(self) -> RowRole:
        """Parameter, input or output."""
        return RowRole.of(self.label)

    @property
    def is_bad(self) -> bool:
        """Whether the row holds an inf or a NaN that nobody intended."""
        return self.abs_max is not None and not math.isfinite(self.abs_max) and not self.mask


@dataclass(frozen=True, slots=True)
class Frame:
    """One operation, or one call of a module, with the ranges of its inputs and outputs."""

    name: str  # fully qualified module name; "" for the root module
    kind: str  # the module's class name, or the operation ("mul", "softmax")
    is_op: bool  # False for the frame of a module
    rows: tuple[Row, ...]  # parameters, inputs, outputs, in this order
    source: Source | None = None  # None if no line outside torch is known
    batch_number: int = 0  # the batch that it belongs to
    index: int = 0  # its place among the frames of that batch; the backward is numbered separately
    # "forward", "loss", "backward" or "optimizer". The rows of "backward" are gradients: "grad of
    # output" and "grad of weight".
    phase: str = "forward"

    @property
    def title(self) -> str:
        """``encoder.block.0 mul``; the bare kind for the root module."""
        return title_of(self.name, self.kind_and_phase)

    @property
    def kind_and_phase(self) -> str:
        """The kind, marked if of a backward: ``sqrt (backward)``."""
        return self.kind + BACKWARD if self.phase == "backward" else self.kind

    @property
    def outputs(self) -> tuple[Row, ...]:
        """The rows of the outputs."""
        return tuple(row for row in self.rows if row.role is RowRole.OUTPUT)

    @property
    def made_bad(self) -> bool:
        """Whether an output holds an inf or a NaN, made here or passed on."""
        return any(row.is_bad for row in self.outputs)
