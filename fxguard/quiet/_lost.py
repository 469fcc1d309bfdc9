"""Updates that are too small for the digits of the weights."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from fxguard.formats import FORMATS
from fxguard.measure.at_hand import name_of_dtype, own_arithmetic
from fxguard.measure.parts import part_here
from fxguard.quiet._training import MANY, Rule, Step, Training
from fxguard.source.lines import Place, calling_line

__all__ = ["LostUpdates"]

SAMPLED = frozenset({10, 15, 20, 40, 80, 160, 320})
EVERY = 500  # steps, beside these
ELEMENTS = 2**10  # of each weight
WEIGHTS = 16
LEAST = 3  # steps
MOST_LOST = 0.5  # of the elements that had to move


@dataclass(slots=True)
class _Sample:
    name: str
    weight: weakref.ref[Tensor]
    every: int
    copy: Tensor


class LostUpdates(Rule):
    """Compares samples of weights before and behind some steps of SGD, Adam and AdamW.

    An element counts whose update, computed again in float64, is not 0. It is lost if the element
    is as before, and the update is below half the distance to the next number of the dtype.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._samples: list[_Sample] = []
        self._shares: list[float] = []  # of lost elements, in each step that was looked at
        self._lost: dict[str, int] = {}  # steps in which most of a weight was lost
        self._looked: dict[str, int] = {}
        self._place: Place | None = None
        self._last: tuple[str, str, float, float] | None = None

    def before(self, step: Step) -> None:
        self._samples = []
        is_known = type(step.optimizer) in (SGD, Adam, AdamW) and step.is_learning
        if not is_known or not (step.number in SAMPLED or step.number % EVERY == 0):
            return
        self._place = calling_line()
        named = list(step.weights.items())
        with own_arithmetic():
            for name, weight in named[:: max(1, len(named) // WEIGHTS)]:
                part = part_here(weight)
                if part is None or weight.grad is None or type(weight.grad) is not Tensor:
                    continue
                if weight.is_sparse or weight.grad.is_sparse or not part.is_floating_point():
                    continue
                every = -(-part.numel() // ELEMENTS)
                copy = part.detach().reshape(-1)[::every].clone()
                self._samples.append(_Sample(name, weakref.ref(weight), every, copy))

    def after(self, step: Step) -> None:
        samples, self._samples = self._samples, []
        if not samples:
            return
        groups = {id(x): group for group in step.optimizer.param_groups for x in group["params"]}
        moving, lost = 0, 0
        with own_arithmetic():
            for sample in samples:
                weight = sample.weight()
                if weight is None or id(weight) not in groups:
                    continue
                found = self._in(sample, weight, groups[id(weight)], step.optimizer)
                if found is None:
                    continue
                moving, lost = moving + found[0], lost + found[1]
                self._looked[sample.name] = self._looked.get(sample.name, 0) + 1
                if found[1] > MOST_LOST * found[0]:
                    self._lost[sample.name] = self._lost.get(sample.name, 0) + 1
        if moving:
            self._shares.append(lost / moving)

    def ends(self) -> None:
        if len(self._shares) < LEAST or self.training.steps < MANY or self._last is None:
            return
        share = median(self._shares)
        if share <= MOST_LOST:
            return
        count = sum(self._lost.get(name, 0) * 2 > times for name, times in self._looked.items())
        optimizer, dtype, update, weight = self._last
        self.training.found(
            "lost updates",
            f"{optimizer} does not change most elements of {count} of {len(self._looked)} weights",
            place=self._place,
            evidence=f"{share:.0%} of the updates, such as {update:.2g} at a weight of "
            f"{weight:.2g}, are below half the distance to the next number of {dtype}",
            advice="keep the weights in float32 and use autocast, or step a float32 copy of them",
        )

    def _in(
        self, sample: _Sample, weight: Tensor, group: Mapping[str, Any], optimizer: Optimizer
    ) -> tuple[int, int] | None:
        """How many elements had to move, and how many of these were lost."""
        part = part_here(weight)
        if part is None or weight.grad is None:
            return None

        def taken(x: Any) -> Tensor:
            held = part_here(x)
            assert held is not None
            return held.detach().reshape(-1)[:: sample.every].double()

        update = _update(optimizer, group, optimizer.state.get(weight, {}), weight.grad, taken)
        if update is None or len(update) != len(sample.copy):
            return None
        before = sample.copy.double()
        update = update + float(group["lr"]) * _decay(optimizer, group) * before
        is_same = part.detach().reshape(-1)[:: sample.every] == sample.copy
        half = _half_a_unit(before, weight.dtype)
        has_to = (update != 0) & torch.isfinite(update)
        is_lost = has_to & is_same & (update.abs() <= half)
        lost = int(is_lost.sum())
        if lost and (self._last is None or not self._shares):
            at = int(is_lost.nonzero()[lost // 2])
            name = type(optimizer).__name__
            dtype = name_of_dtype(weight.dtype)
            self._last = name, dtype, float(update[at].abs()), float(before[at].abs())
        return int(has_to.sum()), lost


def _update(optimizer: Optimizer, group: Any, state: Any, gradient: Tensor, taken: Any) -> Any:
    """What a step takes off a weight, without its weight decay; None if that is not known."""
    lr = float(group["lr"])
    if type(optimizer) is SGD:
        used = state.get("momentum_buffer")
        if used is None or group.get("nesterov"):
            used = gradient
        return lr * taken(used)
    if "exp_avg" not in state or group.get("amsgrad"):
        return None
    count = float(state["step"])
    first, second = (float(beta) for beta in group["betas"])
    mean = taken(state["exp_avg"]) / (1 - first**count)
    root = (taken(state["exp_avg_sq"]) / (1 - second**count)).sqrt()
    return lr * mean / (root + float(group["eps"]))


def _decay(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """The factor of decoupled weight decay."""
    decoupled = type(optimizer) is AdamW or group.get("decoupled_weight_decay", False)
    return float(group.get("weight_decay", 0.0)) if decoupled else 0.0


def _half_a_unit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between neighbours of numbers of a dtype."""
    info = FORMATS[name_of_dtype(dtype)]
    _, exponent = torch.frexp(x.abs().clamp(min=info.smallest))
    return torch.ldexp(torch.full_like(x, info.eps / 4), exponent)
