"""Reports on what a script computes beside its models, or without one."""

from __future__ import annotations

import functools
import os.path
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from fxguard.api.listening import guard_with_tools
from fxguard.api.script_gradients import ScriptGradients
from fxguard.batch.batch import Batch
from fxguard.batch.keys import Key
from fxguard.batch.lent_weights import lent_weights
from fxguard.capture.instances import instances_of
from fxguard.findings import Origin
from fxguard.forgiving import or_else, theirs
from fxguard.graph.operations import name_of
from fxguard.measure.func_levels import levels_left
from fxguard.options import Options
from fxguard.records import Role
from fxguard.report import terminal
from fxguard.report.report import Report
from fxguard.report.text import because
from fxguard.script.bad_values import Found
from fxguard.script.because_of import chain_of, full_name, in_view_of, is_bad, speaks_of_bad
from fxguard.script.beside import Beside, Handed
from fxguard.script.in_front import Arrival
from fxguard.script.operations import PlainRecord, place_of
from fxguard.script.tangents import FORWARD_MODE, Derived
from fxguard.script.transforms import Differentiated
from fxguard.source.held_tensors import UNNAMED, held_name
from fxguard.source.lines import Place
from fxguard.steps.losses import Losses
from fxguard.steps.own_step import is_own
from fxguard.steps.step_hooks import StepHooks, is_step_compiled
from fxguard.torch_names import DisableTorchFunction

__all__ = ["WholeScript"]

READS_NUMBER = re.compile(r"\.item\(\)|\bfloat\(")
# Causes of what is bad because of the numbers of an operation.
ARITHMETIC = frozenset(["domain", "overflow", "rounding", "underflow", "zero divisor"])
# What hands a whole tensor on, and to whom.
ARRAYS = {"__array__": "NumPy", "numpy": "NumPy", "tolist": "Python"}
OWN_BACKWARD = "an autograd function of the script made it in its own backward"
NOTE = "note: {}; the script has read that, and no model and no loss of one"


def _may_be_meant(tensor: Tensor) -> bool:
    """Whether a bad tensor holds -inf, which the logarithm of a probability of 0 is."""
    return not tensor.is_complex() and bool(tensor.isneginf().any())


def _bad_count(origin: Origin) -> int:
    return sum(filter(None, (origin.nan_count, origin.posinf_count, origin.neginf_count)))


def _identity(error: BaseException) -> tuple[int, str]:
    """Tells an exception from others, without keeping what it keeps."""
    return id(error), f"{type(error)}: {error}"


class NoModel(Module):
    """In the place of a model."""


class WholeScript:
    """Watches the thread that makes it.

    Args:
        options: those of :func:`fxguard.instrument`.
        losses: those that the script computes.
        on_report: called with each report after it was handed on.
        of_no_model: gives those of some tensors that no guarded model has, which watches its own.
    """

    def __init__(
        self,
        options: Options,
        losses: Losses,
        on_report: Callable[[Report], object],
        of_no_model: Callable[[Iterable[Tensor]], list[Tensor]],
    ) -> None:
        self._model = NoModel()
        self._guard = guard_with_tools(self._model, options)
        self._guard.delivery.warns_of_idle_globs = False
        self._guard.delivery.heard = self._hear
        self._on_report = on_report
        self._reported = -1  # the number of the last batch of which there was a report
        self._hooks = StepHooks(self._step_begins, self._step_ended)  # before those of the guard
        self._guard.watch_steps(losses)
        self._losses = losses
        self._of_no_model = of_no_model
        self._gradients = ScriptGradients(self._guard.delivery, losses, self._begin)
        self._lent: list[weakref.ref[Tensor]] = []  # weights of the model that was called last
        self._called: Callable[[], Module | None] = lambda: None  # that model
        self._has_unexplained = False  # a bad gradient, of which nothing else was said
        self._has_told = False  # what made a bad gradient, since the last step
        self._is_open = True
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._kept: Report | None = None  # is told at the end
        self._noted: Report | None = None  # likewise, but in a line: no model has read it
        # What is to be said of backward passes inside transforms, by place and kind.
        self._inside: dict[tuple[Place, str], tuple[PlainRecord, Report]] = {}
        self._first_reader = ""  # the function that has read what is kept or noted
        self._raised: tuple[tuple[int, str], Report] | None = None  # what raised last because of it
        self._beside = Beside(
            self._script_read,
            self._backward_begins,
            self._gradient_bad,
            self._gradient_inside_bad,
            self._operation_raised,
            losses.is_output,
            self._is_gradient,
        )
        losses.look_beside(self._beside)

    @property
    def count(self) -> int:
        """How many operations were looked at."""
        return self._beside.count

    @property
    def unseen(self) -> int:
        """How many operations could not be looked at."""
        return self._beside.unseen

    def steps_made(self) -> int | None:
        """How many steps the optimizer has made that has made most; None if there is none."""
        if not self._steps:
            return 0 if self._groups() else None
        return max(self._steps.values())

    def close(self) -> None:
        """Stop watching."""
        if self._is_open:
            self._is_open = False
            self._losses.look_beside(None)
            self._hooks.close()
            self._guard.stop_listening()
            self._guard.stop_watching_steps()

    def model_comes(self) -> None:
        """From now on a bad number counts where a model reads it, or the loss of one.

        What the script has read of others is noted.
        """
        self._noted = self._noted or self._kept
        self._beside.has_no_model, self._kept = False, None

    def model_reads(self, model: Module, args: Any, kwargs: Any) -> None:
        """Called with the arguments of a model, before its call."""
        lent, self._called = lent_weights(model), weakref.ref(model)
        self._lent = [weakref.ref(weight) for weight in lent]
        self._beside.model_reads(model, (args, kwargs, lent))

    def instead(self, report: Report) -> Report | None:
        """What made the bad numbers that a model or its loss was given, if that is reported."""
        if report.phase == "optimizer":
            return self._behind_rate(report)
        if report.phase == "backward":
            return self._behind_gradient(report)
        read = self._beside.take_read(by_loss=report.origins[0].frame.phase == "loss")
        is_given = report.phase in ("data", "loss") or report.origins[0].role is Role.WEIGHT
        if read is None and report.origins[0].role in (Role.WEIGHT, Role.BUFFER):
            return self._behind_lent(report) or self._behind_written(report)
        if read is None and report.phase == "data":
            return self._behind_array(report)
        if read is None or not is_given:
            return None
        if report.origins[0].is_operation and not report.origins[0].read_infinity:
            return None
        return self._made_by(self._report(*read), report)

    def _made_by(self, made: Report | None, report: Report) -> Report | None:
        """What made the numbers of which there is a report."""
        if made is None:
            return None
        why = (*made.why, f"it was read as {report.origins[0].message}")
        return replace(made, batch_number=report.batch_number, why=why)

    def _behind_array(self, report: Report) -> Report | None:
        """What NumPy was given before an argument held as many such numbers, or more of them."""
        made, origin = self._noted or self._kept, report.origins[0]
        if made is None or self._first_reader not in ARRAYS:
            return None
        was, counts = made.origins[0], [_bad_count(x) for x in (made.origins[0], origin)]
        if was.problem != origin.problem or not 0 < counts[0] <= counts[1]:
            return None
        why = (*made.why, f"{ARRAYS[self._first_reader]} was given it; then {origin.message}")
        return replace(made, batch_number=report.batch_number, why=why)

    def _behind_written(self, report: Report) -> Report | None:
        """What made a weight or a buffer bad that the script itself has written."""
        model = self._called()
        if model is None:
            return None
        own = (*model.parameters(), *model.buffers())
        written = self._beside.written([each for each in own if is_bad(each)])
        return None if written is None else self._made_by(self._report(*written), report)

    def _behind_lent(self, report: Report) -> Report | None:
        """What made a weight bad that a call was given, if a loss has made that."""
        loss, lent = self._losses.loss_here, [each() for each in self._lent]
        bad = [x for x in lent if x is not None and is_bad(x) and loss and loss.keys_of([x])]
        if not bad:
            return None
        made = self._report_on(bad, Found(), f"it was read as {report.origins[0].message}")
        return made and replace(made, batch_number=report.batch_number)

    def _behind_gradient(self, report: Report) -> Report | None:
        """What made a gradient bad that did not come through a model, if the script has."""
        origin = report.origins[0]
        own = self._made_in_backward(origin.frame.kind if origin.is_operation else "")
        if own is not None or origin.is_operation:
            return self._made_by(own, report)
        arrived = self._beside.take_arrived()
        made = self._report_on_gradients(arrived) if arrived else None
        return made and replace(made, batch_number=report.batch_number)

    def _behind_rate(self, report: Report) -> Report | None:
        """What made a learning rate, if the script has read that of a tensor."""
        origin = report.origins[0]
        read = self._beside.read_of([group.get("lr") for group in self._groups()])
        if read is None and READS_NUMBER.search(origin.operands):
            read = self._beside.handed  # the line goes on with the number: lr.item() * scale
        if read is None:
            return None
        made = self._report_on(
            read.tensors, read.found, f"then {origin.message}: {origin.operands}"
        )
        return made and replace(made, batch_number=report.batch_number)

    def tell(self) -> None:
        """Report the first bad number that the script has read; beside a model it is only noted.

        Raises:
            NonFiniteError: if there is one, without a model, and ``on_detect="raise"``.
        """
        report, self._kept = self._kept, None
        if report is not None:
            self._guard.delivery.report_later(report)
        elif self._has_unexplained and not self._optimizers:
            self._has_unexplained = False
            self._tell_of_gradients(self._beside.leaves())
        elif self._noted is not None:
            origin = self._noted.origins[0]
            terminal.write(NOTE.format(f"{origin.message}: {because(origin)}"), sys.stderr)

    def ends_with(self, error: BaseException) -> None:
        """The script ends with an exception: keep a report on the bad numbers that it came of."""
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        try:
            with DisableTorchFunction():
                report = self._behind(error)
        except theirs():  # variables of others may be anything
            return
        self._kept = report or self._kept

    def _behind(self, error: BaseException) -> Report | None:
        """What is to be said of the bad numbers that an exception came of; None without any."""
        for each in chain_of(error):
            if self._raised is not None and self._raised[0] == _identity(each):
                return self._raised[1]
            kind, read = type(each).__name__, self._beside.handed
            if (seen := in_view_of(each)) is not None:
                file, line = seen.place
                why = f"it was read at {os.path.basename(file)}:{line}, which raised {kind}"
                return self._report_on(seen.tensors, Found(), why)
            if read is not None and self._came_of_reading(each, read):
                ends = "ended itself" if isinstance(each, SystemExit) else f"raised {kind}"
                why = f"it was read by {full_name(read.func)}; then the script {ends}"
                return self._report_on(read.tensors, read.found, why)
        return None

    def _came_of_reading(self, error: BaseException, read: Handed) -> bool:
        """Whether the script has ended because of the last bad number that it read."""
        if isinstance(error, Exception) and speaks_of_bad(error):
            return True
        was_last = read.when == self._beside.count
        return was_last and isinstance(error, (AssertionError, SystemExit))

    def _operation_raised(self, error: Exception, read: Handed) -> None:
        why = f"it was read by {full_name(read.func)}, which raised {type(error).__name__}"
        report = self._report_on(read.tensors, read.found, why)
        if report is not None:
            self._raised = _identity(error), report

    def _report_on(self, tensors: list[Tensor], found: Found, why: str) -> Report | None:
        """What is to be said of bad tensors that were read.

        Args:
            tensors: those of them that are still there.
            found: the same, as far as they were seen to be made.
            why: by whom they were read.
        """
        report, loss = None, self._losses.loss_here
        if loss is not None and (ends := loss.keys_of(tensors)):
            with loss.read() as batch:
                batch.ends = ends
                report = self._guard.recorder.finish_loss(batch).report
            if report is not None:
                report = self.instead(report) or report
        if report is None:
            report = self._report(*self._beside.ends_of(tensors, found))
        return None if report is None else replace(report, why=(*report.why, why))

    def _script_read(self, batch: Batch, by: list[Key]) -> None:
        if self._kept is None and self._noted is None and self._beside.handed is not None:
            self._first_reader = getattr(self._beside.handed.func, "__name__", "")
        if self._beside.has_no_model:
            self._kept = self._kept or self._report(batch, by)
        else:
            self._noted = self._noted or self._report(batch, by)

    def _backward_begins(self, batch: Batch, by: list[Key]) -> None:
        report = self._report(batch, by)
        if report is not None:
            self._kept = report
            self.tell()

    def _report(self, batch: Batch, ends: list[Key]) -> Report | None:
        """What is to be said of what led to some values; None if they are intended."""
        pairs, batch.ends = list(batch.pairs), ends
        before, self._beside.pauses = self._beside.pauses, True
        try:
            batch.number = self._begin()
            batch.read()
            return self._looked_at_inside(self._guard.recorder.finish_loss(batch).report)
        except theirs():  # a second run may fail in any way, and the script is not to
            return None
        finally:
            batch.pairs[:] = pairs
            self._beside.pauses = before

    def _begin(self) -> int:
        """Begin a batch that holds nothing; its number, which is that of the optimizer's step.

        Without an optimizer it is that of the backward.
        """
        recorder = self._guard.recorder
        steps = [*self._steps.values()] or [self._beside.backwards]
        recorder.next_number = max(self._reported + 1, *steps)
        number = recorder.begin().number
        try:
            recorder.finish()
        finally:
            recorder.here.batch = None
        return number

    def _hear(self, report: Report) -> None:
        self._reported = report.batch_number
        self._on_report(report)

    def _gradient_bad(self, began: Sequence[Arrival]) -> None:
        """A backward has made a bad gradient: say what did, or note that it is not known."""
        report = self._made_in_backward() or self._report_on_gradients(began)
        if report is None:
            self._has_unexplained = True
        else:
            self._has_told = True
            self._guard.delivery.report_later(report)

    def _gradient_inside_bad(self, made: PlainRecord, how: Differentiated | Derived) -> None:
        """A derivative inside a transform is: keep what there is to say, in case it matters."""
        before, self._beside.pauses = self._beside.pauses, True
        try:
            with levels_left(), DisableTorchFunction():
                report = self._gradients.report_inside(how)
        finally:
            self._beside.pauses = before
        if report is not None:
            self._inside.setdefault((place_of(made), name_of(made.func)), (made, report))

    def _looked_at_inside(self, report: Report | None) -> Report | None:
        """The same on a derivative inside a transform, with what a closer look at it has found."""
        if report is None or report.origins[0].frame.source is None:
            return report
        source, kind = report.origins[0].frame.source, report.origins[0].frame.kind
        made, found = self._inside.get(((source.file, source.line), kind), (None, None))
        if made is None or found is None or not self._beside.leads_from(made):
            return report  # it is another one: the first of that line has reached nothing
        if kind.startswith(FORWARD_MODE):  # of a gradient of 1, which nobody has seen
            first, like = report.origins[0], found.origins[0]
            first = replace(
                first,
                cause=like.cause,
                cause_in_words=like.cause_in_words,
                operands=like.operands.partition("; ")[0],
                fixes=like.fixes,
            )
            return replace(report, origins=(first, *report.origins[1:]))
        return replace(found, batch_number=report.batch_number, why=report.why)

    def _made_in_backward(self, kind: str = "") -> Report | None:
        """What an autograd function of the script made in its own backward.

        Args:
            kind: the name of the function; "" for any.
        """
        made = self._beside.take_made_in_backward(kind)
        report = None if made is None else self._report(*made)
        return report and replace(report, why=(*report.why, OWN_BACKWARD))

    def _report_on_gradients(self, began: Sequence[Arrival]) -> Report | None:
        """What made a bad gradient; None if that is not found, or told already."""
        before, self._beside.pauses = self._beside.pauses, True
        try:
            report = self._gradients.report(began, self._beside.leaves())
            given, self._gradients.given = self._gradients.given, []
            nothing: Report | None = None  # tensors of others may object to any question
            hidden = report and or_else(nothing, self._behind_hidden, report, given)
            return hidden or report
        finally:
            self._beside.pauses = before

    def _behind_hidden(self, report: Report, given: Iterable[Tensor]) -> Report | None:
        """What made the first bad number, if the forward hid it and a backward has met it.

        Args:
            report: on that backward.
            given: tensors that the forward read, and that may have been bad already.
        """
        written = self._beside.written([x for x in given if is_bad(x) and not _may_be_meant(x)])
        made = None if written is None else self._report(*written)
        if made is None or made.origins[0].cause not in ARITHMETIC:
            return None
        met = report.origins[0]
        first = replace(made.origins[0], fixes=(*made.origins[0].fixes, *met.fixes[:1]))
        why = (*made.why, f"then {met.message}: the forward hid it")
        return replace(made, origins=(first, *made.origins[1:]), why=why)

    def _tell_of_gradients(self, leaves: Iterable[Tensor]) -> None:
        """Report the bad gradients of leaves that no model has, before a step spreads them."""
        report = self._gradients.report_on(leaves)
        if report is not None:
            report = self._made_in_backward() or report
            self._guard.delivery.report_later(report)

    def _is_gradient(self, tensor: Tensor) -> bool:
        """Whether a tensor is the gradient of a weight that an optimizer steps."""
        return any(weight.grad is tensor for each in self._groups() for weight in each["params"])

    def _groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizers that have made a step, or before the first of all."""
        if not self._optimizers:
            self._optimizers.update(instances_of(Optimizer))
        return [group for each in self._optimizers for group in each.param_groups]

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._optimizers.add(optimizer)
        told, self._has_told = self._has_told, False
        if not told:
            weights = (x for group in optimizer.param_groups for x in group["params"])
            own = self._of_no_model(weights)
            self._tell_of_gradients(own)
            self._watch_steps_of(own)
        self._beside.pauses = True
        changed = self._with_closure(args, kwargs)
        if changed is None and not is_own(optimizer) and not is_step_compiled():
            self._losses.rest()
        return changed

    def _watch_steps_of(self, weights: Iterable[Tensor]) -> None:
        """Let the guard look at what steps make of tensors that no model has."""
        tensors = self._guard.names.tensors
        for weight in weights:
            if id(weight) not in tensors:
                if self._guard.recorder.last is None:
                    self._begin()
                _, name = held_name(weight) or (Role.WEIGHT, UNNAMED)
                tensors[id(weight)] = Role.WEIGHT, name
                weakref.finalize(weight, tensors.pop, id(weight), None)

    def _with_closure(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The arguments of a step with a closure in which operations are looked at; else None."""

        def looked_at(closure: Any) -> Any:
            @functools.wraps(closure)
            def call(*given: Any, **named: Any) -> Any:
                self._beside.pauses = False
                try:
                    return closure(*given, **named)
                finally:
                    self._beside.pauses = True

            return call

        optimizer, *rest = args
        if rest and callable(rest[0]):
            return (optimizer, looked_at(rest[0]), *rest[1:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": looked_at(kwargs["closure"])}
        return None

    def _step_ended(self, optimizer: Optimizer, *_: Any) -> None:
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self._losses.rest_no_more()
        self._beside.pauses = False
