"""Weights of data-parallel ranks that should be equal and are not."""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Collection

from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from fxguard.capture.instances import instances_of
from fxguard.quiet._bits import bits_of
from fxguard.quiet._training import MANY, Rule, Step, Training
from fxguard.ranks import agreement
from fxguard.report.in_words import ranks_in_words
from fxguard.source.lines import Place, calling_line

__all__ = ["ReplicasDiffer"]

EVERY = 100  # steps, beside 1, 20, 40 and 80
WATCHED = 64  # steps in which nothing but optimizers may write weights
TWICE = 2  # steps in which ranks differed

_numbers = itertools.count()  # of the models of this process, as they begin


class ReplicasDiffer(Rule):
    """Compares what ranks hold before the first step and behind some others.

    Each rank leaves one number for each weight in the store in which the ranks found each other,
    and reads what the others have left. No rank waits. Ranks count as replicas if
    DistributedDataParallel holds the weights, or if all were equal before the first step and
    nothing but optimizers writes them, as an average of weights would.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._number = -1  # of the model; -1 before the first step
        self._own: dict[int, dict[str, int]] = {}  # by step: bits, by the name of the weight
        self._differ: dict[int, tuple[set[int], set[str]]] = {}  # by step: ranks and weights
        # Weights that were equal before the first step, and that were not; None while not known.
        self._equal: set[str] | None = None
        self._apart: set[str] = set()
        self._is_written = False  # by something else than optimizers
        self._probe: tuple[weakref.ref[Tensor], int | None] | None = None
        self._place: Place | None = None

    def before(self, step: Step) -> None:
        if step.number == 1 and self._number < 0 and _is_replicated(self.training.model()):
            self._number = next(_numbers)
            self._leave(0)
        if self._number >= 0 and self._probe is not None:
            weight, bits = self._probe
            held = weight()
            if held is not None and bits is not None:
                self._is_written |= bits_of([held]) != [bits]
            self._probe = None

    def after(self, step: Step) -> None:
        if self._number < 0 or self._is_written or self.training.has("replicas differ"):
            return
        if MANY <= step.number < MANY + WATCHED:
            smallest = min(step.weights.values(), key=Tensor.numel)
            self._probe = weakref.ref(smallest), bits_of([smallest])[0]
        if step.number in (MANY, 2 * MANY, 4 * MANY) or step.number % EVERY == 0:
            self._place = calling_line()
            self._leave(step.number)
            self._compare()
            self._judge()

    def ends(self) -> None:
        if self._number >= 0 and self._own:
            self._compare()
            self._judge()

    def _leave(self, number: int) -> None:
        named = _weights_of(self.training.model())
        found = zip(named, bits_of([*named.values()]), strict=True)
        self._own[number] = {name: bits for name, bits in found if bits is not None}
        agreement.leave(self._key(number), json.dumps(self._own[number]))

    def _key(self, number: int) -> str:
        return f"replicas/{self._number}/{number}"

    def _compare(self) -> None:
        for number, own in list(self._own.items()):
            others = agreement.left_by_others(self._key(number))
            for rank, text in others.items():
                theirs = json.loads(text)
                if theirs.keys() != own.keys():
                    continue
                differ = {name for name in own if own[name] != theirs[name]}
                if number == 0:
                    self._apart |= differ
                    self._equal = set(own) - self._apart
                elif differ := differ - self._apart:
                    ranks, names = self._differ.setdefault(number, (set(), set()))
                    ranks.add(rank)
                    names |= differ
            if others and number:
                del self._own[number]

    def _judge(self) -> None:
        if self._is_written or len(self._differ) < TWICE:
            return
        model = self.training.model()
        is_wrapped = model is not None and _is_of_ddp(next(model.parameters()))
        if not is_wrapped and not self._equal:
            return
        number, (ranks, names) = min(self._differ.items())
        own = agreement.current_rank()
        told = ranks_in_words(tuple(sorted({*ranks, *([] if own is None else [own])})))
        self.training.found(
            "replicas differ",
            f"{told} hold different numbers in {_count(names)}, such as "
            f"{self.training.full(min(names))}",
            place=self._place,
            evidence=f"first seen behind step {number}"
            + ("; they were equal before the first step" if self._equal else ""),
            advice="call the DDP module itself, and no_sync() around all backwards of a step but "
            "the last"
            if is_wrapped
            else "average the gradients of all weights before clipping and the step",
        )


def _is_replicated(model: Module | None) -> bool:
    """Whether there are several ranks, and no weight of the model is known to be a part of one."""
    if agreement.current_rank() is None or agreement.rank_and_count()[1] < 2:
        return False
    return all(type(weight) in (Tensor, Parameter) for weight in _weights_of(model).values())


def _weights_of(model: Module | None) -> dict[str, Tensor]:
    named = () if model is None else model.named_parameters()
    return {name: weight for name, weight in named if weight.requires_grad}


def _is_of_ddp(weight: Tensor) -> bool:
    wrapped = instances_of(DistributedDataParallel)
    return any(weight is x for each in wrapped for x in each.parameters())


def _count(names: Collection[str]) -> str:
    return f"{len(names)} weight{'' if len(names) == 1 else 's'}"
