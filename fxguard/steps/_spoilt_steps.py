"""What is known of a step that made weights bad: its scaler, its schedule, what it computed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import FrameType

import torch.amp.grad_scaler
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim.optimizer import Optimizer

from fxguard.batch.late_writes import LateWrites
from fxguard.findings import Origin
from fxguard.forgiving import or_else
from fxguard.graph.nodes import class_name
from fxguard.measure.at_hand import own_arithmetic
from fxguard.measure.details import describe as look_at
from fxguard.source.lines import source_of_caller
from fxguard.steps._learning_rate import reason_of, schedule_of
from fxguard.steps._step_reports import StepReports
from fxguard.steps.backward import BackwardPasses
from fxguard.steps.first_bad import FirstBad
from fxguard.steps.optimizer_step import Spoilt, SteppedWeight, origin_of_step, origin_of_write
from fxguard.steps.own_step import OwnStep, is_own
from fxguard.steps.scaled_step import ScaledStep

__all__ = ["SpoiltSteps", "may_be_scaled"]

UNKNOWN_THEN = "it began before the model was called for the first time"


class SpoiltSteps:
    """Describes steps that made weights of one model bad, and has them reported.

    Args:
        reports: who reports on the model.
        backward: its backward passes; None if nobody looks at them.
        writes: what the script has written since the last backward.
    """

    def __init__(
        self,
        reports: StepReports,
        backward: BackwardPasses | None,
        writes: Callable[[], LateWrites],
    ) -> None:
        self.reports = reports
        self.writes = writes
        self.backward = backward
        self._backwards = 0  # that had ended when the last step was made
        # Weights into which a step wrote bad gradients: the number of the batch before it.
        self._spoilt_in: dict[str, int] = {}
        # Whether a scaler has scaled all losses since the last steps.
        self._are_scaled = False
        self._has_stepped = True

    def by_step(
        self, optimizer: Optimizer, weights: Sequence[SteppedWeight], own: OwnStep | None
    ) -> None:
        """Report weights that a step made bad.

        Raises:
            NonFiniteError: if ``on_detect="raise"``.
        """
        name = class_name(type(optimizer))
        if own is not None:  # it may write gradients
            first, more = weights[0], weights[1:]
            gradient = own.gradient_of(first.weight)
            if gradient is not None:
                weights = [replace(first, gradient=gradient.clone()), *more]
        spoilt_in = self._spoilt_in.get(weights[0].name)
        brought_in = self.reports.steps.bad_gradients.get(weights[0].name)
        self._note(weights, f"{name}'s step")
        source = source_of_caller()

        def describe(number: int) -> Origin:
            inside = _inside(own, optimizer, weights)
            return origin_of_step(
                Spoilt(
                    optimizer=name,
                    weights=weights,
                    is_own=is_own(optimizer),
                    inside=inside,
                    why_not_inside=UNKNOWN_THEN if own is None else own.why_not,
                    saw_gradients=self.backward is not None,
                    backwards=self._passes(),
                    excused=None if _is_called_by_scaler() else self.reports.steps.excused,
                    scaled_by=self._scaled_by(optimizer),
                    changed_by=self.writes().of_gradient(weights[0].weight),
                    schedule=or_else("", schedule_of, optimizer),
                    reason=or_else("", reason_of, optimizer),
                    spoilt_in=spoilt_in,
                    brought_in=brought_in,
                ),
                source,
                number,
            )

        self.reports.weights_spoilt(describe, brought_in=brought_in)

    def loss_comes(self, *, is_scaled: bool) -> None:
        """Called when the backward of a loss may begin."""
        self._forget_reset()
        self._are_scaled = is_scaled and (self._are_scaled or self._has_stepped)
        self._has_stepped = False

    def ended(self, optimizer: Optimizer) -> None:
        """Called when a step has ended."""
        if self._are_scaled:
            self._note_scaled(optimizer)
        self._has_stepped = True
        if self.reports.steps.bad_gradients:
            stepped = {id(x) for group in optimizer.param_groups for x in group["params"]}
            self._forget_gradients(lambda weight: id(weight) in stepped)
        self.reports.steps.excused = None
        self._backwards = self._count()

    def before_step(self, optimizer: Optimizer, weights: Sequence[SteppedWeight]) -> None:
        """Report weights that something else has made bad since the last step.

        Raises:
            NonFiniteError: if ``on_detect="raise"``.
        """
        name, source = class_name(type(optimizer)), source_of_caller()
        self._note(weights, "a write before the step")
        writes = self.writes().of_weight(weights[0].weight)
        self.reports.weights_spoilt(
            lambda number: origin_of_write(name, weights, writes, source, number)
        )

    def restored(self, names: Iterable[str]) -> None:
        """Called with weights that are good again."""
        for name in names:
            self.reports.steps.spoilt.pop(name, None)

    def _note(self, weights: Sequence[SteppedWeight], by: str) -> None:
        last = self.reports.last_batch
        if last is None:
            return
        for weight in weights:
            number = self.reports.steps.bad_gradients.get(weight.name, last.number)
            self.reports.steps.spoilt[weight.name] = number, by
            self._spoilt_in[weight.name] = last.number

    def _note_scaled(self, optimizer: Optimizer) -> None:
        """Note a step whose gradients were still multiplied by the scale of a GradScaler.

        A script that has written gradients may have divided them.
        """
        steps, last = self.reports.steps, self.reports.last_batch
        if steps.scaled_step is not None or last is None:
            return
        if is_own(optimizer) or _is_called_by_scaler():
            return
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if any(self.writes().of_gradient(weight) for weight in weights):
            return
        scale = self._scaled_by(optimizer)
        if scale > 1:
            name = class_name(type(optimizer))
            steps.scaled_step = ScaledStep(name, last.number, scale)

    def _forget_reset(self) -> None:
        """Forget bad gradients that the script has set to zero, or to something finite, since."""
        known = len(self.reports.steps.bad_gradients)
        self._forget_gradients(lambda weight: weight.grad is None or _is_finite(weight.grad))
        if len(self.reports.steps.bad_gradients) < known:
            self._backwards = self._count()  # what they brought is gone

    def _forget_gradients(self, is_over: Callable[[Tensor], bool]) -> None:
        bad, model = self.reports.steps.bad_gradients, self.reports.model
        if bad and model is not None:
            weights = dict(model.named_parameters())
            for name in [*bad]:
                if name not in weights or is_over(weights[name]):
                    del bad[name]

    def _count(self) -> int:
        return 0 if self.backward is None else self.backward.count

    def _passes(self) -> int:
        return max(self._count() - self._backwards, 1)

    def _scaled_by(self, optimizer: Optimizer) -> float:
        """The scale that the gradients of an optimizer still have; 1 if there is none."""
        if _is_called_by_scaler():
            return 1.0
        scales = [
            float(scaler.get_scale())
            for scaler in self.reports.steps.scalers or ()
            if _still_scales(scaler, optimizer)
        ]
        return max(scales, default=1.0)


def _inside(
    own: OwnStep | None, optimizer: Optimizer, weights: Sequence[SteppedWeight]
) -> FirstBad | None:
    """The operation of a script's own step that made the first of these weights bad."""
    nothing: FirstBad | None = None
    if own is None:
        return None
    return or_else(nothing, own.first_bad, optimizer, weights[0].weight)


def _is_finite(gradient: Tensor) -> bool:
    with own_arithmetic():
        return not look_at(gradient.detach()).severity


def may_be_scaled(root: Tensor) -> bool:
    """Whether a GradScaler may have made a loss: it multiplies the script's own one last."""
    return root.grad_fn is not None and root.grad_fn.name() == "MulBackward0"


def _still_scales(scaler: GradScaler, optimizer: Optimizer) -> bool:
    state = scaler._per_optimizer_states.get(id(optimizer))  # a dict that makes what it lacks
    is_ready = state is None or state["stage"] is OptState.READY
    return scaler.is_enabled() and is_ready


def _is_called_by_scaler() -> bool:
    """Whether ``GradScaler.step`` calls the step that runs now: it skips steps by itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == torch.amp.grad_scaler.__file__:
            return True
        frame = frame.f_back
    return False
