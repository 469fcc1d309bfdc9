"""An event of a training run: the loss jumped, or a series climbs, and what changed first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fxguard.report.strict_json import plain_data

__all__ = ["CAUSES", "Cause", "Event"]

Cause = Literal["data", "weights", "step", "gradient", "operation", "growth", "machine", "unknown"]
CAUSES: tuple[Cause, ...] = (
    "data",
    "weights",
    "step",
    "gradient",
    "operation",
    "growth",
    "machine",
    "unknown",
)


@dataclass(frozen=True, slots=True)
class Event:
    """A jump of the loss or of a gradient, or a climb, with its cause."""

    step: int  # of the cause
    cause: Cause
    # What changed first: "blocks.0.qkv.weight", "learning rate of AdamW's step", "blocks.0 matmul".
    what: str
    source: str = ""  # "train.py:31"; "" if that is not known
    lead: int = 0  # steps before the loss moved
    evidence: tuple[str, ...] = ()  # sentences with numbers
    tried: tuple[str, ...] = ()  # reruns, and what they gave; or why none was made

    def to_dict(self) -> dict[str, Any]:
        """The event as plain data."""
        return dict(plain_data(self))
