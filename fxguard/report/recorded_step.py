"""The first step of a script as a folder: where it is, and how much it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxguard.report.strict_json import plain_data, recorded, strict_json

__all__ = ["RecordedStep"]


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """What ``fxguard run --record`` wrote of one model."""

    folder: str
    operations: int
    values: int
    kept: int  # values with all their elements
    of: str  # the number that matters: "the loss"; "" for none

    def __str__(self) -> str:
        of = f", up to {self.of}" if self.of else ""
        return (
            f"{self.operations} operations recorded in {self.folder}{of}; it holds inputs, weights "
            f"and {self.kept} of {self.values} values"
        )

    @property
    def verdict(self) -> list[str]:
        """The same as lines."""
        return [str(self)]

    def to_dict(self) -> dict[str, Any]:
        """The record as plain data."""
        return recorded("recorded_step", {**plain_data(self), "verdict": self.verdict})

    def to_json(self, indent: int | None = None) -> str:
        """The record as strict JSON."""
        return strict_json(self.to_dict(), indent)
