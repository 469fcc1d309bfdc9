"""A quiet fault of a training step: nothing is inf or NaN, and it trains badly or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fxguard.report.strict_json import plain_data

__all__ = ["FaultKind", "QuietFault"]

FaultKind = Literal[
    "lost updates",
    "never moves",
    "replicas differ",
    "dropout in evaluation",
    "evaluation mode in training",
    "stale gradients",
    "clipped before unscaled",
    "broadcast loss",
    "applied twice",
    "mixes samples",
    "does not repeat",
]


@dataclass(frozen=True, slots=True)
class QuietFault:
    """Something that is wrong with a training, and that raises nothing and makes no NaN."""

    kind: FaultKind
    what: str  # what it is about: "the gradient of fc.weight", "cross_entropy"
    source: str = ""  # "train.py:31"; "" if no line is known
    evidence: str = ""  # what was seen, with numbers
    advice: str = ""  # what to do
    step: int = 0  # how many steps the optimizer had made when it was found

    def __str__(self) -> str:
        return self.line

    @property
    def line(self) -> str:
        """The fault in one line.

        Example:
            >>> fault.line
            'applied twice: cross_entropy reads the result of softmax (train.py:9): ...'
        """
        where = f" ({self.source})" if self.source else ""
        evidence = f": {self.evidence}" if self.evidence else ""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.kind}: {self.what}{where}{evidence}{advice}"

    def to_dict(self) -> dict[str, Any]:
        """The fault as plain data."""
        return dict(plain_data(self))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> QuietFault:
        """The fault that :meth:`to_dict` turned into plain data."""
        return cls(**data)
