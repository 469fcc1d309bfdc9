"""How far the elements of two models are apart: one operation, one gradient, one output.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from fxguard.records import BACKWARD, Source

__all__ = ["Apart", "Compared", "Part"]

Part = Literal["operation", "backward", "weight", "gradient", "output", "compiled"]


@dataclass(frozen=True, slots=True)
class Apart:
    """How far two tensors of one shape are apart."""

    # Largest |a - b|: 0 where both are the same inf or NaN, inf where only one is finite.
    absolute: float
    relative: float  # that, relative to the largest finite magnitude in A; inf beside a 0
    cosine: float | None = None  # of the two as vectors; None where one is 0 or not finite


@dataclass(frozen=True, slots=True)
class Compared:
    """One operation of both models, or one of what leaves them: how far apart, and why.

    The *own* error is what the operation of B makes of the operands that A's operation had, rounded
    to B's dtypes, against what A's made of them. The *inherited* error is the rest: what the
    operation of B made of its own operands, against what it makes of A's.
    """

    title: str  # "encoder.block.0 mul", the name of a weight, "output 0"
    part: Part = "operation"
    kind: str = ""  # "mul", "linear"; "" where it is no operation
    module: str = ""  # qualified name; "" for the root module
    source: Source | None = None
    dtypes: tuple[str, str] = ("", "")  # of the results, in A and in B
    own: Apart | None = None  # None where there is none of its own, as of an output
    inherited: Apart | None = None
    total: Apart | None = None  # of the values that the two models really made
    # Largest error of A's and of B's result, each relative to the largest magnitude of the same in
    # float64 on A's operands. None where float64 has no answer, or its answers differ.
    errors: tuple[float, float] | None = None
    only_in: Literal["", "A", "B"] = ""
    reason: str = ""  # why the divergence is significant; "" where it is not
    weights: tuple[str, ...] = field(default=())  # which differ: "linear.weight: negated"

    @property
    def is_significant(self) -> bool:
        """Whether the two differ by more than their dtypes explain."""
        return bool(self.reason)

    @property
    def nearer(self) -> Literal["A", "B"] | None:
        """Which side is nearer to float64; None where neither is, or nobody can tell."""
        if self.errors is None or self.errors[0] == self.errors[1]:
            return None
        if any(math.isnan(error) for error in self.errors):
            return None
        return "A" if self.errors[0] < self.errors[1] else "B"

    @property
    def heading(self) -> str:
        """Title, phase, and where it is if that is in one model only."""
        title = self.title + BACKWARD * (self.part == "backward")
        title = {"gradient": "gradient of ", "weight": "weight "}.get(self.part, "") + title
        return f"{title} (only in {self.only_in})" if self.only_in else title

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
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
        }


def vars_of(record: Any) -> dict[str, Any]:
    """The fields of a record that has slots."""
    return {name: getattr(record, name) for name in record.__slots__}
