"""What a run has checked, as numbers and as one line. Knows nothing of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Headroom", "Summary"]

NAMED = 3  # models that the line names
NEAR = 1000.0  # times: headroom from here on is no news


@dataclass(frozen=True, slots=True)
class Headroom:
    """How far one operation stayed below the limit of its dtype."""

    times: float  # the limit divided by the largest magnitude; 1 or more
    title: str  # of the operation
    largest: float  # the largest magnitude that it made
    dtype: str

    def __str__(self) -> str:
        """``float16: the largest value of the last batch was 81.4, at fc linear: ...``."""
        return (
            f"{self.dtype}: the largest value of the last batch was {self.largest:.3g}, at "
            f"{self.title}: {self.times:.3g} times below the limit"
        )


@dataclass(slots=True)
class Summary:
    """What was checked in one or several processes, by class of model."""

    batches: Counter[str] = field(default_factory=Counter)
    weights: dict[str, int] = field(default_factory=dict)  # elements of the largest of each class
    without_weights: int = 0  # modules that have none
    operations: dict[str, int] = field(default_factory=dict)  # that are checked in one batch
    beside: int = 0  # operations that were checked in scripts without a model
    unchecked: Counter[str] = field(default_factory=Counter)  # reasons
    least: Headroom | None = None
    detections: int = 0  # batches in which something was found
    underflows: int = 0  # those of them with an underflow
    processes: int = 0  # processes that are counted here
    unfinished: int = 0  # processes that ended, or still run, without a last word
    traced: tuple[int, ...] | None = None  # batches to trace, so that nothing was judged
    seen_traced: set[int] = field(default_factory=set)  # those of them that a model has run
    traced_bad: str = ""  # where the first inf or NaN in a traced batch is
    idle_globs: set[str] | None = None  # of `ignore`, that matched nothing; None before any model

    def merge(self, other: Summary) -> None:
        """Add what another guard, or another process, has seen."""
        self.batches += other.batches
        for name, count in other.operations.items():
            self.operations[name] = max(self.operations.get(name, 0), count)
        for name, count in other.weights.items():
            self.weights[name] = max(self.weights.get(name, 0), count)
        self.without_weights += other.without_weights
        self.beside += other.beside
        self.unchecked += other.unchecked
        if other.least is not None and (self.least is None or other.least.times < self.least.times):
            self.least = other.least
        self.detections += other.detections
        self.underflows += other.underflows
        self.processes += other.processes
        self.unfinished += other.unfinished
        self.traced = other.traced if self.traced is None else self.traced
        self.seen_traced |= other.seen_traced
        self.traced_bad = self.traced_bad or other.traced_bad
        if other.idle_globs is not None:
            before = other.idle_globs if self.idle_globs is None else self.idle_globs
            self.idle_globs = before & other.idle_globs

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain data for JSON."""
        least = None if self.least is None else asdict(self.least)
        return {
            "batches": dict(self.batches),
            "weights": self.weights,
            "without_weights": self.without_weights,
            "operations": self.operations,
            "beside": self.beside,
            "unchecked": dict(self.unchecked),
            "least": least,
            "detections": self.detections,
            "underflows": self.underflows,
            "processes": self.processes,
            "unfinished": self.unfinished,
            "traced": None if self.traced is None else list(self.traced),
            "seen_traced": sorted(self.seen_traced),
            "traced_bad": self.traced_bad,
            "idle_globs": None if self.idle_globs is None else sorted(self.idle_globs),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Summary:
        """The summary that :meth:`to_dict` turned into plain data."""
        return cls(
            batches=Counter(data["batches"]),
            weights=data["weights"],
            without_weights=data["without_weights"],
            operations=data["operations"],
            beside=data["beside"],
            unchecked=Counter(data["unchecked"]),
            least=None if data["least"] is None else Headroom(**data["least"]),
            detections=data["detections"],
            underflows=data["underflows"],
            unfinished=data["unfinished"],
            traced=None if data["traced"] is None else tuple(data["traced"]),
            seen_traced=set(data["seen_traced"]),
            traced_bad=data["traced_bad"],
            idle_globs=None if data["idle_globs"] is None else set(data["idle_globs"]),
            processes=1,
        )

    def line(self, noted: int = 0) -> str:
        """What was checked and found, a narrow headroom, and what was not checked, in one line.

        Args:
            noted: how many quiet faults are told above it.
        """
        nothing = "nothing else found" if noted else "nothing found"
        if not self.batches:
            text = "no torch.nn.Module was called: "
            if self.beside:
                found = "found inf or NaN" if self.detections else nothing
                text += f"checked {self.beside} operations of the script; {found}"
            else:
                text += "nothing was checked"
        else:
            text = f"{self._models()}; {self._found() or nothing}"
        if self.least is not None and self.least.times < NEAR:
            text += f"; {self.least}"
        if self.unchecked:
            reasons = [
                f"{count} {why.replace('operations', 'operation', 1) if count == 1 else why}"
                for why, count in sorted(self.unchecked.items())
            ]
            text += f"; not checked: {', '.join(reasons)}"
        for pattern in sorted(self.idle_globs or ()):
            text += f"; ignore={pattern!r} named nothing"
        return text

    def _models(self) -> str:
        """Models with weights by size, and how many modules have none."""
        with_weights = [name for name in self.batches if self.weights.get(name)]
        named = with_weights or list(self.batches)
        named.sort(key=lambda name: (-self.weights.get(name, 0), -self.batches[name], name))
        models = [self._model(name) for name in named[:NAMED]]
        if (more := len(named) - NAMED) > 0:
            models.append(f"{more} more")
        text = "ran" if self.traced is not None else "checked"
        text += f" {'at least ' if self.unfinished else ''}{', '.join(models)}"
        if with_weights and (bare := self.without_weights):
            text += f" and {bare} module{'' if bare == 1 else 's'} without weights"
        if self.processes > 1:
            text += f", in {self.processes} processes"
        return text

    def _found(self) -> str:
        if self.traced is not None:
            return self._in_trace()
        counts = {
            "inf or NaN": self.detections - self.underflows,
            "underflow": self.underflows,
        }
        found = [f"found {what} in {count} of them" for what, count in counts.items() if count]
        return ", ".join(found)

    def _in_trace(self) -> str:
        """What is known if batches were traced, which turns detection off."""
        text = "detection was off, because batches were traced: "
        if not self.seen_traced:
            return text + f"none of {_numbers(self.traced or ())} ran"
        if self.traced_bad:
            return text + f"the trace holds inf or NaN, first in {self.traced_bad}"
        batches = _numbers(sorted(self.seen_traced))
        return text + f"in the trace of {batches} every output is finite"

    def _model(self, name: str) -> str:
        batches, operations = self.batches[name], self.operations.get(name, 0)
        return (
            f"{batches} batch{'' if batches == 1 else 'es'} of {name} "
            f"({operations} operation{'' if operations == 1 else 's'})"
        )


def _numbers(batches: Sequence[int]) -> str:
    return f"batch{'' if len(batches) == 1 else 'es'} {', '.join(map(str, batches))}"
