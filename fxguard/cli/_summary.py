"""What a run has checked, as numbers and as one line. Knows nothing of torch."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Headroom", "Summary"]

NAMED = 3  # models that the line names


@dataclass(frozen=True, slots=True)
class Headroom:
    """How far one operation stayed below the limit of its dtype."""

    times: float  # the limit divided by the largest magnitude; 1 or more
    where: str  # the operation and the magnitude


@dataclass(slots=True)
class Summary:
    """What was checked in one or several processes, by class of model."""

    batches: Counter[str] = field(default_factory=Counter)
    operations: dict[str, int] = field(default_factory=dict)  # that are checked in one batch
    unchecked: Counter[str] = field(default_factory=Counter)  # reasons
    least: Headroom | None = None
    detections: int = 0  # batches in which something was found
    underflows: int = 0  # those of them with an underflow
    processes: int = 0  # processes that are counted here
    idle_globs: set[str] | None = None  # of `ignore`, that matched nothing; None before any model

    def merge(self, other: Summary) -> None:
        """Add what another guard, or another process, has seen."""
        self.batches += other.batches
        for name, count in other.operations.items():
            self.operations[name] = max(self.operations.get(name, 0), count)
        self.unchecked += other.unchecked
        if other.least is not None and (self.least is None or other.least.times < self.least.times):
            self.least = other.least
        self.detections += other.detections
        self.underflows += other.underflows
        self.processes += other.processes
        if other.idle_globs is not None:
            before = other.idle_globs if self.idle_globs is None else self.idle_globs
            self.idle_globs = before & other.idle_globs

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain data for JSON."""
        least = None if self.least is None else [self.least.times, self.least.where]
        return {
            "batches": dict(self.batches),
            "operations": self.operations,
            "unchecked": dict(self.unchecked),
            "least": least,
            "detections": self.detections,
            "underflows": self.underflows,
            "idle_globs": None if self.idle_globs is None else sorted(self.idle_globs),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Summary:
        """The summary that :meth:`to_dict` turned into plain data."""
        return cls(
            batches=Counter(data["batches"]),
            operations=data["operations"],
            unchecked=Counter(data["unchecked"]),
            least=None if data["least"] is None else Headroom(*data["least"]),
            detections=data["detections"],
            underflows=data["underflows"],
            idle_globs=None if data["idle_globs"] is None else set(data["idle_globs"]),
            processes=1,
        )

    def line(self) -> str:
        """What was checked and found, the least headroom, and what was not checked, in one line."""
        if not self.batches:
            text = "no torch.nn.Module was called: nothing was checked"
        else:
            models = [self._model(name) for name, _ in self.batches.most_common(NAMED)]
            if (more := len(self.batches) - NAMED) > 0:
                models.append(f"{more} more")
            text = f"checked {', '.join(models)}"
            if self.processes > 1:
                text += f", in {self.processes} processes"
            counts = {
                "inf or NaN": self.detections - self.underflows,
                "underflow": self.underflows,
            }
            found = [f"found {what} in {count} of them" for what, count in counts.items() if count]
            text += f"; {', '.join(found) or 'nothing found'}"
        if self.least is not None:
            times = self.least.times
            shown = f"{times:.3g}" if times < 1000 else f"{10 ** math.floor(math.log10(times)):.0e}"
            text += f"; least headroom in a last batch: {shown} times, at {self.least.where}"
        if self.unchecked:
            reasons = [f"{count} {why}" for why, count in sorted(self.unchecked.items())]
            text += f"; not checked: {', '.join(reasons)}"
        for pattern in sorted(self.idle_globs or ()):
            text += f"; ignore={pattern!r} named nothing"
        return text

    def _model(self, name: str) -> str:
        batches, operations = self.batches[name], self.operations.get(name, 0)
        return (
            f"{batches} batch{'' if batches == 1 else 'es'} of {name} "
            f"({operations} operation{'' if operations == 1 else 's'})"
        )
