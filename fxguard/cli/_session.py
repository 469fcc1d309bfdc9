"""One run of a script: what this process and its child processes have checked and found."""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing.util
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from torch.nn import Module

from fxguard.api.outermost import OutermostModules
from fxguard.batch.assemble import assemble
from fxguard.cli._ending import last_line, say
from fxguard.cli._processes import Note, Notes
from fxguard.cli._settings import options_of
from fxguard.cli._summary import Headroom, Summary
from fxguard.cli._terminated import Terminated
from fxguard.cli._warnings import Warnings
from fxguard.forgiving import where_theirs_may_raise
from fxguard.formats import FORMATS, headroom
from fxguard.graph.tables import MOVES, SELECTS, UNINITIALISED
from fxguard.guard.guard import GuardedModel
from fxguard.ranks.agreement import current_rank
from fxguard.records import Range
from fxguard.report.error_budget import ErrorBudget
from fxguard.report.forecast import Forecast
from fxguard.report.recorded_step import RecordedStep
from fxguard.report.report import Report
from fxguard.tracing.traces import Traces

__all__ = ["Session"]

NOTE_PERIOD = 1.0  # seconds between two notes of a process

__tracebackhide__ = True  # by pytest: it shows the test, and where the model was called


class Session:
    """The watched run, in this process and in its child processes.

    Args:
        settings: the options of :func:`fxguard.instrument`, and ``report``, a file for the last
            report.

    Raises:
        FxguardError: when the options cannot work.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        options = options_of(settings)
        self.settings = settings
        self.stops = options.on_detect == "raise"
        self.report_file = settings.get("report")
        self.notes = Notes()
        self.outermost = OutermostModules(
            options,
            on_report=self._found,
            on_batch=self._ran,
            on_drop=self._dropped,
            on_refusal=self._refused,
            follow_losses=True,
        )
        self.terminated = Terminated(self._last_word)
        self.warnings = Warnings()
        self._begin()
        os.register_at_fork(after_in_child=self._forked)

    def _begin(self) -> None:
        self._past = Note(Summary())  # what guards that no longer exist have seen
        self._last_report: Report | None = None
        # Modules without weights. They are counted once each, while they live.
        self._bare: WeakValueDictionary[int, Module] = WeakValueDictionary()
        self._counted: WeakSet[GuardedModel] = WeakSet()  # guards of such modules
        self._bare_count = 0
        self._left = -math.inf  # when this process last left a note

    def _forked(self) -> None:
        self._begin()
        self.outermost.forget()

    @contextlib.contextmanager
    def watching(self) -> Iterator[Session]:
        """Guard the outermost modules, here and in child processes that are started meanwhile.

        Here, in the thread that calls this, a script without a model is looked at, too.
        """
        self.outermost.looks_beside = True
        with (
            self.notes.told_to_children(self.settings),
            self.warnings,
            self.outermost,
            self.terminated.heard(),
        ):
            yield self

    def note(self) -> Note:
        """What this process has checked and found."""
        summary = Summary()
        summary.merge(self._past.summary)
        for guard in self.outermost.guards:
            summary.merge(self._summary_of(guard))
        summary.processes = 1 if summary.batches else 0
        summary.without_weights = self._bare_count
        summary.beside = self.outermost.beside
        summary.unchecked += Counter({"operations of the script": self.outermost.unseen})
        report = None if self._last_report is None else self._last_report.to_dict()
        note = Note(summary, list(self._past.detections), report, list(self._past.quiet_faults))
        for guard in self.outermost.guards:
            note.add_faults(guard.quiet_faults)
        return note

    def close(self) -> Note:
        """What this process and all others have checked and found."""
        for guard in self.outermost.guards:
            guard.tools_end()
        found = self.note()
        if self.notes.is_owner:
            others = self.notes.read()
            found.summary.merge(others.summary)
            found.detections += others.detections
            found.report = found.report or others.report
            found.add_faults(others.quiet_faults)
            self.notes.remove()
        return found

    @property
    def last_report(self) -> Report | None:
        """The last report of this process."""
        return self._last_report

    @property
    def offers(self) -> list[str]:
        """What can be done with the files that this process has written, in lines."""
        guards = self.outermost.guards
        traces = [guard.trace_path for guard in guards if guard.trace_path is not None]
        folders = {guard.history_folder for guard in guards if guard.history_folder is not None}
        histories = sorted(x for x in folders if x.parent not in folders)
        first = os.environ.get("RANK", "0") == "0"  # ranks write into the same folder
        return [
            *(f"for a page of the whole batch: fxguard report {path}" for path in traces),
            *(f"for the whole run: fxguard history {path}" for path in histories if first),
        ]

    def _last_word(self) -> None:
        """Say what was checked, before a signal ends this process."""
        with where_theirs_may_raise():  # files of other processes; the signal ends this one anyway
            note = self.close()
            if note.summary.batches:
                last_line(note, flush=False)  # without fxguard, buffered output would be lost, too

    # What happens.

    def _found(self, report: Report) -> None:
        self._past.summary.detections += 1
        self._past.summary.underflows += report.origins[0].problem == "underflow"
        if self.stops:
            self._past.detections.append(report.advice)
        self._last_report = replace(report, kept=None)  # which holds operands
        if self.report_file is not None and report.rank == current_rank():
            write(report, Path(self.report_file))  # else the rank with the detection writes it
        if not self.notes.is_owner:
            self.notes.leave(self.note())

    def _ran(self) -> None:
        if self.notes.is_owner:
            if self.terminated.listens and current_rank() is not None:
                self.terminated.stop()  # from now on it may wait for other ranks
            return
        if (now := time.monotonic()) < self._left + NOTE_PERIOD:
            return
        if self._left == -math.inf:
            # A process of multiprocessing ends without the functions of atexit.
            multiprocessing.util.Finalize(None, self._leave_note, exitpriority=0)
            atexit.register(self._leave_note)
        self._left = now
        # This may be the last word of a process that is killed, or ends by os._exit.
        note = self.note()
        note.summary.unfinished = 1
        self.notes.leave(note)

    def _leave_note(self) -> None:
        self.notes.leave(self.note())

    def _dropped(self, guard: GuardedModel) -> None:
        self._past.summary.merge(self._summary_of(guard))
        guard.tools_end()
        self._past.add_faults(guard.quiet_faults)

    def _refused(self, name: str, reason: str) -> None:
        self._past.summary.unchecked[f"{name} ({reason})"] += 1

    def _summary_of(self, guard: GuardedModel) -> Summary:
        """What a guard has seen."""
        model, found = guard.reference(), summary_of(guard)
        if not any(found.weights.values()) and guard not in self._counted:
            self._counted.add(guard)
            self._bare_count += model is None or self._bare.get(id(model)) is not model
            if model is not None:
                self._bare[id(model)] = model
        return found


def summary_of(guard: GuardedModel) -> Summary:
    """What a guard has seen."""
    name = guard.recorder.held_as or guard.model_name
    counted, idle = guard.counted(), guard.idle_globs()
    traces, traced = guard.recorder.listener(Traces), tuple(guard.options.trace_batch_nums)
    batches = guard.recorder.next_number
    unchecked = Counter({f"{why} in {name}": count for why, count in counted.unchecked.items()})
    if guard.options.postpones:
        left = batches - guard.recorder.measured_in_full.batches
        unchecked[f"batches of {name}, but for what left their graphs"] += left
    return Summary(
        batches=Counter({name: batches}),
        weights={name: guard.names.count_weights()},
        traced=traced or None,
        seen_traced=set() if traces is None else set(traces.seen),
        traced_bad="" if traces is None else traces.first_bad,
        operations={name: counted.checked},
        unchecked=+unchecked,
        least=headroom_of(guard),
        idle_globs=None if idle is None else set(idle),
    )


def headroom_of(guard: GuardedModel) -> Headroom | None:
    """The least headroom of the last batch; None if nothing was measured in it."""
    batch = guard.recorder.last_batch
    if batch is None or batch.postponed:
        return None
    flow = assemble(batch)
    least: Headroom | None = None
    unwritten: set[int] = set()  # values out of `torch.empty`
    for step in flow.steps:
        if step.kind in UNINITIALISED or (
            step.kind in MOVES | SELECTS and unwritten.issuperset(step.inputs[:1] or (-1,))
        ):
            unwritten.update(step.outputs)
        for value in step.outputs:
            number, dtype = flow.ranges[value], flow.values[value].dtype
            if value in unwritten or not isinstance(number, Range):
                continue
            if not math.isfinite(headroom(dtype, number.abs_max)):
                continue
            times = FORMATS[dtype].max / number.abs_max
            if least is None or times < least.times:
                least = Headroom(times, step.title, number.abs_max, dtype)
    return least


def write(report: Report | Forecast | ErrorBudget | RecordedStep, path: Path) -> None:
    """Write a record in the format that the file's name asks for."""
    try:
        if path.suffix == ".html" and not isinstance(report, RecordedStep):
            report.to_html(path)
            return
        text = report.to_json(indent=2) if path.suffix == ".json" else str(report)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        say(f"the report could not be written: {error}")
