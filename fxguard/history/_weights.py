"""Weights, their gradients and the optimizer's step on them, as series."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.optim.optimizer import Optimizer

from fxguard.history._norms import largest, norms
from fxguard.history._open_step import OpenStep
from fxguard.history._sample import LARGE, is_plain, sample_of
from fxguard.history._turned import Turned
from fxguard.measure.at_hand import own_arithmetic
from fxguard.steps.optimizer_step import settings_of

__all__ = ["WeightsOfOptimizer"]

FULL = 10  # steps: so often the norms of large weights and states are those of all elements


@dataclass(slots=True)
class _Held:
    """A weight that an optimizer steps."""

    name: str
    weight: Tensor
    copy: Tensor  # of its sample, after the last step
    gradient: int  # positions of series
    norm: int
    drift: int
    step: int


class WeightsOfOptimizer:
    """The weights of a model that one optimizer steps.

    Args:
        step: the step that runs.
        optimizer: looked at, and not kept.
        names: of the model's weights, by their ids.
    """

    def __init__(self, step: OpenStep, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.step = step
        self.title = f"{type(optimizer).__name__}'s step"
        self.count = _count(optimizer)
        self._steps = 0
        self._held = list(self._held_by(optimizer, names))
        self._turned = Turned(step, [x.name for x in self._held])
        self._has_large = any(x.weight.numel() > LARGE for x in self._held)

    def __bool__(self) -> bool:
        return bool(self._held)

    def is_of(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer still has as many weights."""
        return self.count == _count(optimizer)

    def backward_ended(self) -> None:
        """Keep what a backward has made."""
        with own_arithmetic():
            self._turned.backward_ended([x.weight for x in self._held])

    def before(self) -> None:
        """Note gradients and weights as the step reads them, and what else has written weights."""
        with own_arithmetic():
            stepped = [x for x in self._held if is_plain(x.weight.grad)]
            gradients = tuple([x.weight.grad for x in stepped if x.weight.grad is not None])
            self.step.note_all([x.gradient for x in stepped], norms(gradients))
            self._turned.note([x.weight for x in self._held])
            samples, copies = self._samples(), tuple([x.copy for x in self._held])
            drifts, of_samples = norms(samples, copies), norms(samples)
            self.step.note_all([x.drift for x in self._held], drifts, of_samples)
            if self._has_large and self._steps % FULL == 0:
                of_samples = norms(tuple([x.weight.detach() for x in self._held]))
            self.step.note_all([x.norm for x in self._held], of_samples)

    def after(self, optimizer: Optimizer) -> None:
        """Note what the step changed, and what it went by.

        Args:
            optimizer: the optimizer.
        """
        self._steps += 1
        with own_arithmetic():
            samples, copies = self._samples(), tuple([x.copy for x in self._held])
            changes = norms(samples, copies)
            self.step.note_all([x.step for x in self._held], changes, norms(samples))
            self._note_settings(optimizer)
            self._note_states(optimizer)

    def _samples(self) -> tuple[Tensor, ...]:
        return tuple([sample_of(x.weight) for x in self._held])

    def _held_by(self, optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[_Held]:
        found = [
            (names[id(weight)], weight)
            for group in optimizer.param_groups
            for weight in group["params"]
            if id(weight) in names and is_plain(weight)
        ]
        series = self.step.series
        for at, (name, weight) in enumerate(found):
            with own_arithmetic():
                copied = sample_of(weight).clone()
            # A backward makes the gradients of the last weights first.
            gradient = series("gradient", name, order=len(found) - at)
            drift, norm = series("drift", name, order=2 * at), series("weight", name, order=2 * at)
            change = series("step", name, order=at)
            yield _Held(name, weight, copied, gradient, norm, drift, change)

    def _note_settings(self, optimizer: Optimizer) -> None:
        for at, group in enumerate(optimizer.param_groups):
            of_group = f" (group {at})" if at else ""
            for key, value in settings_of(group).items():
                name = "learning rate" if key == "lr" else key
                series = self.step.series("setting", f"{name} of {self.title}{of_group}")
                self.step.note(series, value, value)

    def _note_states(self, optimizer: Optimizer) -> None:
        """The largest magnitude of each state, over all weights."""
        found: dict[str, list[Tensor]] = {}
        for held in self._held:
            for key, value in optimizer.state.get(held.weight, {}).items():
                if is_plain(value) and value.dim() and value.is_floating_point():
                    found.setdefault(key, []).append(sample_of(value))
        for key, values in found.items():
            series = self.step.series("state", f"{key} of {self.title}")
            self.step.note_all([series] * len(values), largest(values))


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
