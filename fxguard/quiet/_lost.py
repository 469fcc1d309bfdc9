"""Updates that are too small for the digits of the weights."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass(slots=True, eq=False)
class _Seen:
    """What the steps of one optimizer showed."""

    optimizer: str
    steps: int = 0  # with a learning rate above 0
    # By dtype, of lost elements, in each step looked at.
    shares: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    looked: Counter[str] = field(default_factory=Counter)  # steps, by weight
    lost: Counter[str] = field(default_factory=Counter)  # those in which most of it was lost
    place: Place | None = None
    example: tuple[str, float, float] | None = None  # a dtype, an update and a weight


class LostUpdates(Rule):
    """Compares samples of weights before and behind some steps of SGD, Adam and AdamW.

    An element counts whose update, computed again in float64, is not 0. It is lost if the element
    is as before, and the update is below half the distance to the next number of the dtype.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._samples: list[_Sample] = []
        self._by_optimizer: weakref.WeakKeyDictionary[Optimizer, _Seen]
        self._by_optimizer = weakref.WeakKeyDictionary()
        self._seen: list[_Seen] = []  # of optimizers that may be gone

    def before(self, step: Step) -> None:
        self._samples = []
        if type(step.optimizer) not in (SGD, Adam, AdamW) or not step.is_learning:
            return
        seen = self._by_optimizer.get(step.optimizer)
        if seen is None:
            seen = self._by_optimizer[step.optimizer] = _Seen(type(step.optimizer).__name__)
            self._seen.append(seen)
        seen.steps += 1
        if not (seen.steps in SAMPLED or seen.steps % EVERY == 0):
            return
        seen.place = calling_line()
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
        seen = self._by_optimizer[step.optimizer]
        groups = {id(x): group for group in step.optimizer.param_groups for x in group["params"]}
        moving, lost = Counter[str](), Counter[str]()
        with own_arithmetic():
            for sample in samples:
                weight = sample.weight()
                if weight is None or id(weight) not in groups:
                    continue
                found = self._in(sample, weight, groups[id(weight)], step.optimizer, seen)
                if found is None:
                    continue
                dtype = name_of_dtype(weight.dtype)
                moving[dtype], lost[dtype] = moving[dtype] + found[0], lost[dtype] + found[1]
                seen.looked[sample.name] += 1
                seen.lost[sample.name] += found[1] > MOST_LOST * found[0]
        for dtype in +moving:
            seen.shares[dtype].append(lost[dtype] / moving[dtype])

    def ends(self) -> None:
        for seen in self._seen:
            self._tell(seen)

    def _tell(self, seen: _Seen) -> None:
        shares = [median(each) for each in seen.shares.values() if len(each) >= LEAST]
        share = max(shares, default=0.0)
        if share <= MOST_LOST or seen.steps < MANY or seen.example is None:
            return
        count = sum(2 * seen.lost[name] > times for name, times in seen.looked.items())
        dtype, update, weight = seen.example
        self.training.found(
            "lost updates",
            f"{seen.optimizer} does not change most elements of {count} of {len(seen.looked)} "
            "weights",
            place=seen.place,
            evidence=f"{share:.0%} of the updates, such as {update:.2g} at a weight of "
            f"{weight:.2g}, are below half the distance to the next number of {dtype}",
            advice="keep the weights in float32 and use autocast, or step a float32 copy of them",
        )

    def _in(
        self,
        sample: _Sample,
        weight: Tensor,
        group: Mapping[str, Any],
        optimizer: Optimizer,
        seen: _Seen,
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
        if lost and seen.example is None:
            at = int(is_lost.nonzero()[lost // 2])
            dtype = name_of_dtype(weight.dtype)
            seen.example = dtype, float(update[at].abs()), float(before[at].abs())
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
