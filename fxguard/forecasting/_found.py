"""Failures in the graphs of a model, and the ranges of what its operations read and make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from fxguard.batch.events import GraphRun
from fxguard.capture.keeping import named_steps, titles_of
from fxguard.forecasting._failure import Failure, Failures
from fxguard.plan.plan import Place, Step
from fxguard.records import Frame, Row, title_of
from fxguard.report.forecast import Forecast, ForecastRow
from fxguard.report.precision_plan import PrecisionPlan

__all__ = ["Found"]

# Each failure by its name: an operation, with its step; a weight, an input or an output.
_Listed = dict[str, tuple[Failure, Step | None]]


class Found:
    """Gathers findings of one forward and its backward, over all graphs.

    Attributes:
        forward: what fails.
        backward: operations that return a failing gradient.
        not_judged: operations without a second form, and why.
        operations: how many were examined.
    """

    def __init__(self) -> None:
        self.forward: _Listed = {}
        self.backward: _Listed = {}
        self.not_judged: dict[str, str] = {}
        self.operations = 0
        self._frames: dict[tuple[str, bool], Frame] = {}  # by title, and whether of the backward

    @property
    def given(self) -> list[str]:
        """The weights and inputs that the dtype cannot hold."""
        return [title for title, (_, step) in self.forward.items() if step is None]

    def add(self, run: GraphRun, failures: Failures, *, backward: bool = False) -> None:
        """Add the failures of a run; an operation keeps its worst failure."""
        steps = {(step.inside, step.node): step for step in run.plan.steps if step.counts}
        titles = titles_of(run)
        listed = self.backward if backward else self.forward
        for place, failure in failures.found.items():
            title = titles.get(place, failures.kinds[place])
            known = listed.get(title)
            if known is None or known[0].severity < failure.severity:
                listed[title] = failure, steps.get(place)
        for place, why in failures.not_judged.items():
            title = titles.get(place, failures.kinds[place])
            self.not_judged[f"backward of {title}" if backward else title] = why

    def add_frames(
        self, run: GraphRun, rows: Mapping[Place, Sequence[Row]], *, backward: bool = False
    ) -> None:
        """Add the float64 ranges of a run's operations; those of a backward from its end."""
        named = list(named_steps(run))
        phase = "backward" if backward else "forward"
        for module, kind, step in reversed(named) if backward else named:
            found = rows.get((step.inside, step.node))
            if found:
                self._show(Frame(module, kind, True, tuple(found), step.source, phase=phase))

    def _show(self, frame: Frame) -> None:
        """Add a frame; an operation that ran before gets the ranges of both runs."""
        key = title_of(frame.name, frame.kind), frame.phase == "backward"
        known = self._frames.get(key)
        if known is not None and len(known.rows) == len(frame.rows):
            rows = tuple(map(_widest, known.rows, frame.rows))
            frame = dataclasses.replace(frame, rows=rows)
        self._frames[key] = frame

    def forecast(
        self,
        dtype: str,
        between: int,
        planner: Callable[[bool, float | None], PrecisionPlan] | None = None,
    ) -> Forecast:
        """The findings as a forecast, the worst first.

        Args:
            dtype: the name of the dtype.
            between: how many operations ran between graphs.
            planner: finds out what to keep in float32.
        """
        rows = [
            ForecastRow(
                title,
                source=None if step is None else step.source,
                backward=listed is self.backward,
                is_operation=step is not None,
                **dataclasses.asdict(failure),
            )
            for listed in (self.forward, self.backward)
            for title, (failure, step) in sorted(listed.items(), key=_severity, reverse=True)
        ]
        frames = [
            dataclasses.replace(frame, index=index)
            for index, frame in enumerate(self._frames.values())
        ]
        return Forecast(
            dtype,
            tuple(rows),
            self.operations,
            between,
            tuple(self.not_judged.items()),
            tuple(frames),
            planner,
        )


def _severity(item: tuple[str, tuple[Failure, Step | None]]) -> tuple[int, float]:
    return item[1][0].severity


def _widest(one: Row, other: Row) -> Row:
    if one.abs_min is None or one.abs_max is None or other.abs_min is None or other.abs_max is None:
        return other
    low, high = min(one.abs_min, other.abs_min), max(one.abs_max, other.abs_max)
    return dataclasses.replace(other, abs_min=low, abs_max=high)
