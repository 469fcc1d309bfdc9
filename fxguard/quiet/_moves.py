"""Weights that ask for gradients and never move."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import Optimizer

from fxguard.batch.loss import Loss
from fxguard.measure.at_hand import own_arithmetic
from fxguard.measure.parts import part_here
from fxguard.quiet._bits import bits_of
from fxguard.quiet._by_name import is_beside, kind_of, pattern_of, top_of, twins_of
from fxguard.quiet._readers import Readers
from fxguard.quiet._training import MANY, Rule, Step, Training
from fxguard.report.quiet_fault import FaultKind
from fxguard.source.lines import Place, source_of_method
from fxguard.source.own_classes import is_of_script

__all__ = ["NeverMoves"]

KIND: FaultKind = "never moves"
FEW = MANY // 2  # steps, after which most weights have moved
UNREACHED, ZERO, UNHELD = "without a gradient", "gradient 0", "no optimizer holds it"
LEFT_OUT = "left out of the optimizer"
SEEN = 5  # steps in which a gradient was 0 throughout
NAMED = 2  # weights
SMALL = 0.1  # the part of a model's numbers below which what is left out was forgotten


@dataclass(slots=True, eq=False)
class _Still:
    """A weight that has not moved so far."""

    name: str
    weight: weakref.ref[Tensor]
    first: int  # its bits, added up
    shape: torch.Size
    is_held: bool = False  # by an optimizer that made a step
    has_gradient: bool = False
    has_other: bool = False  # than 0
    zeros: int = 0  # steps in which its gradient was 0 throughout
    decays: bool = False  # whether it has moved although its gradient was 0: by weight decay


@dataclass(frozen=True, slots=True)
class _Fault:
    """What is wrong with some weights of one module."""

    what: str
    advice: str
    more: str = ""  # evidence
    decays: bool = False  # whether weight decay moves the weights
    place: Place | None = None


class NeverMoves(Rule):
    """Compares each weight with what it was before the first step.

    Weights are read in step 10, 20, 40, 80, …; those that have moved are not looked at any more.
    What these steps show is told at the end, when the model may be gone.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._still: list[_Still] | None = None  # None before the first step
        self._all: dict[str, torch.Size] = {}  # weights that ask for gradients, and their shapes
        self._next = FEW
        self._pending: list[tuple[str, list[_Still], _Fault]] = []
        self._readers = Readers()
        self._came = False  # gradients, since the last step of any optimizer
        self._strangers = 0  # steps of optimizers that hold nothing with a gradient
        self._stranger = ""
        self._orphans: set[int] = set()  # dimensions of weights that are no longer the model's

    def gradients_came(self) -> None:
        self._came = True

    def loss_comes(self, loss: Loss, place: Place | None) -> None:
        if self._still and self._next > FEW:
            self._readers.note(loss)

    def before(self, step: Step) -> None:
        self._came = False
        if not step.is_learning:
            return
        if self._still is None:
            self._still = list(_weights_of(self.training.model()))
            self._all = {each.name: each.shape for each in self._still}
        if step.number == MANY:
            self._orphans |= _orphans_in(step.optimizer, self.training.of_models())
        self._look_at_gradients(self._still, step)

    def after(self, step: Step) -> None:
        if step.number < self._next or not step.is_learning:
            return
        self._forget_moved(keeps_decaying=self._next == FEW)
        model = self.training.model()
        if self._next >= MANY and model is not None:
            self._pending = list(self._faults(model))
        self._next *= 2

    def of_others(self, optimizer: Optimizer) -> None:
        if not self._came:
            return
        self._came = False
        held = [weight for group in optimizer.param_groups for weight in group["params"]]
        if held and all(weight.grad is None for weight in held):
            self._strangers += 1
            self._stranger = type(optimizer).__name__

    def ends(self) -> None:
        if not self.training.steps and self._strangers >= MANY:
            self.training.found(
                KIND,
                f"the model that runs is not the one whose weights {self._stranger} holds",
                evidence=f"in {self._strangers} steps no weight of {self._stranger} had a "
                "gradient, and the model's had",
                advice="create the optimizer after the model was copied, moved or rebuilt",
            )
        if self.training.model() is not None:
            self._forget_moved()
        still = self._still or []
        for state, weights, fault in self._pending:
            # A head may be switched on late.
            if all(each in still and self._state_of(each) == state for each in weights):
                self._tell(fault)

    def _faults(self, model: Module) -> Iterator[tuple[str, list[_Still], _Fault]]:
        """What is to be told of the weights that have not moved."""
        still = self._still or []
        moved = set(self._all).difference(each.name for each in still)
        patterns = {pattern_of(name) for name in moved}
        twins = twins_of(self._all, moved)
        together = defaultdict[tuple[str, str], list[_Still]](list)
        for each in still:
            # Experts and layers that take turns; a target network beside the one that is trained.
            if pattern_of(each.name) not in patterns and top_of(each.name) not in twins:
                state = self._state_of(each)
                module = each.name.rpartition(".")[0] if state == UNREACHED else ""
                together[state, module].append(each)
        for (state, module), weights in together.items():
            fault = self._fault(state, model, module, weights)
            if fault is not None:
                yield state, weights, fault

    def _state_of(self, each: _Still) -> str:
        """How a weight gets no gradient, or none other than 0, or no optimizer for it."""
        if not each.has_gradient:
            return UNREACHED if each.is_held else ""
        if each.zeros >= SEEN and not each.has_other:
            return ZERO
        if each.is_held or each.decays:
            return ""
        return UNHELD if len(each.shape) in self._orphans else LEFT_OUT

    def _tell(self, fault: _Fault) -> None:
        change = "weight decay alone moves it" if fault.decays else "no change"
        self.training.found(
            KIND,
            fault.what,
            place=fault.place,
            evidence=f"{change} in {self.training.steps} steps{fault.more}",
            advice=fault.advice,
        )

    def _fault(
        self, state: str, model: Module, module: str, weights: Sequence[_Still]
    ) -> _Fault | None:
        names = [each.name for each in weights]
        what = _in_words([self.training.full(name) for name in names])
        if state == UNHELD:
            return _Fault(
                f"{what}: no optimizer holds it",
                "create the optimizer after the layer was replaced",
                ", with gradients; the optimizer holds weights that the model no longer has",
            )
        if state == LEFT_OUT:
            if not self._are_forgotten(weights):
                return None
            return _Fault(
                f"{what}: no optimizer holds it",
                "give it to the optimizer, or freeze it by requires_grad_(False)",
                ", with gradients; an optimizer holds the other weights of these modules",
            )
        if state == ZERO and any(
            len(each.shape) > 1 for each in weights
        ):  # a bias alone may cancel
            are_zero = all(each.first == 0 for each in weights)
            return _Fault(
                f"{what}: its gradient is 0 in every step",
                "they are all 0 themselves: begin with other numbers in one of two factors"
                if are_zero and len(weights) > 1
                else "look behind it for a factor 0, a dead ReLU, a saturated function or a "
                "softmax of one class",
                f"; all of its elements, in {weights[0].zeros} steps looked at",
                decays=any(each.decays for each in weights),
            )
        if state != UNREACHED:
            return None
        cut = next((self._readers.cuts[x] for x in names if x in self._readers.cuts), None)
        if cut is not None:
            return _Fault(
                f"{what}: {cut.what} keeps the gradient from it",
                f"take {cut.what} away there, or freeze it by requires_grad_(False)",
                place=None if cut.source is None else (cut.source.file, cut.source.line),
            )
        if not self._readers.has_looked or not self._readers.read.isdisjoint(names):
            return None
        owner = type(_owner(model, module))
        source = source_of_method(owner.forward) if is_of_script(owner) else None
        if source is None:
            return None
        return _Fault(
            f"{what}: no operation that leads to the loss reads it",
            "use it in the forward, or remove it",
            place=(source.file, source.line),
        )

    def _are_forgotten(self, weights: Sequence[_Still]) -> bool:
        """Whether weights were left out by their kind, from modules that are trained.

        A part of a model that an optimizer was not given is frozen, and so is a model but for a
        part of it. A small part is forgotten that stands in several modules, none of which is the
        model, beside weights that an optimizer holds; and none of that name is held.
        """
        left_out = {each.name for each in weights}
        held = self._all.keys() - {each.name for each in self._still or ()}
        size = sum(self._all[name].numel() for name in left_out)
        if len(left_out) < 2 or size > SMALL * sum(x.numel() for x in self._all.values()):
            return False
        kinds = {kind_of(name) for name in left_out}
        if any(kind_of(name) in kinds for name in self._all if name not in left_out):
            return False
        return all(is_beside(name, held) for name in left_out)

    def _look_at_gradients(self, still: Iterable[_Still], step: Step) -> None:
        """Note which weights have gradients, and which of these are other than 0."""
        measures = step.number > FEW and (step.number <= MANY or step.number % MANY == 0)
        for each in still:
            weight = each.weight()
            if weight is None:
                continue
            each.is_held = each.is_held or each.name in step.weights
            if each.has_other or (gradient := weight.grad) is None:
                continue
            each.has_gradient = True
            if measures:
                each.has_other = _has_other(gradient)
                each.zeros += not each.has_other

    def _forget_moved(self, *, keeps_decaying: bool = False) -> None:
        """Look no more at weights that have moved.

        Args:
            keeps_decaying: whether those stay whose gradient is 0 now: weight decay moves them.
        """
        alive = [(each, x) for each in self._still or () if (x := each.weight()) is not None]
        bits = bits_of([weight for _, weight in alive])
        for (each, weight), found in zip(alive, bits, strict=True):
            if keeps_decaying and found != each.first and each.is_held:
                each.decays = weight.grad is not None and not _has_other(weight.grad)
        self._still = [
            each
            for (each, weight), found in zip(alive, bits, strict=True)
            if (found == each.first or (each.decays and not each.has_other))
            and weight.requires_grad
        ]


def _has_other(gradient: Tensor) -> bool:
    """Whether a gradient has other numbers than 0, as far as can be told."""
    with own_arithmetic():
        part = part_here(gradient)
        return part is None or bool(part.any())


def _weights_of(model: Module | None) -> Iterator[_Still]:
    named = [] if model is None else [x for x in model.named_parameters() if x[1].requires_grad]
    for (name, weight), bits in zip(named, bits_of([x for _, x in named]), strict=True):
        if bits is not None:
            yield _Still(name, weakref.ref(weight), bits, weight.shape)


def _orphans_in(optimizer: Optimizer, of_models: Collection[int]) -> set[int]:
    """How many dimensions weights have that an optimizer holds, no gradient reaches, and no model
    has, given the identities of those that models have.
    """
    held = [weight for group in optimizer.param_groups for weight in group["params"]]
    return {x.dim() for x in held if id(x) not in of_models and x.grad is None}


def _owner(model: Module, name: str) -> Module:
    """The module whose forward should have read the weights of a module."""
    path = name.split(".")
    if not name or len(path) == 1:
        return model
    return model.get_submodule(".".join(path[:-1]))


def _in_words(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    text = " and ".join(names[:NAMED]) if more <= 0 else ", ".join(names[:NAMED])
    return text if more <= 0 else f"{text} and {more} more"
