"""Bad results of modules without parameters, such as metrics, wait until something comes of them.

A metric divides by the number of samples of a class that did not occur, and the script prints NaN.
No training is harmed by that. So once a script has called a model, the report on a module without
parameters is withheld. It is handed on when a gradient reaches what the module returned, or when a
model reads that and turns bad.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from fxguard.batch.late_outputs import LateOutputs
from fxguard.forgiving import or_else
from fxguard.graph import nodes
from fxguard.guard.detection import Seen
from fxguard.report import terminal
from fxguard.report.report import Report
from fxguard.source.range_tests import range_test_now
from fxguard.torch_names import DisableTorchFunction

__all__ = ["Withheld"]

KEPT = 64  # reports; later ones take the places of the first

RANGE = "note: {}; the loop at {} raises the learning rate until then, and loads the weights again"
NOTE = "note: {}; nothing is stopped unless a model or its loss turns bad"
BEFORE = "before that, {}: perhaps it comes from there"


class Withheld:
    """The reports that are withheld in one script. It keeps no tensor alive."""

    def __init__(self) -> None:
        self.has_model = False  # whether a module with parameters has been called
        # What a script has computed beside its models, where a report is on what they were given.
        self.made_beside: Callable[[Report], Report | None] = lambda report: None
        # How many steps the script's optimizers have made; None if it has none.
        self.steps_made: Callable[[], int | None] = lambda: None
        self._reports: deque[tuple[LateOutputs, Report]] = deque(maxlen=KEPT)  # what was returned
        self._said = Seen()
        self._range_tests: set[tuple[str, int]] = set()  # loops that were noted
        self._here = threading.local()

    def withholds(self, report: Report, hand_on: Callable[[Report], object], stream: str) -> bool:
        """Whether the report on a module without parameters is withheld. It is noted once.

        Args:
            report: what was found.
            hand_on: a method that is called with the report if it matters later.
            stream: name of the stream of ``sys`` where it is noted.
        """
        if not self.has_model:
            return False
        self._here.report = report, weakref.WeakMethod(hand_on)  # type: ignore[arg-type] # it is
        if self._said.adds(report.origins):
            terminal.write(NOTE.format(report.origins[0].message), getattr(sys, stream))
        return True

    def is_range_test(self, report: Report, stream: str) -> bool:
        """Whether a learning-rate range test runs, which ends with what was found; noted once.

        Args:
            report: what was found.
            stream: name of the stream of ``sys`` where it is noted.
        """
        loop = or_else(None, range_test_now)
        if loop is None:
            return False
        if loop.position not in self._range_tests:
            self._range_tests.add(loop.position)
            text = RANGE.format(report.origins[0].message, loop.place)
            terminal.write(text, getattr(sys, stream))
        return True

    def returned(self, output: Any) -> None:
        """Called when a module has returned to the script."""
        found: tuple[Report, Any] | None = getattr(self._here, "report", None)
        if found is None:
            return
        (report, hand_on), self._here.report = found, None
        returned, leaves = LateOutputs(), [x for x in nodes.leaves(output) if isinstance(x, Tensor)]
        returned.note(leaves)
        self._reports.append((returned, report))
        with DisableTorchFunction():
            for leaf in leaves:
                if leaf.requires_grad:
                    leaf.register_hook(_Reached(report, hand_on))

    def model_reads(self, args: Any, kwargs: Any) -> None:
        """Called with the arguments of a module, before its call."""
        if not self._reports:
            return
        read = [x for x in nodes.leaves((args, kwargs)) if isinstance(x, Tensor)]
        found = (known for returned, known in tuple(self._reports) if any(map(returned.has, read)))
        self._here.read = next(found, None)

    def instead(self, report: Report) -> Report:
        """What to report of a model with parameters: what was withheld, if that is what it read.

        The optimizer's step is told where it is not the number of the batch: a model may be called
        several times in a step.
        """
        found = self._instead(report)
        nothing: int | None = None
        steps = or_else(nothing, self.steps_made) if found.optimizer_step is None else None
        is_told = steps is None or steps == found.batch_number
        return found if is_told else replace(found, optimizer_step=steps)

    def _instead(self, report: Report) -> Report:
        if (beside := self.made_beside(report)) is not None:
            return beside
        if not self._reports or report.phase not in ("data", "loss"):
            return report
        read: Report | None = getattr(self._here, "read", None)
        if read is not None and report.origins[0].what.startswith("argument "):
            return read
        _, last = self._reports[-1]
        return replace(report, why=(*report.why, BEFORE.format(last.message)))


class _Reached:
    """A hook on what a module returned: a gradient has reached it."""

    def __init__(self, report: Report, hand_on: weakref.WeakMethod[Any]) -> None:
        self._report: Report | None = report
        self._hand_on = hand_on

    def __call__(self, _: Tensor) -> None:
        report, self._report = self._report, None
        hand_on = self._hand_on()
        if report is not None and hand_on is not None:
            hand_on(report)
