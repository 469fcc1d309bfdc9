"""Updates that are too small for the digits of the weights."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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

SAMPLED = frozenset({10, 15, 20, 80, 320})
EVERY = 500  # steps, beside these
ELEMENTS = 2**10  # of each weight
WEIGHTS = 16
LEAST = 3  # steps
MOST_LOST = 0.5  # of the elements that had to move


@dataclass(slots=True)
class _Samples:
    """Elements of weights of one dtype that an optimizer steps in one way."""

    group: Mapping[str, Any]
    names: list[str] = field(default_factory=list)
    weights: list[weakref.ref[Tensor]] = field(default_factory=list)
    everys: list[int] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)


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
        self._samples: list[_Samples] = []
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
        some = list(step.weights.items())
        some = some[:: -(-len(some) // WEIGHTS) or 1]
        groups = {id(x): group for group in step.optimizer.param_groups for x in group["params"]}
        alike = dict[Any, _Samples]()
        with own_arithmetic():
            for name, weight in some:
                part, group = part_here(weight), groups.get(id(weight))
                if part is None or group is None or type(weight.grad) is not Tensor:
                    continue
                if weight.is_sparse or weight.grad.is_sparse or not part.is_floating_point():
                    continue
                count = float(step.optimizer.state.get(weight, {}).get("step", 0))
                key = id(group), count, part.dtype, part.device
                samples = alike.setdefault(key, _Samples(group))
                every = -(-part.numel() // ELEMENTS)
                samples.names.append(name)
                samples.weights.append(weakref.ref(weight))
                samples.everys.append(every)
                samples.copies.append(part.detach().reshape(-1)[::every].clone())
        self._samples = list(alike.values())

    def after(self, step: Step) -> None:
        samples, self._samples = self._samples, []
        if not samples:
            return
        seen = self._by_optimizer[step.optimizer]
        moving, lost = Counter[str](), Counter[str]()
        with own_arithmetic():
            for each in samples:
                weights = [weight for ref in each.weights if (weight := ref()) is not None]
                if len(weights) < len(each.weights) or any(x.grad is None for x in weights):
                    continue
                dtype = name_of_dtype(each.copies[0].dtype)
                for name, had_to, of_these in _lost_in(each, weights, step.optimizer, seen):
                    moving[dtype], lost[dtype] = moving[dtype] + had_to, lost[dtype] + of_these
                    seen.looked[name] += 1
                    seen.lost[name] += of_these > MOST_LOST * had_to
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


def _lost_in(
    samples: _Samples, weights: Sequence[Tensor], optimizer: Optimizer, seen: _Seen
) -> list[tuple[str, int, int]]:
    """Each weight, how many of its elements had to move, and how many of these were lost."""

    def taken(tensors: Iterable[Any]) -> Tensor:
        """The elements of tensors of the weights' shapes, in float64."""
        parts = [part_here(x) for x in tensors]
        pairs = zip(parts, samples.everys, strict=True)
        return torch.cat([x.detach().reshape(-1)[::n] for x, n in pairs if x is not None]).double()

    group = samples.group
    update = _update(optimizer, group, weights, taken)
    before, now = torch.cat(samples.copies).double(), taken(weights)
    if update is None or not len(update) == len(before) == len(now):
        return []
    decay = float(group["lr"]) * _decay(optimizer, group)
    update = update + decay * before if decay else update
    dtype = samples.copies[0].dtype
    has_to = (update != 0) & torch.isfinite(update)
    is_lost = has_to & (now == before) & (update.abs() <= _half_a_unit(before, dtype))
    ends = list(itertools.accumulate(len(x) for x in samples.copies))
    counts = torch.stack((has_to, is_lost)).cumsum(1)[:, [end - 1 for end in ends]].tolist()
    if counts[1][-1] and seen.example is None:
        at = int(is_lost.nonzero()[counts[1][-1] // 2])
        seen.example = name_of_dtype(dtype), float(update[at].abs()), float(before[at].abs())
    had_to, of_these = ([now - last for last, now in pairwise([0, *each])] for each in counts)
    return list(zip(samples.names, had_to, of_these, strict=True))


def _update(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    weights: Sequence[Tensor],
    taken: Callable[[Iterable[Any]], Tensor],
) -> Tensor | None:
    """What a step takes off weights, without its weight decay; None if that is not known."""
    lr = float(group["lr"])
    states = [optimizer.state.get(weight, {}) for weight in weights]
    if type(optimizer) is SGD:
        used = [state.get("momentum_buffer") for state in states]
        if group.get("nesterov") or any(x is None for x in used):
            used = [weight.grad for weight in weights]
        return lr * taken(used)
    if group.get("amsgrad") or not all("exp_avg" in state for state in states):
        return None
    count = float(states[0]["step"])
    first, second = (float(beta) for beta in group["betas"])
    mean = taken(state["exp_avg"] for state in states) / (1 - first**count)
    root = (taken(state["exp_avg_sq"] for state in states) / (1 - second**count)).sqrt()
    update: Tensor = lr * mean / (root + float(group["eps"]))
    return update


def _decay(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """The factor of decoupled weight decay."""
    decoupled = type(optimizer) is AdamW or group.get("decoupled_weight_decay", False)
    return float(group.get("weight_decay", 0.0)) if decoupled else 0.0


def _half_a_unit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between neighbours of numbers of a dtype."""
    info = FORMATS[name_of_dtype(dtype)]
    _, exponent = torch.frexp(x.abs().clamp(min=info.smallest))
    return torch.ldexp(torch.full_like(x, info.eps / 4), exponent)
