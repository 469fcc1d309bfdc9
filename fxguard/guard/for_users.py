"""What users can ask of a guarded model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from torch.nn import Module

from fxguard.errors import UsageError
from fxguard.findings import Origin
from fxguard.guard.coverage import NOTHING_YET, Coverage, coverage_of, not_judged_in
from fxguard.guard.delivery import Delivery
from fxguard.guard.recorder import Recorder
from fxguard.guard.selftest import merged, selftest_of
from fxguard.install.captures import Captures
from fxguard.install.names import Names
from fxguard.options import Options
from fxguard.plan.plan import Plan
from fxguard.records import Frame
from fxguard.report.quiet_fault import QuietFault
from fxguard.report.report import Report
from fxguard.report.self_test import SelfTest

__all__ = ["Guard"]


class Guard:
    """What is known of one instrumented model. :func:`guard_of` returns it.

    :class:`~fxguard.guard.guard.GuardedModel` is the rest of it, which runs at each call.

    Attributes:
        last_report: the :class:`Report` of the last detection, or None.
        optimizer_step: how many steps the optimizer has made, for reports; None if unknown. Set it
            in your training loop, or let an integration set it.
    """

    def __init__(
        self,
        model_name: str,
        recorder: Recorder,
        delivery: Delivery,
        names: Names,
        captures: Captures,
    ) -> None:
        self._model_name = model_name
        self._recorder, self._delivery = recorder, delivery
        self._names, self._captures = names, captures
        self._unchecked_calls: Counter[str] = Counter()  # reason to the number of calls
        self._breaks: Counter[str] = Counter()  # graph breaks by TorchDynamo's reason

    @property
    def model(self) -> Module:
        """The instrumented model. A guard does not keep it alive.

        Raises:
            FxguardError: when the model is gone.
        """
        return self._names.model

    def __repr__(self) -> str:
        what = f"{self._model_name}, batch {self.batch_number}"
        found = "nothing found" if self.last_report is None else self.last_report.message
        return f"<fxguard.types.Guard of {what}: {found}>"

    def __dir__(self) -> list[str]:
        return [name for name in dir(Guard) if name.startswith("__") or name[0] != "_"]

    @property
    def options(self) -> Options:
        """The options of :func:`instrument`."""
        return self._recorder.options

    @property
    def batch_number(self) -> int:
        """The number of the batch that is running, or else of the next one; counted from 0."""
        return self._recorder.batch_number

    @property
    def last_report(self) -> Report | None:
        """The report of the last detection."""
        return self._delivery.last_report

    @property
    def trace_path(self) -> Path | None:
        """The file that ``trace_to`` writes to; None before the first batch in it."""
        return next((x.path for x in self._recorder.listeners if x.path is not None), None)

    @property
    def history_folder(self) -> Path | None:
        """The folder that ``history`` writes to; None before the first step has ended."""
        return next((x.folder for x in self._recorder.listeners if x.folder is not None), None)

    @property
    def optimizer_step(self) -> int | None:
        """How many steps the optimizer has made."""
        return self._recorder.optimizer_step

    @optimizer_step.setter
    def optimizer_step(self, step: int | None) -> None:
        self._recorder.optimizer_step = step

    @property
    def notes(self) -> list[Origin]:
        """Findings that did no harm or that end no training, once for each operation.

        These are bad values that reached no output, and gradients that the scale of a loss made
        infinite. With ``"underflow"`` as their ``problem``, they are also gradients that float16
        made 0, and operations that underflow in a traced batch.
        """
        return list(self._recorder.notes.values())

    @property
    def quiet_faults(self) -> list[QuietFault]:
        """What is wrong with the training that raises nothing and makes no NaN, each once.

        Some faults can be told at the end of a training only: when the guard is removed.
        """
        listeners = self._recorder.listeners
        return [fault for listener in listeners for fault in listener.quiet_faults]

    def frames(self) -> list[Frame]:
        """All frames of the last batch that finished; empty before the first.

        Raises:
            FxguardError: with ``replay=True`` or ``full_every``, if only what left the graphs of
                that batch was measured, and was healthy.
        """
        return self._recorder.last_frames_of_all()

    def coverage(self) -> str:
        """One line that says how many operations were checked, and which were not.

        It counts each captured graph once, and operations that ran between graphs in the last
        batch, with the number of graph breaks and TorchDynamo's reasons. Then it names what was not
        checked: calls of the model, the operation behind a bad gradient, the harm that an absorbed
        NaN does, and with ``underflow=`` operations that could not be judged.

        Example:
            >>> fxguard.guard_of(model).coverage()
            'checked 171 of 171 operations in 1 graph'
        """
        line = NOTHING_YET
        if self._recorder.last_batch is not None:
            recorder = self._recorder
            graphs = [graph for graph, _, _ in self._captures.graphs()]
            when = recorder.measured_in_full.in_words(recorder.next_number, graphs)
            line = self._counted().in_words(when)
        if self._breaks:
            count = self._breaks.total()
            reasons = ", ".join(sorted(self._breaks))
            line += f"; {count} graph break{'' if count == 1 else 's'}: {reasons}"
        for reason, count in sorted(self._unchecked_calls.items()):
            line += f"; not checked: {count} call{'' if count == 1 else 's'} {reason}"
        for reason, count in sorted(self._delivery.not_searched.items()):
            line += (
                f"; {count} bad gradient{'' if count == 1 else 's'} without an operation: {reason}"
            )
        line += not_judged_in(self._recorder.notes.values())
        return line + "".join(listener.coverage() for listener in self._recorder.listeners)

    @property
    def plans(self) -> list[Plan]:
        """The plan of every graph that was captured."""
        return self._captures.plans

    def selftest(self) -> SelfTest:
        """Plant a NaN in every measured value of the captured graphs, and look for it.

        Each graph is compiled again with the model's own backend, and runs once for each of its
        values, with the model's weights and made-up inputs. The model, its batches and its
        gradients are not touched.

        Returns:
            How many were found and blamed on the operation where they were planted.

        Raises:
            FxguardError: before the first batch has finished.

        Example:
            >>> model(**batch)
            >>> print(fxguard.guard_of(model).selftest())
            found 171 of 171 planted NaN in 1 graph
        """
        last = self._recorder.last_batch
        if last is None:
            raise UsageError("no batch has finished yet: call the model once, then selftest()")
        tensors = self._names.tensors_by_name()
        results = [
            selftest_of(
                graph,
                plan,
                backend,
                tensors,
                [run.running_name for run in last.runs_of(plan)] or [str],
            )
            for graph, plan, backend in self._captures.graphs()
        ]
        return merged(results, self._counted().between)

    def _counted(self) -> Coverage:
        return coverage_of(self.plans, self._recorder.last_batch)
