"""Batches: when one begins and ends, and what is kept of finished ones."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from torch.nn import Module

from fxguard.batch.assemble import assemble
from fxguard.batch.batch import Batch
from fxguard.batch.brief import BriefBatch
from fxguard.batch.dataflow import DataFlow
from fxguard.batch.events import GraphRun, ModuleReturn
from fxguard.batch.fingerprints import FingerprintNotes, Fingerprints
from fxguard.batch.frames import FrameView
from fxguard.batch.loss import Loss
from fxguard.batch.model_reference import reference_to
from fxguard.batch.weights import GROWTH, StandingTensors, WeightGrowth
from fxguard.errors import UsageError
from fxguard.findings import LOSS, Growth, Origin
from fxguard.forgiving import or_else
from fxguard.guard.last_frames import LastFrames
from fxguard.guard.listeners import Listener, MakeListeners, hears_of_calls, hears_of_gradients
from fxguard.guard.measured_in_full import MeasuredInFull
from fxguard.options import Options
from fxguard.plan.plan import Step
from fxguard.ranks.agreement import current_rank
from fxguard.ranks.pipelines import Stage, stage_now
from fxguard.records import Frame, Row, Severity
from fxguard.report.report import Report
from fxguard.rerun.failed_graph import run_until_it_raises
from fxguard.rerun.whole_graph import measure_postponed
from fxguard.source.lines import Place
from fxguard.steps.known_steps import KnownSteps
from fxguard.steps.raised_rates import raised_rate_of
from fxguard.steps.scaled_step import with_scaled_step
from fxguard.steps.turned_bad import with_last_good
from fxguard.verdict.report_of import Finished, Judge, ReportOf, glance

__all__ = ["MakeJudge", "Recorder"]

# Makes the judge of one model's batches, from its options and the frames to show.
Tool = TypeVar("Tool", bound=Listener)

MakeJudge = Callable[[Options, FrameView], Judge]


MOST_STAGES = 1024  # of the last batches, whose gradients may still be on their way

UNSEEN = "what made it is out of sight: an autograd.Function, or code of C++"


class _Here(threading.local):
    batch: Batch | None = None  # the one that is running in this thread


class Recorder:
    """Keeps the batches of one guarded model and judges each when it ends.

    Threads may call one model at the same time. The state of one call is a :class:`Batch`, kept per
    thread: :meth:`begin`, then :meth:`finish` or :meth:`finish_failed`, all from the thread that
    calls the model. Whatever happened, that thread sets ``here.batch`` to None at the end: an
    assignment, which an interrupt cannot split. State that calls share:

    - ``next_number`` is changed under the lock.
    - ``earlier`` has a lock of its own.
    - ``last`` is replaced as a whole by whichever call ends last. Its target is never changed.
    - A batch that was added as a brief one is made once.
    - ``notes`` only grows, by single operations on a dict.
    - ``stages`` changes by single operations on a dict.
    - ``judge`` may be called by several threads at the same time.
    - ``optimizer_step`` is set by the user, ``steps`` by what watches steps.

    Args:
        options: what the user asked for.
        model: the model; None for the graphs of a backend.
        judge: makes the callable that judges; None for :class:`ReportOf`.
        held_as: the name that a script has for the model; "" if names need not begin with it.
        listeners: makes the tools that hear of its batches, in the order in which they hear.
    """

    def __init__(
        self,
        options: Options,
        model: Module | None = None,
        judge: MakeJudge | None = None,
        held_as: str = "",
        listeners: MakeListeners = lambda recorder: (),
    ) -> None:
        self.options = options
        self._model = reference_to(model)
        self.held_as = held_as
        self.next_number = 0
        self.optimizer_step: int | None = None
        self.steps = KnownSteps()
        self._lock = threading.Lock()
        self._last: Finished | BriefBatch | None = None
        self.view = FrameView(model, options.granularity == "op")
        self.listeners = tuple(listeners(self))
        self._hears_of_calls = [x.called for x in self.listeners if hears_of_calls(x)]
        self.growth = WeightGrowth(model)
        self.judge = self._rules(self.view) if judge is None else judge(options, self.view)
        self.view_of_loss = FrameView(model, phase="loss")  # a loss has no frames of modules
        self.judge_loss = self._rules(self.view_of_loss)
        self.notes: dict[str, Origin] = {}  # absorbed origins, once for each operation
        self.earlier = LastFrames(options.max_frames_to_save)
        self.measured_in_full = MeasuredInFull(options)
        self.standing = StandingTensors(model)
        self.here = _Here()
        self._prepare = functools.partial(_prepare, weakref.ref(self), held_as)
        self.stages: dict[int, Stage] = {}  # batch to its place in a pipeline

    def _rules(self, view: FrameView) -> Judge:
        return ReportOf(
            view=view,
            max_frames=self.options.max_frames_to_save,
            strict=self.options.strict,
            is_ignored=self.ignores,
            growth=self.grown,
            additions=[listener.reports for listener in self.listeners],
        )

    def grown(self, factor: float = GROWTH) -> tuple[Growth, ...]:
        """Weights that are larger by this factor than at first; and the rate of the worst."""
        found = self.growth.since_first(factor)
        model = self.growth.model
        if not found or model is None:
            return found
        rate = or_else("", raised_rate_of, model, found[0].name)
        return replace(found[0], rate=rate), *found[1:]

    def listener(self, kind: type[Tool]) -> Tool | None:
        """The tool of one kind that listens; None if none does."""
        return next((each for each in self.listeners if isinstance(each, kind)), None)

    def gradients_came(self) -> Callable[[], None] | None:
        """Tells tools that a backward has ended; None if no tool listens to that."""
        heard = [each.gradients_came for each in self.listeners if hears_of_gradients(each)]

        def tell() -> None:
            for hear in heard:
                hear()

        return tell if heard else None

    def ignores(self, step: Step) -> bool:
        """Whether a glob names an operation, with or without the name of the model."""
        if self.options.ignores(step):
            return True
        inside = step.module.removeprefix(self.held_as).removeprefix(".")
        return bool(self.held_as) and self.options.ignores(replace(step, module=inside))

    @property
    def model(self) -> Module | None:
        """The model; None for the graphs of a backend, or if the model is gone."""
        return self._model()

    @property
    def batch(self) -> Batch | None:
        """The batch that is running in this thread."""
        return self.here.batch

    @property
    def last(self) -> Finished | None:
        """The result of the last batch that finished."""
        last = self._last
        return Finished(last.batch) if isinstance(last, BriefBatch) else last

    @property
    def last_batch(self) -> Batch | None:
        """The last batch that finished."""
        return None if self.last is None else self.last.batch

    @property
    def batch_number(self) -> int:
        """The number of the batch that is running in this thread, or else of the next one."""
        batch = self.batch
        return self.next_number if batch is None else batch.number

    def begin(self, number: int | None = None) -> Batch:
        """Start a batch in this thread.

        Args:
            number: number of the batch that this one continues; None for a new batch.
        """
        self.here.batch = batch = Batch(self.next_batch() if number is None else number)
        number = batch.number
        if (stage := stage_now()) is not None:
            self.stages[number] = stage
            if len(self.stages) > MOST_STAGES:
                self.stages.pop(next(iter(self.stages)), None)
        self._prepare(batch)
        for listener in self.listeners:
            listener.begins(batch)
        return batch

    def next_batch(self) -> int:
        """The number of a batch that begins."""
        with self._lock:
            number = self.next_number
            self.next_number = number + 1
        return number

    def number_in_pipeline(self, last: int) -> int:
        """The number of the batch whose backward a pipeline runs in this thread.

        The gradients of weights may come in a backward of their own, which reaches no graph run.

        Args:
            last: the number of the last batch, which it is outside of a pipeline.
        """
        stage = stage_now() if self.stages else None
        numbers = [number for number, each in self.stages.copy().items() if each == stage]
        return max(numbers, default=last)

    def finish(self) -> Finished:
        """Judge the batch that runs in this thread, and close it."""
        batch = self.batch
        assert batch is not None
        return self._finish(batch)

    def finish_failed(self, error: Exception) -> Finished:
        """Judge and close a batch whose forward raised.

        A graph that raised runs again, node by node, up to the operation that raises.
        """
        batch = self.batch
        assert batch is not None
        if batch.failed is not None:
            run = run_until_it_raises(batch.failed)
            batch.graph_ran(run, ())
        else:
            batch.add_raised(error)
        return self._finish(batch, error)

    def _finish(self, batch: Batch, error: Exception | None = None) -> Finished:
        found, traced = None, self.options.trace_batch_nums
        try:
            batch.read()
            if self.options.postpones and self.options.is_full(batch.number):
                measure_postponed(batch)  # graphs that could not run with checks at once
                self.measured_in_full.add(batch)
            found = Finished(batch) if traced else self._judged(self.judge, batch, error)
            for listener in self.listeners:
                found = listener.read(found, error)
            for hear in self._hears_of_calls:
                hear(batch.runs)
        finally:
            batch.close()
            batch.ended = self.standing.snapshot()
            found = found or Finished(batch)
            self._last, self.here.batch = found, None
        if found.report is not None or batch.postponed:  # the next frames would not follow on these
            self.earlier.clear()
        if found.report is None and not traced:
            if self.growth.first is None:
                self.growth.note_first(batch.number)
            if not batch.postponed:  # postponed graphs have no frames
                self.earlier.add(batch, self.frame_count(batch))
        return found

    def add(
        self, number: int, run: GraphRun, returned: ModuleReturn, caller: Place | None, frames: int
    ) -> BriefBatch:
        """Add a healthy batch that was one run of a graph.

        Args:
            number: its number.
            run: the run, whose numbers were read.
            returned: the return of the model.
            caller: the user's line that called it.
            frames: how many frames it has at least.

        Returns:
            The batch.
        """
        run.held_as = self.held_as
        for hear in self._hears_of_calls:
            hear((run,))
        run.close()
        ended = self.standing.snapshot()
        self._last = last = BriefBatch(number, run, returned, caller, ended, self._prepare)
        if self.growth.first is None:
            self.growth.note_first(number)
        if run.postponed is None:
            self.earlier.add(last, frames)
        else:  # the next frames would not follow on these
            self.earlier.clear()
        return last

    def finish_loss(self, batch: Batch) -> Finished:
        """Judge what a script has computed so far from the outputs of batches."""
        return self._judged(self.judge_loss, batch, None)

    def report_of_loss(self, number: int, severity: Severity) -> Report:
        """Report a bad loss whose making nobody has seen.

        Args:
            number: number of the batch.
            severity: how bad it is.
        """
        value = math.nan if severity is Severity.NAN else math.inf
        frame = Frame(
            "", "loss", True, (Row("output", value, value),), batch_number=number, phase="loss"
        )
        origin = Origin(frame, severity.problem, LOSS, "output", operands=UNSEEN)
        return self.report_on(number, origin)

    def report_on(self, number: int, origin: Origin) -> Report:
        """A report on one origin, whose frame follows those of the last batches.

        Args:
            number: number of the batch.
            origin: what was found.
        """
        frames = (*self.earlier_frames(self.options.max_frames_to_save - 1), origin.frame)
        step = self.optimizer_step
        report = Report(number, frames, (origin,), current_rank(), optimizer_step=step)
        for listener in self.listeners:
            report = or_else(report, listener.reports_rest, report)
        return report

    def _judged(self, judge: Judge, batch: Batch, error: Exception | None) -> Finished:
        judged = judge(batch, error, functools.partial(self.earlier_frames, but=batch))
        for origin in judged.absorbed:
            self.notes.setdefault(origin.message, origin)
        if judged.report is None:
            return judged
        report = with_last_good(
            replace(judged.report, optimizer_step=self.optimizer_step),
            self.last,
            self.notes.values(),
            self.model,
            self.standing,
            held_as=self.held_as,
            steps=self.steps,
        )
        return replace(judged, report=self.with_scaled_step(report))

    def with_scaled_step(self, report: Report) -> Report:
        """The report, whose best fix is about the step that scaled gradients were left to."""
        return with_scaled_step(report, self.steps.scaled_step, self.grown)

    def frame_count(self, batch: Batch) -> int:
        """How many frames a batch has at least, without assembling them."""
        count, of_operations = 0, self.view.of_operations
        for event in batch.events:
            count += event.frame_count(of_operations)
        return count

    # Frames.

    def earlier_frames(self, wanted: int, *, but: Batch | None = None) -> list[Frame]:
        """The last frames of earlier batches, in order of execution.

        A batch whose outputs a script has read is shown with what the script computed.

        Args:
            wanted: how many there are at most.
            but: a batch that shows its parts itself.
        """
        found: list[Frame] = []
        seen: list[Loss] = []
        for batch in self.earlier.batches():
            if len(found) >= wanted:
                break
            loss: Loss | None = batch.part_of()
            if loss is not None and (loss.batch is but or loss in seen):
                continue
            if loss is None:
                frames = batch.frames()
            else:
                seen.append(loss)
                frames = self._frames_of_step(loss)
            found = frames[-(wanted - len(found)) :] + found
        return found

    def _frames_of_step(self, loss: Loss) -> list[Frame]:
        """The frames of a loss and of the batches whose outputs it was computed from."""
        with loss.read(given=True) as batch:
            flow = assemble(batch)
            return [*self.view_of_loss.in_reverse(flow, len(flow.frames))][::-1]

    def last_frames_of_all(self) -> list[Frame]:
        """All frames of the last batch that finished; empty before the first."""
        last = self.last
        if last is not None and last.batch.postponed:
            raise UsageError(
                f"of batch {last.batch.number} only what left its graphs was measured, and nothing "
                "was detected; name it in trace_batch_nums"
            )
        return [] if last is None else self.frames_of(last)

    def frames_of(
        self,
        finished: Finished,
        on_progress: Callable[[float], object] | None = None,
        *,
        just_ended: bool = False,
    ) -> list[Frame]:
        """All frames of a finished batch.

        Args:
            finished: the batch.
            on_progress: called with the progress, from 0 to 1.
            just_ended: whether nothing else has run since, so that weights are unchanged.
        """
        # The judged data flow also has the frames of blamed operations, and what a second run saw.
        batch, flow = finished.batch, finished.flow or assemble(finished.batch)
        return self._rendered(batch, flow, self.view, on_progress, just_ended=just_ended)

    def frames_of_loss(self, batch: Batch) -> list[Frame]:
        """All frames of what a script has computed so far from the outputs of batches."""
        flow, _ = glance(batch, self.view_of_loss)
        return self._rendered(batch, flow, self.view_of_loss, just_ended=True)

    def first_bad_of_loss(self, batch: Batch) -> Frame | None:
        """What first made an inf or a NaN in what a script has computed from outputs so far."""
        return glance(batch, self.view_of_loss)[1]

    def _rendered(
        self,
        batch: Batch,
        flow: DataFlow,
        view: FrameView,
        on_progress: Callable[[float], object] | None = None,
        *,
        just_ended: bool = False,
    ) -> list[Frame]:
        shown = view.shown(flow)
        then = None if just_ended else batch.ended
        unlike = None if then is None else self.standing.changes_since(then)
        prints = Fingerprints.in_flow(flow, batch.watcher(FingerprintNotes))
        found = []
        for index, position in enumerate(shown):
            if on_progress is not None:
                on_progress(index / len(shown))
            found.append(view.render(flow, position, index, unlike, prints))
        return found


def _prepare(recorder: weakref.ref[Recorder], held_as: str, batch: Batch) -> None:
    """Give a batch what all batches of a recorder have."""
    batch.held_as = held_as
    batch.frames = functools.partial(_frames_of, recorder, weakref.ref(batch))


def _frames_of(recorder: weakref.ref[Recorder], batch: weakref.ref[Batch]) -> list[Frame]:
    """The frames of a batch that has ended, while its recorder lives."""
    of, ended = recorder(), batch()
    return [] if of is None or ended is None else of.frames_of(Finished(ended))
