"""What made the bad gradients that a script's own operations, apart from its models, have given."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fxguard import trees
from fxguard.batch.autograd_nodes import function_of
from fxguard.batch.events import GraphRun
from fxguard.batch.kept_run import LOSS
from fxguard.batch.loss import Loss
from fxguard.errors import FxguardError
from fxguard.forgiving import or_else, theirs
from fxguard.graph.operations import read_call
from fxguard.graph.random_state import random_state_kept
from fxguard.guard.delivery import Delivery
from fxguard.measure.at_hand import range_of
from fxguard.measure.func_levels import Sample
from fxguard.records import Range, Role
from fxguard.report.report import Report
from fxguard.script.again import NotRepeated, Repetition
from fxguard.script.in_front import Arrival
from fxguard.script.tangents import Derived
from fxguard.script.transforms import Differentiated
from fxguard.source.assigned_gradients import line_that_set_gradients
from fxguard.source.held_tensors import UNNAMED, held_name
from fxguard.source.lines import as_if_called_at
from fxguard.steps.backward import BackwardPasses
from fxguard.steps.losses import Losses
from fxguard.verdict.backward_origins import BadLeaf
from fxguard.verdict.backward_report import Ended

__all__ = ["ScriptGradients"]

NOT_AGAIN = "the script's operations could not run again as they did"
ITS_OWN = "{}, an autograd function of the script, computes its own backward"
MOST_NODES = 4096  # that are looked at for autograd functions


class ScriptGradients:
    """Computes once more what led to a backward, and repeats that with a close look.

    Args:
        delivery: reports on a backward.
        losses: those that the script computes.
        begin: begins a batch that holds nothing, and gives its number.

    Attributes:
        given: tensors that the operations of the last backward read, and autograd did not follow.
    """

    def __init__(self, delivery: Delivery, losses: Losses, begin: Callable[[], int]) -> None:
        self._delivery = delivery
        self._losses = losses
        self._begin = begin
        self.given: list[Tensor] = []
        self._why_not_known = NOT_AGAIN
        # Of leaves whose gradients are not explained: later their variables may be gone.
        self._names: list[tuple[weakref.ref[Tensor], str]] = []

    def report(self, began: Sequence[Arrival], leaves: Sequence[Tensor]) -> Report | None:
        """What made a gradient bad; None if that is not found.

        Args:
            began: where the backward began, or came to what the script has computed.
            leaves: the leaves of autograd that the script has read.
        """
        report = self._told(lambda number: self._repeated(number, began, leaves, Sample()))
        if report is not None:
            return report
        functions = _functions_behind(each.node for each in began)
        self._why_not_known = ITS_OWN.format(functions[0]) if functions else NOT_AGAIN
        self._names = [(weakref.ref(leaf), _label_of(leaf)) for leaf in leaves]
        return None

    def report_inside(self, how: Differentiated | Derived) -> Report | None:
        """What made a gradient bad inside a transform; None if that is not found.

        Of forward mode it is told as of a backward of the same operation, of a gradient of 1: both
        multiply by the same derivative.

        Args:
            how: the backward, or the operation. No transform may be open any more.
        """
        if isinstance(how, Derived):
            return self._told(lambda number: self._derived(number, how))
        return self._told(lambda number: self._repeated_inside(number, how))

    def _told(self, differentiated: Callable[[int], Ended | None]) -> Report | None:
        """What there is to say of a backward, which the batch of a number is given."""
        try:
            number = self._begin()
            ended = differentiated(number)
            if ended is not None and ended.leaves:
                return self._delivery.report_of_backward(number, ended)
        except FxguardError:
            raise
        except NotRepeated:
            pass
        except theirs():  # an operation that may not run twice
            pass
        return None

    def report_on(self, leaves: Iterable[Tensor]) -> Report | None:
        """That these leaves have bad gradients, and why it is not known what made them."""
        bad = []
        arrived = {id(leaf) for known, _ in self._names if (leaf := known()) is not None}
        are_set = True
        for leaf in leaves:
            found = None if leaf.grad is None else range_of(leaf.grad)
            if isinstance(found, Range) and found.severity:
                names = (name for known, name in self._names if known() is leaf)
                bad.append(BadLeaf(next(names, "") or _label_of(leaf), found.severity))
                are_set = are_set and id(leaf) not in arrived
        if not bad:
            return None
        set_at = or_else(None, line_that_set_gradients) if are_set else None
        ended = Ended([], bad, self._why_not_known, set_at=set_at)
        return self._delivery.report_of_backward(self._begin(), ended)

    def _repeated(
        self,
        number: int,
        began: Sequence[Arrival],
        leaves: Sequence[Tensor],
        sample: Sample,
    ) -> Ended | None:
        """The backward, once more.

        Args:
            number: of the batch.
            began: where it begins.
            leaves: of autograd.
            sample: that it is of, if it was inside a transform of ``torch.func``.

        Raises:
            NotRepeated: when that is not possible.
            Exception: whatever the operations raise.
        """
        plain = [sample.of(leaf) for leaf in leaves]
        fresh = [each.detach().requires_grad_() for each in plain]
        instead = {id(leaf): own for leaf, own in zip(leaves, fresh, strict=True)}
        names = {id(own): _name_of(each) for own, each in zip(fresh, plain, strict=True)}
        loss, listening = self._loss(number, names)
        with random_state_kept(list(instead.values())):
            repetition = Repetition([each.node for each in began], loss.observe, instead, sample)
            again = [repetition.of(each.node) for each in began]
            self.given = repetition.given
            loss.backward_comes(again)
            torch.autograd.backward(again, [each.gradient for each in began])
        return listening.ended

    def _repeated_inside(self, number: int, how: Differentiated) -> Ended | None:
        """The same of one that ran inside a transform, for the first bad sample."""
        sample = Sample(how.bad)
        began = [
            Arrival(node, None if gradient is None else sample.of(gradient))
            for node, gradient in how.began
        ]
        return self._repeated(number, began, how.leaves, sample)

    def _derived(self, number: int, how: Derived) -> Ended | None:
        """The backward of an operation whose derivative is bad."""
        sample = Sample(how.tangent)
        names: dict[int, tuple[Role, str]] = {}

        def plain(value: Tensor) -> Tensor:
            own = sample.of(value).detach()
            if own.is_floating_point():
                names[id(own.requires_grad_())] = Role.WEIGHT, UNNAMED
            return own

        with forward_ad._set_fwd_grad_enabled(False), torch.enable_grad():
            args = trees.tree_map_only(Tensor, plain, how.args)
            kwargs = trees.tree_map_only(Tensor, plain, how.kwargs)
            call = read_call(how.func, args, kwargs)
            if call.written or call.random:
                raise NotRepeated
            loss, listening = self._loss(number, names)
            with as_if_called_at(how.place):
                made = loss.observe(how.func, args, kwargs)
            loss.backward_comes([made])
            torch.autograd.backward([made], [torch.ones_like(made)])
        return listening.ended

    def _loss(self, number: int, names: dict[int, tuple[Role, str]]) -> tuple[Loss, _Listening]:
        """A loss that is computed once more, with its owner."""
        loss, listening = Loss(number), _Listening()
        loss.own(listening, names, {})
        here = self._losses.loss_here
        self._delivery.steps.scalers = None if here is None else here.scalers
        return loss, listening


class _Listening:
    """The owner of a loss that is computed once more."""

    def __init__(self) -> None:
        self.ended: Ended | None = None
        self._backward = BackwardPasses(self._note, _nothing, _nothing)

    def _note(self, ended: Ended) -> None:
        self.ended = ended

    def loss_comes(self, loss: Loss, roots: Iterable[Tensor]) -> None:
        index = LOSS + loss.events_so_far - 1
        self._backward.tape_left(loss.tape, roots, loss.batch.number, index)

    def loss_graph_ran(self, loss: Loss, run: GraphRun, outputs: Sequence[Any]) -> None:
        """Operations run one by one."""

    def judge_loss(self, loss: Loss) -> None:
        """It was judged when it was computed first."""

    hear_loss = judge_loss


def _nothing(*args: Any) -> None:
    pass


def _name_of(leaf: Tensor) -> tuple[Role, str]:
    _, name = held_name(leaf) or (Role.INPUT, UNNAMED)
    return Role.WEIGHT, name


def _label_of(leaf: Tensor) -> str:
    """``z``, or what else to call a leaf."""
    found = held_name(leaf)
    return "a tensor of the script" if found is None else found[1]


def _functions_behind(nodes: Iterable[Any]) -> list[str]:
    """The names of the script's autograd functions behind some nodes."""
    todo, seen, found = list(nodes), set[Any](), list[str]()
    while todo and len(seen) < MOST_NODES:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (kind := function_of(node)) is not None and kind.__name__ not in found:
            found.append(kind.__name__)
        todo += [before for before, _ in node.next_functions]
    return found
