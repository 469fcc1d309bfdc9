"""The operations of every N-th step, run twice: what does not repeat, and on which machine.

In a rechecked step each operation of the captured graphs, between them, in the loss and in the
backward runs once more on its operands, at once. A graph that a compiler runs is run twice as a
whole. Weights are looked at from the end of the step before, gradients until their step.
"""

from __future__ import annotations

import contextlib
import json
import socket
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

from fxguard.batch.batch import Batch
from fxguard.quiet._memory import Held, hold
from fxguard.quiet._reruns import Reruns, Where
from fxguard.quiet._training import Rule, Step, Training
from fxguard.quiet._twice import Unlike
from fxguard.ranks import agreement
from fxguard.source.lines import Place

__all__ = ["Recheck"]

WAITS = 20  # steps for what other ranks have found
TRANSIENT = (
    "the processor or its memory made an error: take the machine out, and go back to weights from "
    "before"
)
VARIES = "its kernel gives other bits each time; torch.use_deterministic_algorithms(True) says why"


@dataclass(frozen=True, slots=True)
class _Found:
    """Something that did not repeat, until all ranks have told what they found."""

    step: int
    what: str
    place: Place | None
    evidence: str
    advice: str


_Watched = tuple[weakref.ref[Tensor], Held]  # a weight or a gradient, and what it held


class Recheck(Rule):
    """Runs the operations of every N-th step twice.

    Args:
        training: of the model.
        every: N.

    Attributes:
        steps: how many steps were rechecked.
    """

    def __init__(self, training: Training, every: int) -> None:
        super().__init__(training)
        self.every = every
        self.steps = 0
        self._reruns = Reruns(self._unlike)
        self._calls = 0  # of the model, where nobody tells of steps
        self._has_steps = False
        self._now: int | None = None  # the step that is rechecked
        self._weights: dict[str, _Watched] = {}
        self._gradients: dict[str, _Watched] = {}
        self._waiting: list[_Found] = []
        self._counts: dict[int, int] = {}  # what did not repeat, by step

    @property
    def coverage(self) -> str:
        """What was rechecked, for the last line; "" for nothing."""
        if not self.steps:
            return ""
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        text = f"; {self._reruns.count} operations of {steps} ran twice"
        if self._reruns.documented:
            names = ", ".join(sorted(self._reruns.documented))
            text += f", {names} with other bits, which torch documents"
        return text

    # What is rechecked.

    def begins(self, batch: Batch) -> None:
        """Recheck a batch, if it is of an N-th step."""
        self._calls += 1
        number = self.training.steps if self._has_steps else self._calls - 1
        if (number + 1) % self.every:
            self._now = None
            return
        if not torch.is_grad_enabled():
            return
        if self._now != number:
            self._now, self.steps = number, self.steps + 1
            self._counts[number] = 0
            self._compare(self._weights, "weight")
            self._weights = _watched(self._named())
        batch.watchers.append(self._reruns)

    def watches_steps(self) -> None:
        """Called when steps of optimizers are told from now on."""
        self._has_steps = True

    def backward(self) -> contextlib.AbstractContextManager[None] | None:
        """A block in which a backward is to run; None if it is not rechecked."""
        return None if self._now is None else self._reruns.backward()

    def gradients_came(self) -> None:
        if self._now is None:
            return
        named = {name: x.grad for name, x in self._named() if x.grad is not None}
        for name, gradient in named.items():
            bit = self._reruns.memory.flipped(gradient)
            if bit is not None:
                self._add_flipped(f"gradient of {self.training.full(name)}", gradient, bit)
        self._gradients = _watched(named.items())

    def before(self, step: Step) -> None:
        if self._now is not None:
            self._compare(self._gradients, "gradient of")
            self._compare(self._weights, "weight")
            self._leave()
        self._judge()

    def after(self, step: Step) -> None:
        self._now, self._weights, self._gradients = None, {}, {}
        self._reruns.forget()
        if (step.number + 1) % self.every == 0:  # the next step is rechecked
            self._weights = _watched(self._named())

    def ends(self) -> None:
        self._judge(is_over=True)

    # What was found.

    def _unlike(self, where: Where, unlike: Unlike) -> None:
        self._add(where, unlike.evidence, TRANSIENT if unlike.is_once else VARIES)

    def _add(self, where: Where, evidence: str, advice: str) -> None:
        number = self._now or 0
        self._counts[number] = self._counts.get(number, 0) + 1
        self._waiting.append(_Found(number, where.title, where.place, evidence, advice))
        if agreement.rank_and_count()[1] < 2:
            self._judge(is_over=True)

    def _compare(self, held: dict[str, _Watched], what: str) -> None:
        """Look for a flipped bit in what nothing has written."""
        for name, (reference, before) in list(held.items()):
            tensor = reference()
            bit = None if tensor is None else before.flipped(tensor)
            if tensor is not None and bit is not None:
                self._add_flipped(f"{what} {self.training.full(name)}", tensor, bit)
                del held[name]

    def _add_flipped(self, what: str, tensor: Tensor, bit: int) -> None:
        evidence = f"bit {bit} of one of its {tensor.numel()} elements changed in memory"
        self._add(Where(what, None), evidence, TRANSIENT)

    def _named(self) -> list[tuple[str, Tensor]]:
        model: Module | None = self.training.model()
        return [] if model is None else [*model.named_parameters()]

    # Ranks.

    def _leave(self) -> None:
        if self._now is not None and agreement.rank_and_count()[1] > 1:
            count = self._counts.get(self._now, 0)
            agreement.leave(self._key(self._now), json.dumps(count))

    def _key(self, step: int) -> str:
        return f"recheck/{self.training.held_as()}/{step}"

    def _judge(self, *, is_over: bool = False) -> None:
        """Tell what was found, once all ranks have told of that step, or too much time has gone."""
        rank, count = agreement.rank_and_count()
        for each in list(self._waiting):
            others = agreement.left_by_others(self._key(each.step)) if count > 1 else {}
            is_known = len(others) >= count - 1
            if not (is_known or is_over or self.training.steps > each.step + WAITS):
                continue
            self._waiting.remove(each)
            what = each.what
            if count > 1 and is_known and not any(json.loads(text) for text in others.values()):
                what = f"machine: rank {rank} of {count}, alone, on {socket.gethostname()}: {what}"
            self.training.found(
                "does not repeat",
                what,
                place=each.place,
                evidence=each.evidence,
                advice=each.advice,
            )


def _watched(named: Iterable[tuple[str, Tensor]]) -> dict[str, _Watched]:
    found = ((name, x, hold(x)) for name, x in named)
    return {name: (weakref.ref(x), held) for name, x, held in found if held is not None}
