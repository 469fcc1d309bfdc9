"""The losses of one or several guarded models, for each thread that calls them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn import Module
from torch.optim.optimizer import Optimizer

from fxguard.batch.batch import Batch
from fxguard.batch.brief import BriefBatch
from fxguard.batch.keys import Key
from fxguard.batch.late_outputs import LateOutputs
from fxguard.batch.late_writes import LateWrites
from fxguard.batch.lent_weights import lent_weights
from fxguard.batch.loss import Loss, Owner
from fxguard.capture.finalizers import when_gone
from fxguard.capture.following import Beside, Following, stand_in_for
from fxguard.capture.module_hooks import hear_of_modules
from fxguard.graph import marks, nodes
from fxguard.install import backward_function
from fxguard.install.names import Names
from fxguard.install.while_needed import WhileNeeded
from fxguard.steps import _own_backwards, _warning_of_hooks
from fxguard.steps.step_hooks import StepHooks

__all__ = ["Losses"]


def _follow_backwards() -> Callable[[], None]:
    """Look at the tensors where a ``torch.autograd.backward`` begins, whose calls no mode sees."""
    return backward_function.stand_in(stand_in_for)


_changes = tuple(
    map(WhileNeeded, (_warning_of_hooks.silence, _follow_backwards, _own_backwards.stand_in))
)


class Losses:
    """Until closed, follows what scripts compute from the outputs of guarded models.

    Args:
        keeps_outputs: whether :meth:`is_read_by` also knows outputs of models with weights whose
            loss is forgotten or was never followed.
    """

    def __init__(self, *, keeps_outputs: bool = False) -> None:
        self._keeps_outputs = keeps_outputs
        self._here = threading.local()
        # A training that raised may never close this object: it must leave nothing on the stack.
        self._all: weakref.WeakSet[Following] = weakref.WeakSet()  # one for each thread
        when_gone(self, _forget, self._here, self._all)
        for change in _changes:
            change.begin()
        self._restore = when_gone(self, _restore)
        self._is_open = True
        self._hooks = StepHooks(self._step_comes)

    def look_beside(self, beside: Beside | None) -> None:
        """Let somebody run each operation of this thread that belongs to no loss; None: nobody."""
        following = self._following()
        following.stop()
        following.beside = beside
        following.go_on()

    def rest(self) -> None:
        """Let this thread run without a mode, if it computes no loss: nothing is looked at."""
        self._following().rest()

    def rest_no_more(self) -> None:
        """Look at its operations again."""
        self._following().rest_no_more()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend following while a guarded model runs: its operations belong to no loss."""
        following = self._following()
        try:
            following.stop()
            yield
        finally:
            following.go_on()

    def returned(
        self, made_in: Batch | BriefBatch, output: Any, names: Names, owner: Owner
    ) -> None:
        """Called when a guarded model has returned.

        Args:
            made_in: its batch, which has ended.
            output: what it returned.
            names: the names of its weights.
            owner: the owner of the model's losses.
        """
        if not self._is_open or torch.compiler.is_compiling():
            return
        if self._keeps_outputs and names.tensors:
            self._late_outputs().note(x for x in nodes.leaves(output) if isinstance(x, Tensor))
        if not torch.is_grad_enabled():
            return
        outputs = list(_labelled(output))
        if not any(tensor.requires_grad for _, tensor in outputs):
            return
        loss = self._following().loss_of(made_in.number)
        made = made_in.batch if isinstance(made_in, BriefBatch) else made_in
        loss.add(made, outputs, names.tensors, names.modules, owner)

    def received(
        self, model: Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[weakref.ref[Loss], list[tuple[str, Key]]] | None:
        """The arguments of a model that this thread has computed from outputs of others, by label.

        With the loss that they belong to; None without one. The backward of the model may reach
        them, and the weights that the call is given in place of the model's own.
        """
        loss = self._following().loss
        if loss is None or loss.has_ended:
            return None
        labels, tensors = marks.flatten_call(args, kwargs, None)
        rows = [(row, x) for row, x, _ in marks.rows_of(labels, tensors) if x is not None]
        known = [(row, loss.batch.live.key_of(x)) for row, x in rows]
        if torch.is_grad_enabled():
            read = [*(x for _, x in rows), *lent_weights(model)]
            loss.model_reads([x for x in read if x.requires_grad])
        return weakref.ref(loss), [(row, key) for row, key in known if key is not None]

    def graph_reads(self, values: Iterable[Any]) -> None:
        """Called when a graph of a guarded model has read these values, apart from weights.

        They may be no arguments of the model: it may hold them, or find them in its code.
        """
        tensors = [x for x in values if isinstance(x, Tensor) and x.requires_grad]
        computed = [x for x in tensors if not x.is_leaf]
        if not computed:
            return
        following = self._following()
        loss = following.loss
        if loss is not None and not loss.has_ended:
            loss.model_reads(computed)
        if following.beside is not None:
            following.beside.graph_reads(computed)

    def close(self) -> None:
        """Stop following."""
        self._is_open = False
        self._hooks.close()
        self._restore()
        _forget(self._here, self._all)

    @property
    def is_followed(self) -> bool:
        """Whether this thread has computed a part of a loss without a backward so far."""
        loss = self._following().loss
        return loss is not None and not loss.has_ended

    @property
    def loss_here(self) -> Loss | None:
        """The loss that this thread computes, or has computed last."""
        return self._following().loss

    @property
    def writes(self) -> LateWrites:
        """What this thread has written since its last backward, as far as it was seen."""
        return self._following().writes

    def is_read_by(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a call reads a part of a loss, or an output from which no backward can begin."""
        if self.is_read_in_loss(args, kwargs):
            return True
        if not self._keeps_outputs:
            return False
        read = [x for x in nodes.leaves((args, kwargs)) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in read):
            return False  # a backward may begin there, and nobody would follow it
        late = self._late_outputs()
        return any(late.has(x) for x in read)

    def is_output(self, tensor: Tensor) -> bool:
        """Whether a guarded model has returned a tensor to this thread."""
        return self._keeps_outputs and self._late_outputs().has(tensor)

    def is_read_in_loss(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a call reads a part of a loss that is followed."""
        loss = self._following().loss
        return loss is not None and loss.is_read_by(args, kwargs)

    def _step_comes(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called when an optimizer is about to make a step in this thread."""
        following = self._following()
        if following.loss is not None and following.loss.is_of(optimizer):
            following.forget()

    def _following(self) -> Following:
        """The ``Following`` of this thread."""
        if not hasattr(self._here, "following"):
            self._here.following = Following()
            self._all.add(self._here.following)
        following: Following = self._here.following
        return following

    def _late_outputs(self) -> LateOutputs:
        """The outputs that this thread may still read."""
        if not hasattr(self._here, "outputs"):
            self._here.outputs = LateOutputs()
        outputs: LateOutputs = self._here.outputs
        return outputs


def _restore() -> None:
    for change in _changes:
        change.end()


def _forget(here: threading.local, of_all_threads: Iterable[Following]) -> None:
    following: Following | None = getattr(here, "following", None)
    if following is not None:
        following.forget()
    for each in list(of_all_threads):
        each.retire()
    hear_of_modules(here, None, None)  # also after threads that have ended


def _labelled(output: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a model has returned, by their labels."""
    if type(output) is Tensor:  # in most small models: all the rest takes longer than their forward
        yield "output", output
        return
    labels, tensors = marks.flatten_call((), {}, output)
    yield from ((label, x) for label, x, _ in marks.rows_of(labels, tensors) if x is not None)
    yield from _in_distributions(output)


def _in_distributions(output: Any, label: str = "output") -> Iterator[tuple[str, Tensor]]:
    """The tensors of distributions that a model has returned: policies do so."""
    for each in nodes.leaves(output):
        if isinstance(each, Distribution):
            for name, held in vars(each).items():
                if isinstance(held, Tensor):
                    yield f"{label}.{name}", held
                else:  # as in Independent, MixtureSameFamily
                    yield from _in_distributions(held, f"{label}.{name}")
