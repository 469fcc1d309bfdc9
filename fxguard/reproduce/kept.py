"""Keeps the operation that each report blames, and writes it as a test if that was asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fxguard.batch.batch import Batch
from fxguard.batch.keys import Key
from fxguard.batch.watchers import BatchWatcher
from fxguard.forgiving import theirs
from fxguard.graph.one_operation import OneOperation
from fxguard.graph.operations import Call
from fxguard.guard.detection import Detection
from fxguard.guard.listeners import Listener
from fxguard.ranks import agreement
from fxguard.report import terminal
from fxguard.report.report import Report
from fxguard.reproduce.reproducible import kept_of
from fxguard.verdict.first_gradient import FirstGradient
from fxguard.verdict.first_origin import FirstOrigin

__all__ = ["Reproducers"]


class Operands(BatchWatcher):
    """Copies of what operations between graphs read that made something bad."""

    def __init__(self) -> None:
        self.operations: dict[Key, OneOperation] = {}

    def of_loss(self) -> Operands:
        """The same for a loss."""
        return Operands()

    def turned_bad(
        self, call: Call, function: Callable[..., Any], path: tuple[int, ...], key: Key
    ) -> None:
        """Copy the operands now: the script may write them."""
        operation = OneOperation.now(call, function, path)
        copies = [x.detach().clone() for x in operation.tensors]
        self.operations[key] = operation.with_tensors(copies)

    def renamed(self, keys: Mapping[Key, Key]) -> None:
        """Rename the keys."""
        self.operations = {keys[key]: x for key, x in self.operations.items() if key in keys}


class Reproducers(Listener):
    """The operation of the first origin of each report, for :meth:`Report.reproduce`."""

    def begins(self, batch: Batch) -> None:
        """Copy operands between graphs only for a test that is going to be written."""
        if self.options.reproduce_to is not None:
            batch.watchers.append(Operands())

    def reports(self, report: Report, first: FirstOrigin) -> Report:
        """The report, which keeps its operation."""
        between = first.batch.watcher(Operands)
        operation = first.operation
        if operation is None and between is not None:
            operation = between.operations.get(first.key)
        return replace(report, kept=kept_of(first.origin, operation))

    def reports_backward(self, report: Report, first: FirstGradient) -> Report:
        """The same of a backward."""
        return replace(report, kept=kept_of(first.origin, first.operation))

    def told(self, detection: Detection) -> None:
        """Write the operation as a test, and print where, or why not."""
        report, folder = detection.report, self.options.reproduce_to
        if not detection.is_new or report.rank != agreement.current_rank() or folder is None:
            return
        if not agreement.is_first_to_tell(f"test of {report.origins[0].message}"):
            return  # another rank writes it
        try:
            path = report.reproduce(folder, ranges_only=self.options.reproduce_ranges_only)
            text = f"fxguard: {path} fails as the model did: pytest {path}"
        except theirs() as error:  # the report matters more
            text = f"fxguard: no test was written: {error}"
        terminal.write(text, getattr(sys, detection.stream))
