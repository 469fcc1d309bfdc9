"""Gradients that nobody sets to 0 between a step that used them and the next backward."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.optim.optimizer import Optimizer

from fxguard.measure.at_hand import own_arithmetic
from fxguard.measure.parts import part_here
from fxguard.quiet._training import Rule, Step, Training
from fxguard.source.lines import Place

__all__ = ["StaleGradients"]

SMALL = 2**12  # elements of a gradient that is copied
WATCHED = 3  # gradients of each optimizer
PARTS = 5  # more of them, of other parts of the model
MOST = 16  # weights among which these are looked for
FIRST, EVERY = 6, 64  # steps: the first ones are watched, then two of 64
TWICE = 2  # once may be a rehearsal


@dataclass(slots=True, eq=False)
class _Used:
    """A gradient that a step has used."""

    name: str
    weight: weakref.ref[Tensor]
    gradient: weakref.ref[Tensor]
    copy: Tensor
    place: Place | None = None  # of the backward that began while the gradient was as it had been

    def now(self) -> Tensor | None:
        """The gradient, if the weight has the same one still."""
        weight, gradient = self.weight(), self.gradient()
        return gradient if weight is not None and weight.grad is gradient else None

    def is_as_it_was(self, gradient: Tensor) -> bool:
        part = part_here(gradient)
        return (
            part is not None and part.shape == self.copy.shape and bool((part == self.copy).all())
        )


class StaleGradients(Rule):
    """Finds a backward that adds to a gradient that a step has used, before the next step.

    A gradient that was written or set to 0 between the two is none, whoever wrote it.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._used: weakref.WeakKeyDictionary[Optimizer, list[_Used]]
        self._used = weakref.WeakKeyDictionary()
        self._is_watching = False  # a gradient; what follows costs nothing else in most steps
        self._times = 0

    def backward_comes(self, place: Place | None) -> None:
        if not self._is_watching:
            return
        for used in self._used.values():
            used[:] = [each for each in used if _stays(each, place)]

    def before(self, step: Step) -> None:
        if self._is_watching:
            self._judge(step.optimizer)

    def after(self, step: Step) -> None:
        if self._is_watching:
            self._judge(step.optimizer)  # the backward may be in the step, as in a closure
            self._used.pop(step.optimizer, None)
            self._is_watching = bool(self._used)
        if step.number > FIRST and step.number % EVERY > 1:
            return
        if self.training.has("stale gradients"):
            return
        named = list(step.weights.items())
        some = dict(named[at * (len(named) - 1) // MOST] for at in range(MOST + 1))
        parts = dict(reversed(list({name.split(".")[0]: name for name, _ in named}.items())))
        with own_arithmetic():
            found = list(_used_among(some.items(), WATCHED))
            seen = {used.name.split(".")[0] for used in found}
            rest = ((name, step.weights[name]) for part, name in parts.items() if part not in seen)
            self._used[step.optimizer] = found + list(_used_among(rest, PARTS))
        self._is_watching = True

    def _judge(self, optimizer: Optimizer) -> None:
        for each in self._used.get(optimizer, ()):
            gradient = each.now()
            if each.place is None or gradient is None:
                continue
            with own_arithmetic():
                is_sum = not each.is_as_it_was(gradient) and bool(gradient.any())
            if is_sum:
                del self._used[optimizer]
                self._times += 1
                if self._times >= TWICE:
                    self._tell(each)
                return  # one of them is enough

    def _tell(self, used: _Used) -> None:
        self.training.found(
            "stale gradients",
            f"this backward adds to the gradient of {self.training.full(used.name)} that a step "
            "has used",
            place=used.place,
            evidence=f"it was not set to 0 before step {self.training.steps + 1}",
            advice="call optimizer.zero_grad() once for each step, before its first backward",
        )


def _used_among(named: Iterable[tuple[str, Tensor]], most: int) -> Iterator[_Used]:
    """Gradients of the first of some weights."""
    return itertools.islice((used for each in named if (used := _used_of(*each))), most)


def _used_of(name: str, weight: Tensor) -> _Used | None:
    gradient = weight.grad
    part = None if gradient is None or gradient.numel() > SMALL else part_here(gradient)
    if gradient is None or part is None or not bool(part.any()):
        return None
    return _Used(name, weakref.ref(weight), weakref.ref(gradient), part.detach().clone())


def _stays(used: _Used, place: Place | None) -> bool:
    """Whether a gradient may still turn out to be a stale one, now that a backward begins."""
    gradient = used.now()
    if gradient is None:
        return False
    with own_arithmetic():
        if used.is_as_it_was(gradient):
            used.place = place
            return True
        # A backward has added to it, or somebody has written it, who may have set it to 0.
        return used.place is not None and bool(gradient.any())
