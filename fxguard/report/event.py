"""An event of a training run: the loss jumped, or a series climbs, and what changed first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fxguard.report.in_words import ranks_in_words
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

WORDS: dict[Cause, str] = {
    "data": "the data changed: {}",
    "weights": "{} was written by something else than the optimizer",
    "step": "{} changed",
    "gradient": "the gradient of {} changed, and the forward before it had not",
    "operation": "{} changed, and what it reads had not",
    "growth": "{} grows",
    "machine": "{}: the same run gives other numbers",
    "unknown": "{} jumped, and nothing that is measured had changed before",
}


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
    ranks: tuple[int, ...] = ()  # the processes that saw it; () if all did

    def __str__(self) -> str:
        return self.headline

    @property
    def headline(self) -> str:
        """What happened, in one line.

        Example:
            >>> event.headline
            'step 300: blocks.2.norm.weight was written by something else than the optimizer'
        """
        where = f" ({self.source})" if self.source else ""
        ranks = f" on {ranks_in_words(self.ranks)}" if self.ranks else ""
        line = f"step {self.step}{ranks}: {WORDS[self.cause].format(self.what + where)}"
        if self.lead > 0:
            line += f"; the loss moved {self.lead} step{'s' * (self.lead > 1)} later"
        return line

    @property
    def verdict(self) -> list[str]:
        """The headline, the evidence and what was tried, in lines."""
        return [self.headline, *(f"  {line}" for line in (*self.evidence, *self.tried))]

    def to_dict(self) -> dict[str, Any]:
        """The event as plain data."""
        return dict(plain_data(self))
