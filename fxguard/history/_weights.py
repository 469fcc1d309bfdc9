"""Weights, their gradients and the optimizer's step on them, as series."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from fxguard.history._norms import Changes, changes, largest, norms
from fxguard.history._open_step import OpenStep, as_range
from fxguard.history._sample import LARGE, are_alike, like, parts_here, sample_of
from fxguard.history._summed import Summed
from fxguard.history._turned import Turned
from fxguard.measure import native
from fxguard.measure.at_hand import own_arithmetic
from fxguard.measure.parts import part_here
from fxguard.steps.optimizer_step import settings_of

__all__ = ["WeightsOfOptimizer"]

KINDS = ("gradient", "norm", "drift", "step")  # of series of a weight
FULL = 10  # steps: so often the norms of large weights and states are those of all elements


@dataclass(slots=True)
class _Held:
    """A weight that an optimizer steps."""

    name: str
    weight: Tensor
    gradient: int  # positions of series
    norm: int
    drift: int
    step: int


class WeightsOfOptimizer:
    """The weights of a model that one optimizer steps: of a shared one, what this rank holds.

    Args:
        step: the step that runs.
        optimizer: looked at, and not kept.
        names: of the model's weights, by their ids.
        before: copies of samples of weights behind the last step of another optimizer, by name.

    Attributes:
        is_of_model: whether the optimizer steps a weight of the model, one that is not measured,
            too.
    """

    def __init__(
        self,
        step: OpenStep,
        optimizer: Optimizer,
        names: Mapping[int, str],
        before: Mapping[str, Tensor],
    ) -> None:
        self.step = step
        self.title = f"{type(optimizer).__name__}'s step"
        self.count = _count(optimizer)
        self._steps = 0
        stepped = [weight for group in optimizer.param_groups for weight in group["params"]]
        self.is_of_model = any(id(weight) in names for weight in stepped)
        self._held, self._copies = list[_Held](), list[Tensor]()  # of samples, after the last step
        with own_arithmetic():
            for held, copy in self._held_by(stepped, names):
                self._held.append(held)
                self._copies.append(copy)
        self._before = [before.get(held.name) for held in self._held]
        self._of_all = {kind: _positions(kind, self._held) for kind in KINDS}
        self._turned = Turned(step, [x.name for x in self._held])
        self._summed = Summed(step, self.title)
        parts = [part_here(x.weight) for x in self._held]
        self._has_large = any(x is not None and x.numel() > LARGE for x in parts)

    @property
    def copies(self) -> Iterator[tuple[str, Tensor]]:
        """The names of the weights, and what samples of them were behind the last step."""
        return zip((held.name for held in self._held), self._copies, strict=True)

    def is_of(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer still has as many weights."""
        return self.count == _count(optimizer)

    def backward_ended(self) -> None:
        """Keep what a backward has made."""
        with own_arithmetic():
            gradients = self._gradients()
            self._turned.backward_ended(gradients)
            self._summed.backward_ended(gradients)

    def before(self) -> None:
        """Note gradients and weights as the step reads them, and what else has written weights."""
        with own_arithmetic():
            self._note_gradients()
            held, parts, (drifts, sizes, _) = self._changed()
            if self._steps:
                self.step.note_all(self._series("drift", held), drifts, sizes)
            else:  # another optimizer may know what they were
                self._note_other_copies()
            if self._has_large and self._steps % FULL == 0:
                sizes = norms(parts, most=0)
            self.step.note_all(self._series("norm", held), sizes)

    def after(self, optimizer: Optimizer) -> None:
        """Note what the step changed, and what it went by.

        Args:
            optimizer: the optimizer.
        """
        self._steps, self._before = self._steps + 1, []
        with own_arithmetic():
            held, _, (steps, sizes, _) = self._changed()
            self.step.note_all(self._series("step", held), steps, sizes)
            self._note_settings(optimizer)
            self._note_states(optimizer)

    def _note_other_copies(self) -> None:
        """Note how far weights are from where the optimizer before this one has left them."""
        for held, copy, other in zip(self._held, self._copies, self._before, strict=True):
            if other is not None and (known := like(other, copy)) is not None:
                found = changes((copy,), (known,), most=0)
                self.step.note_all([held.drift], found.change, found.now)

    def _note_gradients(self) -> None:
        """Note the norm of each gradient, and by how much it is turned."""
        self._summed.note()
        gradients = self._gradients()
        sizes = self._turned.note(gradients)
        having = self._held
        if sizes is None or self._has_large:
            parts = parts_here(gradients)
            having = [held for held, x in zip(having, parts, strict=True) if x is not None]
            sizes = norms(tuple([x for x in parts if x is not None]), most=0)
        self.step.note_all(self._series("gradient", having), sizes)

    def _series(self, kind: str, held: list[_Held]) -> Sequence[int]:
        """The positions of one kind of series of some weights, mostly of all."""
        return self._of_all[kind] if len(held) == len(self._held) else _positions(kind, held)

    def _gradients(self) -> tuple[Tensor | None, ...]:
        return tuple([x.weight.grad for x in self._held])

    def _changed(self) -> tuple[list[_Held], tuple[Tensor, ...], Changes]:
        """The weights that can be compared with their copies, and how much; others begin anew."""
        weights, copies = tuple([x.weight for x in self._held]), tuple(self._copies)
        of_all = native.changes(weights, copies, LARGE)
        if of_all is not None:
            return self._held, weights, Changes(*of_all)
        found = list[tuple[_Held, Tensor, Tensor]]()
        for at, (held, copy) in enumerate(zip(self._held, copies, strict=True)):
            part = part_here(held.weight)
            if part is None:
                continue
            sample = sample_of(part)
            if are_alike(sample, copy):
                found.append((held, part, copy))
            else:
                self._copies[at] = sample.clone()
        parts = tuple([part for _, part, _ in found])
        between = changes(parts, tuple([copy for _, _, copy in found]))
        return [held for held, _, _ in found], parts, between

    def _held_by(
        self, stepped: Sequence[Tensor], names: Mapping[int, str]
    ) -> Iterator[tuple[_Held, Tensor]]:
        """The weights, each with a copy of its sample."""
        known = [(names[id(weight)], weight) for weight in stepped if id(weight) in names]
        parts = [(name, weight, part_here(weight)) for name, weight in known]
        found = [(name, weight, part) for name, weight, part in parts if part is not None]
        series, last = self.step.series, len(found)
        named = [(at, name) for at, (name, _, _) in enumerate(found)]
        # Positions of one kind follow one another. A backward makes the last gradients first.
        gradients = [series("gradient", name, order=last - at) for at, name in named]
        drifts = [series("drift", name, order=2 * at) for at, name in named]
        sizes = [series("weight", name, order=2 * at) for at, name in named]
        changed = [series("step", name, order=at) for at, name in named]
        for (name, weight, part), *places in zip(
            found, gradients, sizes, drifts, changed, strict=True
        ):
            yield _Held(name, weight, *places), sample_of(part).clone()

    def _note_settings(self, optimizer: Optimizer) -> None:
        for at, group in enumerate(optimizer.param_groups):
            of_group = f" (group {at})" if at else ""
            for key, value in settings_of(group).items():
                name = "learning rate" if key == "lr" else key
                series = self.step.series("setting", f"{name} of {self.title}{of_group}")
                self.step.note(series, value, value)

    def _note_states(self, optimizer: Optimizer) -> None:
        """The largest magnitude of each state, over all weights."""
        states = self._states_of(optimizer)
        for key in dict.fromkeys(key for each in states for key in each):
            values = tuple([x for each in states if (x := each.get(key)) is not None])
            if any(map(_is_measured, values)):
                series = self.step.series("state", f"{key} of {self.title}")
                self._note_largest(series, values)

    def _note_largest(self, series: int, states: tuple[Any, ...]) -> None:
        found = native.largest(states, LARGE)
        if found is None:
            parts = tuple([x for x in parts_here(states) if x is not None])
            measured = tuple([x for x in parts if _is_measured(x)])
            self.step.note_all([series] * len(measured), largest(measured))
        else:
            is_number = not math.isnan(sum(found))
            self.step.note(series, min(found), max(found) if is_number else math.nan)

    def _states_of(self, optimizer: Optimizer) -> list[Mapping[str, Any]]:
        """The states of the weights. Looking each up takes as long as measuring it."""
        state = optimizer.state
        found = list(state.values())
        is_each = len(found) == len(self._held) == self.count
        if not is_each or not all(isinstance(x, dict) for x in found):  # some hold other things
            found = [state.get(held.weight, {}) for held in self._held]
        return found


def _positions(kind: str, held: list[_Held]) -> Sequence[int]:
    return as_range([getattr(x, kind) for x in held])


def _is_measured(state: object) -> bool:
    return isinstance(state, Tensor) and state.dim() > 0 and state.is_floating_point()


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
