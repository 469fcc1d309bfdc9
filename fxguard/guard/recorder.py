"""Batches: when one begins and ends, the last frames, and the verdict."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Module

from fxguard.batch import frames
from fxguard.batch.assemble import assemble, reached_by_failure
from fxguard.batch.batch import Batch
from fxguard.batch.dataflow import DataFlow
from fxguard.batch.weights import Standing, grown, magnitudes
from fxguard.errors import UsageError
from fxguard.guard._last_frames import Finished, LastFrames
from fxguard.guard.options import Options
from fxguard.plan.plan import FramePlan
from fxguard.ranks.agreement import current_rank
from fxguard.records import Frame, Growth, Origin, Role, Row
from fxguard.report.report import Report
from fxguard.rerun.node_by_node import numbers_inside, run_until_it_raises
from fxguard.rerun.whole_graph import measure_run
from fxguard.verdict import origins as cause
from fxguard.verdict.explain import climb_to, spread_of
from fxguard.verdict.judge import Judgment, ask
from fxguard.verdict.precedents import Precedents

__all__ = ["Recorder"]


class _Here(threading.local):
    batch: Batch | None = None  # that is running in this thread


class Recorder:
    """Keeps the batches of one guarded model and judges each when it ends.

    Threads may call one model at the same time. What belongs to one call is a :class:`Batch`,
    which is kept for each thread: :meth:`begin`, then :meth:`finish` or :meth:`finish_failed`, and
    :meth:`end` whatever happened, all from the thread that calls the model. What calls share:

    - ``next_number`` is changed under the lock.
    - ``earlier`` has a lock of its own.
    - ``last`` is replaced as a whole, by whichever call ends last. What it refers to is never
      changed.
    - ``notes`` and ``precedents`` only grow, by single operations on dicts. Two threads that judge
      the same kind of batch for the first time both judge it.
    - ``optimizer_step`` is the user's to set.
    """

    def __init__(self, options: Options, model: Module | None = None) -> None:
        self.options = options
        self.model = model
        self.next_number = 0
        self.optimizer_step: int | None = None
        self._lock = threading.Lock()
        self.last: Finished | None = None
        self.precedents = Precedents()
        self.notes: dict[str, Origin] = {}  # absorbed origins, once for each operation
        self.earlier = LastFrames(options.max_frames_to_save)
        self.standing = Standing(model)
        # Number of the first batch of training, and how large weights were then.
        self.at_first: tuple[int, dict[str, float]] | None = None
        self.here = _Here()

    @property
    def batch(self) -> Batch | None:
        """The batch that is running in this thread."""
        return self.here.batch

    @property
    def last_batch(self) -> Batch | None:
        """The last batch that finished."""
        return None if self.last is None else self.last.batch

    @property
    def batch_number(self) -> int:
        """Number of the batch that is running in this thread, or of the next to begin."""
        batch = self.batch
        return self.next_number if batch is None else batch.number

    def begin(self, number: int | None = None) -> Batch:
        """Start a batch in this thread.

        Args:
            number: of the batch that this is one more part of; None for a new one.
        """
        if number is None:
            with self._lock:
                number = self.next_number
                self.next_number = number + 1
        self.here.batch = batch = Batch(number)
        return batch

    def end(self) -> None:
        """No batch runs in this thread any more."""
        self.here.batch = None

    def finish(self) -> Finished:
        """Judge the batch that runs in this thread, and close it."""
        return self._finish(None)

    def finish_failed(self, error: Exception) -> Finished:
        """The same for a batch whose forward raised.

        A graph that raised runs again, node by node, up to the operation that does.
        """
        batch = self.batch
        assert batch is not None
        if batch.failed is not None:
            run = run_until_it_raises(batch.failed)
            batch.graph_ran(run, ())
        else:
            batch.add_raised(error)
        return self._finish(error)

    def _finish(self, error: Exception | None) -> Finished:
        batch = self.batch
        assert batch is not None
        found = Finished(batch)
        try:
            batch.read()
            if batch.number in self.options.trace_batch_nums:
                self.measure(batch)
            if not self.options.trace_batch_nums:
                found = self.judge(batch, error)
        finally:
            batch.close()
            batch.ended = self.standing.now()
            self.last, self.here.batch = found, None
        if found.report is not None:
            self.earlier.clear()
        elif not self.options.trace_batch_nums:
            self.see_weights(batch.number)
            if not batch.postponed:  # those have no frames
                self.earlier.add(batch, self.frame_count(batch))
        return found

    def frame_count(self, batch: Batch) -> int:
        """How many frames a batch has at least, without putting them together."""
        of_operations = self.options.granularity == "op"
        return sum(event.frame_count(of_operations) for event in batch.events)

    # The verdict.

    def measure(self, batch: Batch) -> None:
        """Run those graphs again of which only what left them was measured."""
        for run in batch.postponed:
            measure_run(run)

    def judge(self, batch: Batch, error: Exception | None = None) -> Finished:
        """Say whether something was found in a batch that was read and is not closed yet."""
        if error is not None:
            self.measure(batch)
        elif all(map(_all_finite, batch.statistics())):
            return Finished(batch)
        # A forward that raised is judged by what it raised for, too.
        case = None if error is not None else self.precedents.case_of(batch)
        if self.precedents.hold(case, lambda question: ask(batch, question)):
            return Finished(batch)
        self.measure(batch)
        flow = assemble(batch, numbers_inside)
        if error is not None:
            flow.reached += reached_by_failure(flow, batch)
        judgment = Judgment(batch, flow, self.options.ignores)
        verdict = judgment.verdict
        for blame in verdict.both:
            if blame.step is not None:
                flow.show_step(blame.step)
        accused = verdict.both if self.options.strict else verdict.origins
        absorbed = [self.origin(judgment, blame) for blame in verdict.absorbed]
        for origin in absorbed:
            self.notes.setdefault(origin.message, origin)
        if not accused:
            self.precedents.add(case, judgment.asked)
            return Finished(batch)
        first = min(self.position(flow, blame) for blame in accused)
        report = Report(
            batch_number=batch.number,
            frames=tuple(self.last_frames(batch, flow, first)),
            origins=_once_each(self.explained(judgment, blame) for blame in accused),
            rank=current_rank(),
            absorbed=() if self.options.strict else tuple(absorbed),
            error="" if error is None else _one_line(error),
            weights=0 if self.model is None else len(list(self.model.parameters())),
            buffers=0 if self.model is None else len(list(self.model.buffers())),
            grown=self.grown(),
            repeated=batch.repeated,
            optimizer_step=self.optimizer_step,
        )
        return Finished(batch, flow, report)

    def grown(self) -> tuple[Growth, ...]:
        """Weights that are far larger than in the first batch of training."""
        if self.model is None or self.at_first is None or not any(self.at_first[1].values()):
            return ()
        number, before = self.at_first
        try:
            return grown(magnitudes(self.model), before, number)
        except RuntimeError:  # as below
            return ()

    def see_weights(self, number: int) -> None:
        """Note how large weights are when training begins: once, and not in evaluation."""
        if self.model is None or self.at_first is not None or not torch.is_grad_enabled():
            return
        self.at_first = number, {}
        with contextlib.suppress(RuntimeError):  # a kernel that is not there, no memory
            self.at_first = number, magnitudes(self.model)

    def origin(self, judgment: Judgment, blame: cause.Blame) -> Origin:
        """Name a blamed value."""
        flow = judgment.flow
        if blame.step is not None:
            what = flow.steps[blame.step].kind
        else:
            what = judgment.name_of(blame.value)
        position = self.position(flow, blame)
        index = sum(shown < position for shown in self.shown(flow))
        frame = self.rendered(judgment.batch, flow, position, index)
        label = next((row.label for row in frame.rows if row.is_bad), "output")
        for row in flow.frames[position].rows:
            if row.value == blame.value:
                label = row.label
        return Origin(frame, blame.problem, what, label)

    def explained(self, judgment: Judgment, blame: cause.Blame) -> Origin:
        """An origin with what the tensor holds, what led to it and what came of it."""
        flow, verdict = judgment.flow, judgment.verdict
        dtype = flow.values[blame.value].dtype
        titles, count, returned = spread_of(flow, verdict, blame)
        read = () if blame.step is None else flow.steps[blame.step].inputs
        origin = replace(
            self.origin(judgment, blame),
            dtype=dtype,
            limit=cause.LIMITS.get(dtype),
            follows=any(verdict.sources.get(value) for value in read),
            autocast=self.autocast(judgment, blame),
            climb=climb_to(flow, blame) if blame.problem == "inf" else (),
            spread=titles,
            spread_count=count,
            reached_output=returned,
        )
        # Nobody looks for the cause in what only followed: it is not worth a second run.
        detail = None if origin.follows else judgment.detail(blame)
        if detail is None:
            return origin
        return replace(
            origin,
            numel=detail.numel,
            nan_count=detail.nan_count,
            posinf_count=detail.posinf_count,
            neginf_count=detail.neginf_count,
            largest_finite=detail.largest_finite,
            first_index=detail.first_index,
            rows=detail.rows,
            row_count=detail.row_count,
            needed=detail.needed if blame.problem == "inf" else None,
            masked_row=detail.masked_row and blame.problem == "nan" and blame.step is not None,
        )

    def autocast(self, judgment: Judgment, blame: cause.Blame) -> tuple[Row, ...]:
        """The operands that autocast turned into infinities, as rows of the operation."""
        flow, found = judgment.flow, judgment.beyond_autocast(blame)
        rows = flow.frames[self.position(flow, blame)].rows if found else ()
        labels = {row.value: row.label for row in reversed(rows)}
        values = {value: flow.values[value] for value in found}
        return tuple(
            Row(
                labels.get(value, known.name.rpartition(".")[2]),
                abs_max=judgment.abs_max(value),
                dtype=known.dtype,
            )
            for value, known in values.items()
        )

    # Frames.

    def position(self, flow: DataFlow, blame: cause.Blame) -> int:
        """Index of the frame that shows an origin first."""
        for position, frame in enumerate(flow.frames):
            if not self.shows(frame):
                continue
            if blame.step is not None and frame.step == blame.step:
                return position
            if any(row.value == blame.value for row in frame.rows):
                return position
            # A module's own weights are rows of its frame.
            value = flow.values[blame.value]
            owner = value.name.rpartition(".")[0] if value.role is Role.WEIGHT else None
            if frame.name == owner and not frame.is_op:
                return position
        return len(flow.frames) - 1

    def shows(self, frame: FramePlan) -> bool:
        return self.options.granularity == "op" or not frame.is_op

    def shown(self, flow: DataFlow) -> list[int]:
        """The indices of the frames that are shown."""
        return [i for i, frame in enumerate(flow.frames) if self.shows(frame)]

    def rendered(
        self,
        batch: Batch,
        flow: DataFlow,
        position: int,
        index: int,
        unlike: Callable[[Tensor], str] | None = None,
    ) -> Frame:
        """A frame of a flow; ``index`` is its place among those that are shown."""
        frame = frames.render(flow.frames[position], flow.values, flow.ranges, self.model, unlike)
        return replace(frame, batch_number=batch.number, index=index)

    def last_frames(self, batch: Batch, flow: DataFlow, last: int) -> list[Frame]:
        """The last frames up to and including one, from earlier batches where this one is short."""
        shown = [(n, i) for n, i in enumerate(self.shown(flow)) if i <= last]
        wanted = self.options.max_frames_to_save
        found = [self.rendered(batch, flow, i, n) for n, i in shown[-wanted:]]
        for earlier in self.earlier.batches():
            if len(found) >= wanted:
                break
            found = self.frames_of(Finished(earlier))[-(wanted - len(found)) :] + found
        return found

    def last_frames_of_all(self) -> list[Frame]:
        """Every frame of the last batch that finished; empty before the first."""
        last = self.last
        if last is not None and last.batch.postponed:
            raise UsageError(
                f"replay=True did not measure the operations of batch {last.batch.number}, which "
                "was well; name it in trace_batch_nums"
            )
        return [] if last is None else self.frames_of(last)

    def frames_of(
        self,
        finished: Finished,
        on_progress: Callable[[float], object] | None = None,
        *,
        just_ended: bool = False,
    ) -> list[Frame]:
        """Every frame of a finished batch.

        Args:
            finished: the batch.
            on_progress: is told from 0 to 1 how far it is.
            just_ended: whether nothing else has run since, so that weights are as they were.
        """
        # What was judged has the frames of what was blamed, too, and what a second run saw.
        batch, flow = finished.batch, finished.flow or assemble(finished.batch)
        shown = self.shown(flow)
        then = None if just_ended else batch.ended
        unlike = None if then is None else self.standing.since(then)
        found = []
        for index, position in enumerate(shown):
            if on_progress is not None:
                on_progress(index / len(shown))
            found.append(self.rendered(batch, flow, position, index, unlike))
        return found


def _all_finite(numbers: Tensor) -> bool:
    # One operation and one read, where all is well. A sum of large numbers may overflow.
    return math.isfinite(numbers.sum().item()) or bool(torch.isfinite(numbers).all())


def _once_each(origins: Iterable[Origin]) -> tuple[Origin, ...]:
    """What several graphs of one batch have read is one origin."""
    found: dict[object, Origin] = {}
    for origin in origins:
        is_one = origin.standing or origin.what.startswith("argument ")
        found.setdefault(origin.what if is_one else origin, origin)
    return tuple(found.values())


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
