"""Weights of data-parallel ranks that should be equal and are not."""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

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
        self._own: dict[int, _Held] = {}  # by step
        self._differ: dict[int, _Differ] = {}  # by step
        self._gradients: int | None = None  # bits of those that the step reads
        # Weights that were equal before the first step, and that were not; None while not known.
        self._equal: set[str] | None = None
        self._apart: set[str] = set()
        self._is_written = False  # by something else than optimizers
        self._probe: tuple[weakref.ref[Tensor], int | None] | None = None
        self._place: Place | None = None

    def before(self, step: Step) -> None:
        if step.number == 1 and self._number < 0 and _is_replicated(self.training.model()):
            self._number = next(_numbers)
            self._leave(0, step)
        if self._looks() and _is_looked_at(step.number):
            weights = _weights_of(self.training.model()).values()
            found = bits_of([x.grad for x in weights if x.grad is not None])
            self._gradients = None if None in found else sum(filter(None, found))
        if self._number >= 0 and self._probe is not None:
            weight, bits = self._probe
            held = weight()
            if held is not None and bits is not None:
                self._is_written |= bits_of([held]) != [bits]
            self._probe = None

    def after(self, step: Step) -> None:
        if not self._looks():
            return
        if MANY <= step.number < MANY + WATCHED:
            smallest = min(step.weights.values(), key=Tensor.numel)
            self._probe = weakref.ref(smallest), bits_of([smallest])[0]
        if _is_looked_at(step.number):
            self._place = calling_line()
            self._leave(step.number, step)
            self._compare()
            self._judge()

    def _looks(self) -> bool:
        is_over = self._is_written or self.training.has("replicas differ")
        return self._number >= 0 and not is_over

    def ends(self) -> None:
        if self._number >= 0 and self._own:
            self._compare()
            self._judge()

    def _leave(self, number: int, step: Step) -> None:
        named = _weights_of(self.training.model())
        found = zip(named, bits_of([*named.values()]), strict=True)
        weights = {name: bits for name, bits in found if bits is not None}
        rates = [float(group.get("lr", 0.0)) for group in step.optimizer.param_groups]
        self._own[number] = _Held(weights, self._gradients, rates)
        agreement.leave(self._key(number), json.dumps([weights, self._gradients, rates]))

    def _key(self, number: int) -> str:
        return f"replicas/{self._number}/{number}"

    def _compare(self) -> None:
        for number, own in list(self._own.items()):
            others = agreement.left_by_others(self._key(number))
            for rank, text in others.items():
                theirs = _Held(*json.loads(text))
                if theirs.weights.keys() != own.weights.keys():
                    continue
                names = {x for x, bits in own.weights.items() if bits != theirs.weights[x]}
                if number == 0:
                    self._apart |= names
                    self._equal = set(own.weights) - self._apart
                elif names := names - self._apart:
                    self._differ.setdefault(number, _Differ(own)).add(rank, names, theirs)
            if others and number:
                del self._own[number]

    def _judge(self) -> None:
        if self._is_written or len(self._differ) < TWICE:
            return
        model = self.training.model()
        is_wrapped = model is not None and _is_of_ddp(next(model.parameters()))
        if not is_wrapped and not self._equal:
            return
        number, differ = min(self._differ.items(), key=lambda each: each[0])
        own = agreement.current_rank()
        told = ranks_in_words(tuple(sorted({*differ.ranks, *([] if own is None else [own])})))
        if differ.rates:
            here, there = differ.rates
            also = f"; the learning rates are {here:.3g} and {there:.3g}"
            advice = "give the scheduler numbers that all ranks share"
        elif differ.has_same_gradients:
            also = "; the gradients are equal, and the steps are not"
            advice = "give the optimizers of all ranks the same settings and state"
        else:
            also = ""
            advice = "average the gradients of all weights before clipping and the step"
            if is_wrapped:
                advice = "call the DDP module itself, and leave no_sync() before the last backward"
        self.training.found(
            "replicas differ",
            f"{told} hold different numbers in {_count(differ.names)}, such as "
            f"{self.training.full(min(differ.names))}",
            place=self._place,
            evidence=f"first seen behind step {number}"
            + ("; they were equal before the first step" if self._equal else "")
            + also,
            advice=advice,
        )


@dataclass(frozen=True, slots=True)
class _Held:
    """What a rank holds behind a step: bits of weights and gradients, and learning rates."""

    weights: dict[str, int]
    gradients: int | None  # None if some could not be read
    rates: list[float]


@dataclass(slots=True)
class _Differ:
    """How other ranks differ behind a step."""

    own: _Held
    ranks: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)  # of weights
    has_same_gradients: bool = True
    rates: tuple[float, float] | None = None  # the first ones that differ

    def add(self, rank: int, names: Iterable[str], theirs: _Held) -> None:
        self.ranks.add(rank)
        self.names.update(names)
        self.has_same_gradients &= theirs.gradients == self.own.gradients is not None
        pairs = zip(self.own.rates, theirs.rates, strict=False)
        self.rates = self.rates or next((each for each in pairs if each[0] != each[1]), None)


def _is_looked_at(number: int) -> bool:
    return number in (MANY, 2 * MANY, 4 * MANY) or number % EVERY == 0


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
