"""How far the elements of two models are apart: one operation, one gradient, one output.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from fxguard.records import BACKWARD, Source

__all__ = ["Apart", "Compared", "Deviation", "Part"]

Part = Literal["operation", "backward", "weight", "gradient", "output", "compiled"]


@dataclass(frozen=True, slots=True)
class Apart:
    """How far apart two tensors of one shape are."""

    # Largest |a - b|: 0 if both are the same inf or NaN, inf if only one is finite.
    absolute: float
    relative: float  # the same relative to the largest finite magnitude in A; 1 if that is 0
    cosine: float | None = None  # of the two as vectors; None if one is 0 or not finite


@dataclass(frozen=True, slots=True)
class Compared:
    """One operation or output of both models: how far apart the results are, and why.

    The *own* error is the difference between the result of B's operation on A's operands, rounded
    to B's dtypes, and the result of A's operation. The *inherited* error is the rest: the
    difference between the results of B's operation on its own operands and on A's.
    """

    title: str  # "encoder.block.0 mul", the name of a weight, "output 0"
    part: Part = "operation"
    kind: str = ""  # "mul", "linear"; "" if it is not an operation
    module: str = ""  # qualified name; "" for the root module
    source: Source | None = None
    dtypes: tuple[str, str] = ("", "")  # of the results, in A and in B
    own: Apart | None = None  # None if it has no error of its own, such as an output
    inherited: Apart | None = None
    total: Apart | None = None  # of the values that the two models actually made
    # Largest error of A's and of B's result, each relative to the largest magnitude of the float64
    # result on A's operands; of a gradient to what was added up to it, if that is larger. None if
    # float64 has no answer, or its answers differ.
    errors: tuple[float, float] | None = None
    only_in: Literal["", "A", "B"] = ""
    reason: str = ""  # why the divergence is significant; "" if it is not
    weights: tuple[str, ...] = field(default=())  # those that differ: "linear.weight: negated"
    # Of an output: root mean square of the difference, relative to that of A's output; of integers
    # and booleans the share that differs. And how large it may be. None if it is no output.
    distance: float | None = None
    tolerance: float | None = None
    is_judged: bool = True  # False: nothing tells whether roundings explain the difference

    @property
    def is_significant(self) -> bool:
        """Whether the two differ by more than their dtypes explain."""
        return bool(self.reason)

    @property
    def is_within(self) -> bool:
        """Whether an output is within its tolerance; True of everything else."""
        if self.distance is None or self.tolerance is None:
            return True
        return self.distance <= self.tolerance

    @property
    def nearer(self) -> Literal["A", "B"] | None:
        """Which side is nearer to float64; None if neither is, or it is unknown."""
        if self.errors is None or self.errors[0] == self.errors[1]:
            return None
        if any(math.isnan(error) for error in self.errors):
            return None
        return "A" if self.errors[0] < self.errors[1] else "B"

    @property
    def heading(self) -> str:
        """Title and phase, and the model if it is in only one."""
        title = self.title + BACKWARD * (self.part == "backward")
        title = {"gradient": "gradient of ", "weight": "weight "}.get(self.part, "") + title
        return f"{title} (only in {self.only_in})" if self.only_in else title

    def to_dict(self) -> dict[str, Any]:
        """The record as plain data."""
        source = None if self.source is None else vars_of(self.source)
        return {
            "title": self.title,
            "part": self.part,
            "source": source,
            "dtypes": list(self.dtypes),
            **{
                name: None if apart is None else vars_of(apart)
                for name, apart in (
                    ("own", self.own),
                    ("inherited", self.inherited),
                    ("total", self.total),
                )
            },
            "errors_from_float64": None if self.errors is None else list(self.errors),
            "nearer_to_float64": self.nearer,
            "only_in": self.only_in,
            "significant": self.is_significant,
            "reason": self.reason,
            "weights": list(self.weights),
            "distance": self.distance,
            "output_tolerance": self.tolerance,
            "judged": self.is_judged,
        }


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far the results of an operation are from those in the reference."""

    title: str  # "encoder.block.0 mul"
    error: float  # largest difference, relative to the largest magnitude of the reference
    error_before: float  # the largest error of its operands
    source: Source | None = None
    phase: Literal["forward", "backward"] = "forward"

    def __str__(self) -> str:
        where = f" ({self.source.place})" if self.source else ""
        made = f"an error of {self.error:.2g}" if self.error < math.inf else "an inf or a NaN"
        return f"{self.heading}{where} made {made} out of {self.error_before:.2g}"

    @property
    def heading(self) -> str:
        """``encoder.block.0 mul``, ``encoder.block.0 mul (backward)``."""
        return self.title + BACKWARD * (self.phase == "backward")


def vars_of(record: Any) -> dict[str, Any]:
    """The fields of a record that has slots."""
    return {name: getattr(record, name) for name in record.__slots__}
