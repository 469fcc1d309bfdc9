"""Many results to few numbers: means over models, and what fxguard is to cost at most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.cases import FORWARD, TRAINING, Result
from harness.models import MLP
from harness.timing import geometric_mean
from harness.tools import EAGER, FXGUARD, REPLAY

__all__ = [
    "FIRST_CALL",
    "FIXED",
    "MEMORY",
    "TIME",
    "Score",
    "Target",
    "scores",
    "targets",
]

# What is scored: times the plain model's, and for the last one microseconds above it.
TIME, FIRST_CALL, MEMORY, FIXED = "time", "first call", "peak memory", "fixed cost in µs"


@dataclass(frozen=True, slots=True)
class Score:
    """One number for a tool.

    Attributes:
        value: the geometric mean over models of the median ratios to the plain model; for the
            fixed cost the median of the tiny MLP.
        models: over how many.
    """

    what: str
    mode: str
    work: str
    dtype: str
    tool: str
    value: float
    models: int


def scores(results: Iterable[Result]) -> list[Score]:
    """Everything that is scored, for each tool but the plain model itself."""
    values: dict[tuple[str, str, str, str, str], list[float]] = {}
    for result in results:
        case, plain = result.case, result.plain
        for tool in result.tools[1:]:
            if case.model == MLP:
                found = {FIXED: tool.over_plain.median * 1e6}
            else:
                found = {TIME: tool.ratio.median, MEMORY: tool.peak_bytes / plain.peak_bytes}
                if case.mode not in EAGER:  # there the plain model's is a call as any other
                    found[FIRST_CALL] = tool.first.cpu_s / plain.first.cpu_s
            for what, value in found.items():
                key = (what, case.mode, case.work, case.dtype, tool.tool)
                values.setdefault(key, []).append(value)
    return [
        Score(*key, found[0] if key[0] == FIXED else geometric_mean(found), len(found))
        for key, found in values.items()
    ]


@dataclass(frozen=True, slots=True)
class Target:
    """What fxguard is to cost at most; an empty mode, work or tool stands for any."""

    what: str
    most: float
    mode: str = ""
    work: str = ""
    tool: str = ""

    def covers(self, score: Score) -> bool:
        """Whether a score is held against this."""
        return (
            score.what == self.what
            and score.tool.startswith(FXGUARD)
            and self.mode in ("", score.mode)
            and self.work in ("", score.work)
            and self.tool in ("", score.tool)
        )


TARGETS = (
    Target(TIME, 1.03, "eager", FORWARD),
    Target(TIME, 1.015, "eager", TRAINING),
    Target(TIME, 1.04, "inductor", FORWARD),
    Target(TIME, 1.02, "inductor", TRAINING),
    Target(FIRST_CALL, 1.4, "inductor"),
    Target(MEMORY, 1.02),
    Target(FIXED, 60.0, "eager", FORWARD, FXGUARD),
    Target(FIXED, 40.0, "eager", FORWARD, REPLAY),
)


def targets(found: Sequence[Score]) -> list[tuple[Target, Score]]:
    """Each target with each score that is held against it."""
    return [(target, score) for target in TARGETS for score in found if target.covers(score)]
