"""Steps of optimizers that hold weights of a guarded model, and weights that turned bad there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from fxguard.graph.source_lines import warn_user
from fxguard.guard._step_hooks import StepHooks
from fxguard.measure.at_hand import own_arithmetic
from fxguard.measure.finite import Finite, is_plain
from fxguard.records import Role, Severity
from fxguard.verdict.optimizer_step import SteppedWeight

__all__ = ["OptimizerSteps"]

# Called after each step with the optimizer and the weights that it stepped.
Stepped = Callable[[Optimizer, Iterator[SteppedWeight]], object]

# Called after a step that made weights bad, with the optimizer and these weights.
Spoilt = Callable[[Optimizer, Sequence[SteppedWeight]], object]

LARGE = 1e13  # magnitude of gradients whose sum of squares may not fit float32

LOST = (
    "all gradients are 0 when {}'s step begins, and were not when their backward ended: "
    "clip_grad_norm_ makes them 0 where their norm is infinite; clip them in float32"
)

_Held = tuple[Tensor, Mapping[str, Any]]  # a weight, and the settings of its group


class OptimizerSteps:
    """Looks at a model's weights after each step of an optimizer.

    Args:
        tensors: id of a parameter or buffer to its role and qualified name.
        largest_gradient: the largest magnitude of a gradient in the last backward.
        stepped: see :data:`Stepped`.
        spoilt: see :data:`Spoilt`. What it raises comes out of ``step()``.
    """

    def __init__(
        self,
        tensors: Mapping[int, tuple[Role, str]],
        largest_gradient: Callable[[], float],
        stepped: Stepped,
        spoilt: Spoilt,
    ) -> None:
        self.tensors = tensors
        self.largest_gradient = largest_gradient
        self.warns = True
        self.stepped = stepped
        self.spoilt = spoilt
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._bad_before: set[str] = set()  # names of weights that are known to be bad
        self._hooks = StepHooks(self._before, self._after)

    def close(self) -> None:
        """Remove the hooks from optimizers."""
        self._hooks.close()

    def _before(self, optimizer: Optimizer) -> None:
        if self.warns and self._lost_gradients(optimizer):
            self.warns = False
            warn_user(LOST.format(type(optimizer).__name__))
        if optimizer in self._known:
            return
        self._known.add(optimizer)
        self._bad_before.update(name for name, _, _ in self._bad(optimizer))

    def _after(self, optimizer: Optimizer) -> None:
        steps = ((name, held) for name, held in self._weights_of(optimizer) if _has_step(held))
        self.stepped(optimizer, (_stepped(optimizer, name, held) for name, held in steps))
        found = [each for each in self._bad(optimizer) if each[0] not in self._bad_before]
        self._bad_before.update(name for name, _, _ in found)
        bad = [_stepped(optimizer, *each) for each in found if _has_step(each[1])]
        if bad:
            self.spoilt(optimizer, bad)

    def _lost_gradients(self, optimizer: Optimizer) -> bool:
        """Whether all gradients are 0 now, and their norm may have overflowed before."""
        largest = self.largest_gradient()
        if not largest:
            return False
        weights = [weight for _, (weight, _) in self._weights_of(optimizer)]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        plain = [gradient for gradient in gradients if is_plain(gradient)]
        may_overflow = largest > LARGE or any(x.dtype == torch.float16 for x in plain)
        with own_arithmetic():  # for most steps, looking at the first gradient is enough
            return bool(plain) and may_overflow and not any(bool(x.any()) for x in plain)

    def _bad(self, optimizer: Optimizer) -> list[tuple[str, _Held, Any]]:
        finite: Finite[tuple[str, _Held]] = Finite()
        for name, held in self._weights_of(optimizer):
            finite.look_at((name, held), held[0])
        return [(name, held, severity) for (name, held), severity in finite.bad()]

    def _weights_of(self, optimizer: Optimizer) -> Iterator[tuple[str, _Held]]:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                known = self.tensors.get(id(weight))
                if known is not None:
                    yield known[1], (weight, group)


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
