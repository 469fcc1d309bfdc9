"""Follows what a script computes from the outputs of guarded models, up to its backward.

Between the return of a guarded model and the backward, a torch function mode is at the bottom of
the thread's stack. It looks at operations that read outputs of the model, values computed from
them, or weights of the model. Everything else passes. A compiled function of the script is compiled
anew under the mode, with checks.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, overrides
from torch.nn import Module

from fxguard.batch import active
from fxguard.batch.autograd_nodes import function_of
from fxguard.batch.events import GraphRun
from fxguard.batch.late_writes import LateWrites
from fxguard.batch.loss import BACKWARDS, Loss
from fxguard.batch.module_hooks import may_fuse
from fxguard.batch.observer import Observer, set_function_modes
from fxguard.batch.plain_operations import TurnedBad
from fxguard.capture import dynamo, plain_python
from fxguard.capture.backend import CheckingBackend
from fxguard.capture.module_hooks import hear_of_modules
from fxguard.capture.tracebacks import hide_frames
from fxguard.graph import nodes
from fxguard.measure.func_levels import are_levels_open
from fxguard.ranks.pipelines import stage_now
from fxguard.torch_names import (
    DisableTorchFunction,
    function_mode_at,
    function_mode_count,
    pop_function_mode,
)

__all__ = ["Following", "beside_of_backward", "stand_in_for"]

RETAINS = 2, 3  # position of retain_graph in a backward, and in torch.autograd.grad


class Beside(Protocol):
    """Looks at operations that belong to no loss."""

    operations: Any  # runs each, and may stand in the place of a `__torch_function__`
    otherwise: Callable[..., Any]  # is called there of what may belong to a loss
    tidy: Callable[[BaseException], object]  # is given what such an operation raised

    def handed_on(self, values: Any) -> None:
        """A loss is about to read these arguments."""

    def graph_reads(self, tensors: Sequence[Tensor]) -> None:
        """A model has read these tensors, which gradients may reach."""

    def backward_begins(self, roots: Sequence[Tensor], unseen: Sequence[Tensor]) -> None:
        """A backward is about to begin with tensors, some of which no loss has seen made."""

    def backward_ended(self, returned: Any) -> None:
        """It has ended, and returned this."""

    def in_own_backward(
        self, run: Callable[..., Any], node: Any, gradients: tuple[Any, ...]
    ) -> Any:
        """Run the backward of an autograd function of the script."""

    def loss_is_over(self) -> None:
        """What a loss has read before matters no more."""

    def hands_on(self, func: Any, args: tuple[Any, ...], result: Any = None) -> None:
        """A loss was read by an operation that makes no floating-point number."""

    def look_inside(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """An operation of a loss has run inside a transform of ``torch.func``."""

    def has_raised(
        self, error: Exception, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> None:
        """An operation has raised, in a loss or not."""


class _Here(threading.local):
    following: Following | None = None  # the one whose mode is on the stack


_here = _Here()


class Following(Observer):
    """Follows the losses of one thread."""

    def __init__(self) -> None:
        super().__init__()
        plain_python.prepare_tracing()
        self.loss: Loss | None = None  # that is followed, or has ended last
        self.beside: Beside | None = None  # looks at operations of no loss, from `go_on` on
        self.stands_aside_for: Module | None = None  # a module that may take a fused kernel
        self.writes = LateWrites()  # since the last backward
        self.differentiates = False  # a backward of the loss is running
        self._rests = False
        self._turned_bad: TurnedBad = Counter()  # in its losses

    # TorchDynamo traces what reads `loss` and `beside`, and no property of a mode: these set them.

    def _now_of(self, loss: Loss | None) -> None:
        """Follow this loss from now on, or none."""
        self.loss = loss
        if self.beside is not None:
            self._tell(self.beside.operations)

    def _tell(self, operations: Any) -> None:
        """Say which calls may belong to the loss: after a backward, any may."""
        loss = self.loss
        operations.is_direct = loss is None
        operations.followed = None
        if loss is not None and not loss.has_ended:
            operations.followed = loss.followed(dynamo.eval_frame_callback)

    def _let_look(self) -> None:
        """Put what looks beside losses in the place of the method below, or take it away."""
        now = None if self.beside is None else self.beside.operations
        before = vars(self).get("__torch_function__")
        if now is before:
            return
        if before is not None:
            before.__self__ = None
            del vars(self)["__torch_function__"]
        if self.beside is not None and now is not None:
            self.beside.otherwise, self.beside.tidy = self.__torch_function__, hide_frames
            self._tell(now)
            # Torch finds it in place of the method, and most operations take no other step.
            now.__self__ = self
            vars(self)["__torch_function__"] = now

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        loss = self.loss
        try:
            if loss is None:
                return self.run_beside(func, args, kwargs)
            if not loss.may_read(func, args, kwargs):
                result = self.run_beside(func, args, kwargs)
            else:
                nobody = dynamo.eval_frame_callback() is None  # compiles what runs now
                run = follow_undisturbed if nobody else follow
                result = run(loss, func, args, kwargs or {})
        except BaseException as error:
            if self.beside is not None and isinstance(error, Exception):
                self.beside.has_raised(error, func, args, kwargs)
            hide_frames(error)
            raise
        if loss.has_ended and func not in BACKWARDS:
            self.writes.note(func, args, result)
        return result

    def run_beside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run an operation that belongs to no loss."""
        if self.beside is None:
            return func(*args, **(kwargs or {}))
        return self.beside.operations.run(func, args, kwargs)

    def loss_of(self, number: int) -> Loss:
        """The loss that the outputs of a guarded model belong to.

        Args:
            number: number of the model's batch, which has ended.
        """
        loss = self.loss
        if loss is None:
            loss = Loss(number, self._turned_bad)
        else:
            loss.turn()
        self._now_of(loss)
        return loss

    def go_on(self) -> None:
        """Put the mode on the stack, if there is a loss to follow."""
        self._let_look()
        if self.beside is not None or (self.loss is not None and not self.loss.has_ended):
            _here.following = self
            hear_of_modules(self, _before_fused, _after_fused)
            self._enter()

    def _enter(self) -> None:
        # Below all others: those who entered a mode above will leave it again.
        set_function_modes([self, *_modes_but(self)])

    def _leave(self) -> None:
        if function_mode_count() and self in overrides._get_current_function_mode_stack():
            set_function_modes(_modes_but(self))

    def backward_begins(self) -> None:
        """Called when a backward of the loss is about to begin."""
        self.writes, self.differentiates = LateWrites(), True
        if self.beside is not None:
            self.beside.loss_is_over()
        self._now_of(self.loss)

    def forget(self) -> None:
        """Called when an optimizer is about to change weights: no backward can run again."""
        if self.beside is None:
            self.stop()
        else:
            self.beside.loss_is_over()
        self._now_of(None)

    def rest(self) -> None:
        """Take the mode off the stack while it would do nothing, if no other mode is there."""
        alone = function_mode_count() == 1 and function_mode_at(0) is self
        self._rests = alone and self.loss is None and _here.following is self
        if self._rests:
            pop_function_mode()

    def rest_no_more(self) -> None:
        """Put it back."""
        if self._rests:
            self._rests = False
            if _here.following is self:
                self._enter()

    def retire(self) -> None:
        """Release everything, from any thread; a mode left on a stack does nothing."""
        self._now_of(None)
        hear_of_modules(self, None, None)

    def stop(self) -> None:
        """Take the mode off the stack."""
        if _here.following is self:
            _here.following = self.stands_aside_for = None
            hear_of_modules(self, None, None)
        self._leave()

    def stand_aside(self, module: Module, args: tuple[Any, ...]) -> None:
        """Called when a module of the script is about to run; a mode would change its kernel."""
        if self.loss is not None:
            self.loss.module_begins(module)
        if self.stands_aside_for is not None or not may_fuse(module):
            return
        given = [x for x in nodes.leaves(args) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and (not given or any(x.requires_grad for x in given)):
            return  # it takes the same kernel, and may be a part of the loss
        self.stands_aside_for = module
        self._leave()

    def come_back(self, module: Module) -> None:
        """Called when a module of the script has returned or raised."""
        if self.loss is not None:
            self.loss.module_ends(module)
        if self.stands_aside_for is module:
            self.stands_aside_for = None
            self._enter()


def _before_fused(module: Module, args: tuple[Any, ...]) -> None:
    if not torch.compiler.is_dynamo_compiling() and _here.following is not None:
        _here.following.stand_aside(module, args)


def _after_fused(module: Module, *rest: Any) -> None:
    if not torch.compiler.is_dynamo_compiling() and _here.following is not None:
        _here.following.come_back(module)


def _modes_but(mode: Following) -> list[Any]:
    return [each for each in overrides._get_current_function_mode_stack() if each is not mode]


def follow_undisturbed(loss: Loss, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation of a script, and observe it if it belongs to the loss."""
    if active.current() is not None:
        return func(*args, **kwargs)
    if func not in BACKWARDS:
        following = _here.following
        if loss.is_read_by(args, kwargs):
            if following is not None and following.beside is not None:
                following.beside.handed_on((args, kwargs))
                result = loss.observe(func, args, kwargs)
                if are_levels_open():
                    following.beside.look_inside(func, args, kwargs, result)
                if not isinstance(result, Tensor) or not result.is_floating_point():
                    following.beside.hands_on(func, args, result)
                return result
            return loss.observe(func, args, kwargs)
        if following is not None:
            return following.run_beside(func, args, kwargs)
        return func(*args, **kwargs)
    if are_levels_open():  # a transform's, such as that of a step inside another: no loss ends
        following = _here.following
        if following is not None:
            return following.run_beside(func, args, kwargs)
        return func(*args, **kwargs)
    return differentiate(loss, func, args, kwargs)


# TorchDynamo is active between graphs and would compile fxguard's own functions one by one.
follow = torch.compiler.disable(follow_undisturbed)


def differentiate(loss: Loss, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a backward, and look at the tensors that it begins with."""
    given = args[0] if args else kwargs.get("outputs", kwargs.get("tensors"))
    roots = [x for x in nodes.leaves(given) if isinstance(x, Tensor)]
    with DisableTorchFunction():
        loss.backward_comes(roots)
    following = _here.following
    beside = None if following is None else following.beside
    if beside is not None:
        known = loss.keys_of
        beside.backward_begins(roots, [each for each in roots if not known([each])])
    if kwargs.get("create_graph"):
        result = loss.differentiate(func, args, kwargs)
    else:
        result = _differentiate_last(loss, roots, func, args, kwargs)
    if beside is not None:
        beside.backward_ended(result)
    return result


def _differentiate_last(
    loss: Loss, roots: Sequence[Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a backward that is no part of a loss itself."""
    loss.has_ended = True
    following = _here.following
    if following is not None:
        following.backward_begins()
    try:
        return func(*args, **kwargs)
    finally:
        if following is not None:
            following.differentiates = False
        if not _retains_graph(func, args, kwargs):
            loss.let_go(roots)


def _retains_graph(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    position = RETAINS[func is torch.autograd.grad]
    return bool(args[position] if len(args) > position else kwargs.get("retain_graph"))


def stand_in_for(backward: Any) -> Any:
    """A function to replace ``torch.autograd.backward``."""

    @functools.wraps(backward)
    @torch.compiler.disable
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        loss = _current_loss() or _loss_of_micro_batch(args, kwargs)
        if loss is None or active.current() is not None:
            return backward(*args, **kwargs)
        return differentiate(loss, backward, args, kwargs)

    return stand_in


def beside_of_backward(node: Any) -> Beside | None:
    """Who looks at what an autograd function computes in its own backward; None if nobody does."""
    following = _here.following
    if following is None or following.beside is None or torch.compiler.is_compiling():
        return None
    if active.current() is not None or function_of(node) is None:
        return None
    return following.beside


def _loss_of_micro_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Loss | None:
    """The loss that a backward begins with, if a pipeline runs that of one micro-batch.

    The losses of all of them may have been computed before the first backward.
    """
    following = _here.following
    loss = None if following is None else following.loss
    if loss is None or following is None or following.differentiates or stage_now() is None:
        return None
    roots = nodes.leaves(args[0] if args else kwargs.get("tensors"))
    return loss if any(loss.batch.live.key_of(root) is not None for root in roots) else None


def _traced() -> None:
    """Called when an operation of a script's function is being traced: its graph gets checks."""
    if _current_loss() is not None:
        dynamo.wrap_backend(_checking)


def _checking(inner: dynamo.Backend) -> dynamo.Backend:
    return inner if isinstance(inner, CheckingBackend) else CheckingBackend(inner, _graph_ran)


def _graph_ran(run: GraphRun, outputs: Sequence[Any] | None) -> None:
    """Called when a graph that was compiled under a mode has run, under whichever mode now."""
    loss = _current_loss()
    if outputs is not None and loss is not None and loss.is_read_by(run.live, {}):
        loss.graph_ran(run, outputs)


def _current_loss() -> Loss | None:
    """The loss that this thread computes. While tracing, TorchDynamo has emptied the stack."""
    following = _here.following
    loss = None if following is None else following.loss
    return None if loss is None or loss.has_ended else loss


plain_python.traced_under_observer.append(_traced)
dynamo.leave_to_python(Following.__torch_function__)
dynamo.leave_to_python(Loss.may_read)
dynamo.leave_to_python(LateWrites.note)
dynamo.leave_to_python(_before_fused)
dynamo.leave_to_python(_after_fused)
