"""What happens when a batch has ended: its report is handed to each receiver."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from torch.nn import Module
from torch.optim.optimizer import Optimizer

from fxguard.batch.batch import Batch
from fxguard.batch.dataflow import joined
from fxguard.batch.kept_run import KeptRun
from fxguard.batch.loss import Loss
from fxguard.errors import BatchLimitReached, FxguardError
from fxguard.findings import Origin
from fxguard.forgiving import where_theirs_may_raise
from fxguard.graph.nodes import class_name
from fxguard.guard._receivers import Receiver, receivers_for
from fxguard.guard.coverage import idle_globs
from fxguard.guard.detection import Detection, Seen
from fxguard.guard.recorder import Recorder
from fxguard.guard.withheld import Withheld
from fxguard.plan.plan import Step
from fxguard.ranks import agreement
from fxguard.ranks.fsdp import is_sharded
from fxguard.ranks.gathering import Gather, gathered_for_one, nothing_gathered
from fxguard.records import Frame, Role
from fxguard.report import terminal
from fxguard.report.groups import by_cause
from fxguard.report.report import Report
from fxguard.report.text import absorbed_line
from fxguard.source.lines import source_of_caller, warn_user
from fxguard.steps.known_steps import KnownSteps
from fxguard.steps.loss_scale import LossScale
from fxguard.steps.optimizer_step import SteppedWeight, frame_of_step
from fxguard.steps.step_rules import Excused
from fxguard.verdict.backward_origins import BadLeaf
from fxguard.verdict.backward_report import COMPILED, NOT_KNOWN, Ended, ReportOfBackward
from fxguard.verdict.report_of import Finished

__all__ = ["Delivery", "raised_now"]

MOST_TOLD = 64  # batches that are remembered as having had a report

APART = "sync_ranks=True has no effect in a pipeline, whose stages run at different times"

__tracebackhide__ = True  # by pytest: it shows the test, and where the model was called


class Delivery:
    """Ends each batch of one recorder: judges it, and hands its report on.

    Args:
        recorder: the recorder whose batches end.
        stream: the stream of ``sys`` where reports are printed.

    Attributes:
        last_report: the report of the last detection, or None.
        heard: called with each report after it was handed on.
        withheld: the reports that are withheld in the script; None if none is.
        withholds: whether this model's reports may be.
        not_searched: why no operation was found for bad gradients, and how often.
        warns_of_idle_globs: whether a warning is still due for globs of ``ignore`` that name
            nothing in the first batch.
    """

    def __init__(self, recorder: Recorder, stream: str = "stderr") -> None:
        options = recorder.options
        self.recorder = recorder
        self.options = options
        self.last_report: Report | None = None
        self.heard: Callable[[Report], object] = lambda report: None
        self.withheld: Withheld | None = None
        self.withholds = False
        self.not_searched: Counter[str] = Counter()
        self.scale = LossScale(options.loss_scale)
        self.warns_of_idle_globs = bool(options.ignore)
        self._reported = Seen()
        self._lost: Report | None = None  # of lost gradients, until the ranks have agreed on it
        self._told: deque[int] = deque(maxlen=MOST_TOLD)
        self._not_judged = Seen()
        self._said_apart = False
        self.stream = stream
        self._receivers: list[Receiver] = list(receivers_for(options, recorder.listeners))

    @property
    def steps(self) -> KnownSteps:
        """What is known of the model's steps."""
        return self.recorder.steps

    @property
    def model(self) -> Module | None:
        """The model; None for the graphs of a backend, or if the model is gone."""
        return self.recorder.model

    @property
    def last_batch(self) -> Batch | None:
        """The last batch that has ended; None before the first."""
        return self.recorder.last_batch

    def note(self, origin: Origin) -> None:
        """Keep a finding that did no harm, once for each operation."""
        self.recorder.notes.setdefault(origin.message, origin)

    @property
    def syncs(self) -> bool:
        """Whether all ranks agree on what they found; those of a pipeline run at other times."""
        return self.options.sync_ranks and not self.recorder.stages

    @contextlib.contextmanager
    def batch(self, number: int | None = None) -> Iterator[Batch]:
        """A batch that begins here; this thread has released it at the end of the block.

        Args:
            number: number of the batch that it continues; None for a new batch.
        """
        try:
            yield self.recorder.begin(number)
        finally:
            self.recorder.here.batch = None

    def batch_ended(self) -> None:
        """Judge the batch that runs in this thread, close it, and hand its report on.

        Raises:
            NonFiniteError: when something was found and ``on_detect="raise"``.
            BatchLimitReached: when this was the last batch that was asked for.
        """
        number = self.part_ended()
        if self.warns_of_idle_globs:
            self._warn_of_idle_globs()
        if self.options.abort_after_batch_num is not None:
            self.stop_after(number)

    def part_ended(self) -> int:
        """Like :meth:`batch_ended`, for a possible part of a batch; returns the batch number."""
        finished = self.recorder.finish()
        number = finished.batch.number
        if self.options.sync_ranks and self.recorder.stages and not self._said_apart:
            self._said_apart = True
            warn_user(APART)
        for listener in self.recorder.listeners:
            listener.ended(finished)
        if finished.report is None and finished.absorbed:
            self._say_not_judged(finished)
        if finished.report is not None or self.syncs:
            self._deliver(finished, None)
        return number

    def batch_failed(self, error: Exception) -> None:
        """End a batch whose forward raised; the caller raises ``error`` again.

        Raises:
            NonFiniteError: with ``error`` as its cause, when a bad value had reached the operation
                that raised, or an output of a module.
        """
        batch = self.recorder.batch
        if isinstance(error, FxguardError) or self.options.trace_batch_nums or batch is None:
            return
        finished = Finished(batch)
        with where_theirs_may_raise():  # the device may be unable to answer; the error
            finished = self.recorder.finish_failed(error)  # itself matters more
        self._deliver(finished, error)

    def judge_loss(self, loss: Loss) -> None:
        """Report bad values that a script computed from outputs of the model, before its backward.

        Raises:
            NonFiniteError: if ``on_detect="raise"``.
        """
        last = self.recorder.last
        if last is None:
            return
        for listener in self.recorder.listeners:
            listener.loss_came(loss)
        if self.options.trace_batch_nums:
            return
        report = None
        number = loss.batch.number if self.recorder.stages else last.batch.number
        if number not in self._told:
            if not loss.is_fine():  # most are
                with loss.read() as batch:
                    report = self.recorder.finish_loss(batch).report
            if report is None and (severity := max(loss.bad_roots(), default=None)):
                report = self.recorder.report_of_loss(number, severity)
        self._deliver(Finished(last.batch, report=report), None)

    def hear_loss(self, loss: Loss) -> None:
        """Let tools hear of a loss that another model's guard judges."""
        for listener in self.recorder.listeners:
            listener.loss_heard(loss)

    def backward_ended(self, ended: Ended) -> None:
        """Report a backward that brought bad gradients to leaves of the model.

        Raises:
            NonFiniteError: if ``on_detect="raise"``.
        """
        kept = ended.kept
        for listener in self.recorder.listeners:
            listener.backward_ended(kept)
        if self.options.trace_batch_nums:
            return
        last = self.recorder.last
        batch = Batch(0) if last is None else last.batch
        number = kept[-1].batch_number if kept else self.recorder.number_in_pipeline(batch.number)
        if number != batch.number:
            batch = Batch(number)
        self._note_bad(ended.leaves, number)
        told = {batch.number, *(each.batch_number for each in kept)} & set(self._told)
        searches = (bool(ended.leaves) or ended.passes_on) and not told
        report = None
        if searches:
            returned = batch.returned_by_graphs()
            for run in kept:
                if run.batch_number == batch.number and not run.of_tape:
                    run.returned = returned.get(run.index, ())
        with self._gathering(searches) as gather:
            if searches:
                report = self.report_of_backward(batch.number, ended, gather)
        if report is None:
            report, self._lost = self._lost, None
        self._deliver(Finished(batch, report=report), None)

    def gradients_lost(self, origin: Origin, number: int) -> None:
        """Report gradients that are 0 because of their dtype.

        With ``sync_ranks`` they are reported in :meth:`backward_ended`, which all ranks call.

        Args:
            origin: names the gradients.
            number: number of their batch.

        Raises:
            NonFiniteError: if ``on_detect="raise"``.
        """
        last, frame = self.recorder.last, replace(origin.frame, batch_number=number)
        if last is None or number in self._told:
            return
        if self.options.ignores(Step(frame.kind, frame.name, (), ())):
            return
        batch = last.batch if last.batch.number == number else Batch(number)
        report = self.recorder.report_on(number, replace(origin, frame=frame))
        if self.syncs:
            self._lost = report
        else:
            self._tell(report, Finished(batch, report=report), None, None)

    def leaf_is_bad(self, leaf: BadLeaf) -> None:
        """Report a bad gradient in a backward that TorchDynamo compiled.

        Raises:
            NonFiniteError: if ``on_detect="raise"``.
        """
        last = self.recorder.last
        if self.options.trace_batch_nums or last is None or last.batch.number in self._told:
            return
        self._note_bad([leaf], last.batch.number)
        report = self.report_of_backward(last.batch.number, Ended([], [leaf], COMPILED))
        if report is not None:  # other ranks do not know of it, so this one does not wait for them
            self._tell(report, Finished(last.batch, report=report), None, None)

    def _note_bad(self, leaves: Iterable[BadLeaf], number: int) -> None:
        for leaf in leaves:
            role, _, name = leaf.name.partition(" ")
            if role == Role.WEIGHT.value:
                self.steps.bad_gradients.setdefault(name, number)

    def stepped(self, optimizer: Optimizer, weights: Iterator[SteppedWeight]) -> None:
        """Called when an optimizer has made a step that tools may look at."""
        last = self.recorder.last if self.recorder.listeners else None
        if last is None:
            return
        number = last.batch.number

        def frames() -> list[Frame]:
            name, source = class_name(type(optimizer)), source_of_caller()
            named = enumerate(map(self._of_model, weights))
            return [frame_of_step(name, each, source, number, i) for i, each in named]

        for listener in self.recorder.listeners:
            listener.stepped(number, frames)

    def weights_spoilt(
        self, describe: Callable[[int], Origin], *, brought_in: int | None = None
    ) -> None:
        """Report weights that were made bad after a backward.

        Args:
            describe: makes the origin, given the number of the last batch.
            brought_in: the batch whose backward brought the bad gradient; None for none.

        Raises:
            NonFiniteError: if ``on_detect="raise"``.
        """
        last = self.recorder.last
        if self.options.trace_batch_nums or last is None:
            return
        if last.batch.number in self._told or brought_in in self._told:
            return  # the gradients were bad, which was reported
        number = last.batch.number
        self.recorder.standing.step_was_made()  # weights are not what its frames read
        origin = describe(number)
        name = joined(self.recorder.held_as, origin.frame.name)
        spread = tuple(map(self._held, origin.spread))
        origin = replace(origin, frame=replace(origin.frame, name=name), spread=spread)
        report = self.recorder.report_on(number, origin)
        # Other ranks may hold other weights: they do not wait here for this one.
        self._tell(report, Finished(last.batch, report=report), None, None)

    def loss_scale(self, kept: Sequence[KeptRun]) -> float | None:
        """The scale of the loss whose gradients reached these runs; None if there is none."""
        return self.scale.now(self.steps.scalers, kept)

    def _gathering(self, asks: bool) -> contextlib.AbstractContextManager[Gather]:
        """Gather sharded weights for a second run; all ranks have to make this call."""
        model = self.recorder.model
        if self.syncs and model is not None and is_sharded(model):
            return gathered_for_one(model, asks)
        return contextlib.nullcontext(nothing_gathered)

    def report_of_backward(
        self, number: int, ended: Ended, gather: Gather = nothing_gathered
    ) -> Report | None:
        """What is to be said of a backward; None if nothing is.

        Args:
            number: number of its batch.
            ended: the backward.
            gather: gathers weights that a second run reads.
        """
        ended = replace(ended, leaves=[replace(x, name=self._held(x.name)) for x in ended.leaves])
        judge = ReportOfBackward(
            max_frames=self.options.max_frames_to_save,
            is_ignored=self.options.ignores,
            gather=gather,
            additions=[listener.reports_backward for listener in self.recorder.listeners],
        )
        scale = self.loss_scale(ended.kept)
        report, notes = judge(
            ended, self.recorder.earlier_frames, batch_number=number, loss_scale=scale
        )
        if report is None and scale is not None:
            made = next((each.message for each in notes if each.is_operation), "")
            scalers = self.steps.scalers
            has_scaler = self.options.loss_scale is None and (scalers is None or bool(scalers))
            self.steps.excused = Excused(number, scale, made, has_scaler=has_scaler)
        for origin in () if report is None else report.origins:
            if origin.operands.startswith(NOT_KNOWN):
                self.not_searched[origin.operands.removeprefix(NOT_KNOWN)] += 1
        for origin in notes:
            self.note(origin)
        step = self.recorder.optimizer_step
        if report is None:
            return None
        return self.recorder.with_scaled_step(replace(report, optimizer_step=step))

    def _held(self, name: str) -> str:
        """The name of a leaf: that of a weight begins with the name of its model, if it has one."""
        role, _, inside = name.partition(" ")
        if inside and role in (Role.WEIGHT.value, Role.BUFFER.value):
            return f"{role} {joined(self.recorder.held_as, inside)}"
        return name

    def _of_model(self, weight: SteppedWeight) -> SteppedWeight:
        return replace(weight, name=joined(self.recorder.held_as, weight.name))

    def stop_after(self, number: int) -> None:
        """Raise BatchLimitReached if this batch, which has finished, is to be the last one."""
        limit = self.options.abort_after_batch_num
        if limit is not None and number >= limit:
            raise BatchLimitReached(f"batch {number} has finished: abort_after_batch_num={limit}")

    def _deliver(self, finished: Finished, error: Exception | None) -> None:
        """Agree with the other ranks, if that was asked for, and report what was found."""
        report, tells = finished.report, None
        if self.syncs and not self.options.trace_batch_nums:
            report, tells = agreement.agree(report)
        if report is not None:
            self._tell(report, finished, error, tells)

    def _tell(
        self, report: Report, finished: Finished, error: Exception | None, tells: bool | None
    ) -> None:
        """Report what was found, or withhold it."""
        if self.withheld is not None:
            if error is None and not self.options.strict and self._is_withheld(report):
                self.recorder.notes.update((each.message, each) for each in report.origins)
                return
            if not self.withholds:
                report = self.withheld.instead(report)
        self._report(report, finished, error, tells)

    def _is_withheld(self, report: Report) -> bool:
        found = self.withheld
        return found is not None and (
            found.is_range_test(report, self.stream)
            or (self.withholds and found.withholds(report, self.report_later, self.stream))
        )

    def report_later(self, report: Report) -> None:
        """Hand on a report that was withheld.

        Raises:
            NonFiniteError: if ``on_detect="raise"``.
        """
        self._report(report, Finished(Batch(report.batch_number), report=report), None, None)

    def _report(
        self, report: Report, finished: Finished, error: Exception | None, tells: bool | None
    ) -> None:
        stage = self.recorder.stages.get(report.batch_number)
        if stage is not None and report.phase != "optimizer":  # a step follows all micro-batches
            report = replace(report, stage=stage.number, micro_batch=stage.micro_batch)
        self.last_report = report
        self._told.append(report.batch_number)
        is_new = self._reported.adds(report.origins)
        detection = Detection(report, finished, error, is_new, tells, self.stream)
        try:
            self._hand_on(detection)
        finally:
            self.heard(report)

    def _hand_on(self, detection: Detection) -> None:
        stopped: RuntimeWarning | None = None
        for receive in self._receivers:
            try:
                receive(detection)
            except RuntimeWarning as warning:  # python -W error: it must not hide a report
                stopped = warning
                detection = replace(detection, error=detection.error or warning)
        if stopped is not None:
            raise stopped

    def _say_not_judged(self, finished: Finished) -> None:
        """Print once which absorbed values could not be judged harmless."""
        for group in by_cause(finished.absorbed):
            if group[0].not_judged and self._not_judged.adds(group):
                terminal.write(absorbed_line(group), getattr(sys, self.stream))

    def _warn_of_idle_globs(self) -> None:
        """Warn after the first batch of globs of ``ignore`` that are probably misspelt."""
        self.warns_of_idle_globs, last = False, self.recorder.last_batch
        model = self.recorder.model
        for pattern in [] if last is None else idle_globs(self.options.ignore, model, last):
            what = "no operation of the first batch" if ":" in pattern else "no module"
            warn_user(f"ignore={pattern!r} names {what} of this {class_name(type(model))}")


def raised_now() -> Exception:
    """The exception that is being handled."""
    error = sys.exc_info()[1]
    assert isinstance(error, Exception)
    return error
