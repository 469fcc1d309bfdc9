"""Steps of optimizers that hold weights of a guarded model, and weights that turned bad there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from fxguard.batch.late_writes import LateWrites
from fxguard.measure import native
from fxguard.measure.at_hand import own_arithmetic, versions_of
from fxguard.measure.finite import Finite, always, is_plain
from fxguard.records import Role, Severity
from fxguard.source.lines import warn_user
from fxguard.steps.optimizer_step import SteppedWeight
from fxguard.steps.own_step import OwnStep, is_own
from fxguard.steps.step_hooks import StepHooks
from fxguard.steps.step_rules import told_writes

__all__ = ["OptimizerSteps"]

# Called after each step with the optimizer and the weights that it stepped.
Stepped = Callable[[Optimizer, Iterator[SteppedWeight]], object]

# Called after a step that made weights bad, with the optimizer, these weights, and what its step
# began with if it is a script's own.
Spoilt = Callable[[Optimizer, Sequence[SteppedWeight], OwnStep | None], object]

# Called before a step, with the optimizer and weights that something else has made bad since the
# last step.
Written = Callable[[Optimizer, Sequence[SteppedWeight]], object]

# Called with the names of weights that are good again.
Restored = Callable[[Iterable[str]], object]

# Called with the optimizer when a step that holds weights of the model has ended.
Ended = Callable[[Optimizer], object]

LARGE = 1e13  # magnitude of gradients whose sum of squares may not fit float32

LOST = (
    "all gradients are 0 when {}'s step begins, and were not when their backward ended: {}; a norm "
    "that is infinite makes them 0 where they are clipped, so take it in float32"
)

_Held = tuple[Tensor, Mapping[str, Any]]  # a weight, and the settings of its group
_Steps = list[tuple[str, _Held]]  # the weights of a model that an optimizer steps, by name


class OptimizerSteps:
    """Looks at a model's weights after each step of an optimizer.

    Args:
        tensors: id of a parameter or buffer to its role and qualified name.
        largest_gradient: the largest magnitude of a gradient in the last backward.
        stepped: see :data:`Stepped`.
        spoilt: see :data:`Spoilt`. What it raises comes out of ``step()``.
        written: see :data:`Written`; likewise.
        restored: see :data:`Restored`.
        ended: see :data:`Ended`.
        writes: what the script has written since the last backward.
    """

    def __init__(
        self,
        tensors: Mapping[int, tuple[Role, str]],
        largest_gradient: Callable[[], float],
        stepped: Stepped,
        spoilt: Spoilt,
        written: Written,
        restored: Restored,
        ended: Ended,
        writes: Callable[[], LateWrites],
    ) -> None:
        self.tensors = tensors
        self.largest_gradient = largest_gradient
        self.warns = True
        self.stepped = stepped
        self.spoilt = spoilt
        self.written = written
        self.restored = restored
        self.ended = ended
        self.writes = writes
        # Versions of an optimizer's weights when it was seen last.
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[int | None, ...]]
        self._known = weakref.WeakKeyDictionary()
        self._own: weakref.WeakKeyDictionary[Optimizer, OwnStep] = weakref.WeakKeyDictionary()
        self._bad_before: set[str] = set()  # names of weights that are known to be bad
        self._hooks = StepHooks(self._before, self._after)

    def close(self) -> None:
        """Remove the hooks from optimizers, and the copies of what they hold."""
        self._hooks.close()
        self._own.clear()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        steps = self._weights_of(optimizer)
        if not steps:
            return
        if self.warns and self._lost_gradients(steps):
            self.warns = False
            warn_user(LOST.format(type(optimizer).__name__, self._writers(steps)))
        known, versions = self._known.get(optimizer), _versions(steps)
        if versions != known:
            self._look_before(optimizer, steps, is_first=known is None)
        if is_own(optimizer):
            self._own.setdefault(optimizer, OwnStep()).begin(optimizer, args, kwargs)

    def _writers(self, steps: _Steps) -> str:
        """``mul_ (train.py:12) wrote them since``."""
        for _, (weight, _) in steps:
            if writes := self.writes().of_gradient(weight):
                return f"{told_writes(writes)} wrote them since"
        return "something wrote them since"

    def _look_before(self, optimizer: Optimizer, steps: _Steps, *, is_first: bool) -> None:
        """Look at weights that something else has written since the last step."""
        found = _bad(steps)
        new = [each for each in found if each[0] not in self._bad_before]
        self._forget_restored(steps, {name for name, _, _ in found})
        self._bad_before.update(name for name, _, _ in found)
        bad = [_stepped(optimizer, *each) for each in new if _has_step(each[1])]
        if bad and not is_first:
            self.written(optimizer, bad)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        steps = self._weights_of(optimizer)
        made = ((name, held) for name, held in steps if _has_step(held))
        self.stepped(optimizer, (_stepped(optimizer, name, held) for name, held in made))
        if not steps:
            self._known[optimizer] = ()
            return
        own = self._own.get(optimizer)
        try:
            found = _bad(steps)
            new = [each for each in found if each[0] not in self._bad_before]
            self._forget_restored(steps, {name for name, _, _ in found})
            self._bad_before.update(name for name, _, _ in new)
            bad = [_stepped(optimizer, *each) for each in new if _has_step(each[1])]
            if bad:
                self.spoilt(optimizer, bad, own)
        finally:
            if own is not None:
                own.end()
            self._known[optimizer] = _versions(steps)
            self.ended(optimizer)

    def _forget_restored(self, steps: _Steps, bad: set[str]) -> None:
        """A weight that was set back, and turns bad again, is news."""
        if self._bad_before:
            good = {name for name, _ in steps} - bad
            self._bad_before -= good
            self.restored(good)

    def _lost_gradients(self, steps: _Steps) -> bool:
        """Whether all gradients are 0 now, and their norm may have overflowed before."""
        largest = self.largest_gradient()
        if not largest:
            return False
        with own_arithmetic():
            gradients = [held[0].grad for _, held in steps]
            if largest <= LARGE and not any(_is_float16(gradient) for gradient in gradients):
                return False
            plain = [x for x in gradients if x is not None and is_plain(x)]
            # For most steps, looking at the first gradient is enough.
            return bool(plain) and not any(bool(x.any()) for x in plain)

    def _weights_of(self, optimizer: Optimizer) -> _Steps:
        known = self.tensors
        return [
            (known[id(weight)][1], (weight, group))
            for group in optimizer.param_groups
            for weight in group["params"]
            if id(weight) in known
        ]


def _versions(steps: _Steps) -> tuple[int | None, ...]:
    weights = tuple([weight for _, (weight, _) in steps])
    found = native.versions_of(weights)
    return versions_of(weights) if found is None else found


def _bad(steps: _Steps) -> list[tuple[str, _Held, Severity]]:
    """Those of some weights that are not finite."""
    if native.are_finite(tuple([weight for _, (weight, _) in steps])):
        return []
    finite: Finite[tuple[str, _Held]] = Finite()
    for name, held in steps:
        finite.look_at((name, held), held[0], always)
    return [(name, held, severity) for (name, held), severity in finite.bad()]


def _is_float16(gradient: Tensor | None) -> bool:
    """Whether it is a plain tensor whose norm may overflow."""
    return gradient is not None and gradient.dtype is torch.float16 and is_plain(gradient)


def _has_step(held: _Held) -> bool:
    """Whether a weight has a gradient: an optimizer skips the others."""
    return held[0].grad is not None


def _stepped(
    optimizer: Optimizer, name: str, held: _Held, severity: Severity = Severity.FINITE
) -> SteppedWeight:
    weight, group = held
    assert weight.grad is not None
    state = optimizer.state.get(weight, {})
    return SteppedWeight(name, weight, weight.grad, state, group, severity)
