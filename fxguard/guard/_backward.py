"""The backward passes of one guarded model: what reached its leaves, and a report where it is bad.

Hooks look at the gradient of each leaf before it is accumulated or reduced. They may run in threads
of autograd: what belongs to one pass is found by the number of its graph task.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun
from fxguard.batch.kept_run import KeptRun, differentiable_writes, keep
from fxguard.measure.at_hand import own_arithmetic, range_of
from fxguard.plan.plan import Plan
from fxguard.records import Range, Role, Severity
from fxguard.verdict.backward_report import BadLeaf

__all__ = ["BackwardPasses", "Ended"]

# Called when a backward has ended that brought bad gradients to leaves: with the runs of graphs
# that gradients came to, in the order of their forward, these leaves, and whether operations ran
# between graphs, whose gradients nobody has seen.
Ended = Callable[[Sequence[KeptRun], Sequence[BadLeaf], bool], object]

MOST_HOOKS = 1024  # until those are forgotten whose tensor is gone
MOST_BATCHES = 64  # of which it is remembered that operations ran between their graphs


class BackwardPasses:
    """Listens to the backward passes of one model.

    Args:
        ended: see :data:`Ended`.
        tells_of_all: whether it is called after healthy ones, too.
    """

    def __init__(self, ended: Ended, *, tells_of_all: bool = False) -> None:
        self.ended = ended
        self.tells_of_all = tells_of_all
        self._passes: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()
        self._hooks: dict[int, Any] = {}  # id of a leaf to the handle of our hook
        self._lock = threading.Lock()
        self._most_hooks = MOST_HOOKS
        self._with_gaps: deque[int] = deque(maxlen=MOST_BATCHES)

    def batch_ended(self, batch: Batch, weights: Iterable[tuple[str, Tensor]]) -> None:
        """A batch has ended that may have a backward.

        Args:
            batch: the batch.
            weights: of the model, by name: where operations ran between graphs they may have read
                any of them.
        """
        if not batch.uncaptured():
            return
        self._with_gaps.append(batch.number)
        for name, weight in weights:
            if weight.requires_grad and weight.is_leaf:
                self._listen_to(weight, partial("weight {}".format, name))

    def graph_ran(
        self, run: GraphRun, outputs: Sequence[Any], batch_number: int, index: int
    ) -> None:
        """Listen to the backward of a run that has returned, if there can be one.

        Args:
            run: the run; its batch does not know it yet.
            outputs: what it returned.
            batch_number: of that batch.
            index: of the event in it.
        """
        arguments = run.live
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return  # under torch.func.grad or vmap: gradients there are values of the transform
        if differentiable_writes(run):  # the gradient of what it wrote does not come in with those
            self._with_gaps.append(batch_number)
        if keep(run, outputs, batch_number, index, self._came_in) is None:
            return
        for position, argument in enumerate(arguments):
            if isinstance(argument, Tensor) and argument.requires_grad and argument.is_leaf:
                self._listen_to(argument, partial(_name_of, run.plan, position))

    def close(self, weights: Iterable[Tensor]) -> None:
        """Take every hook away.

        Args:
            weights: of the model, which are as they were then.
        """
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        for weight in weights:
            if weight._backward_hooks is not None and not weight._backward_hooks:
                weight._backward_hooks = None

    def _listen_to(self, leaf: Tensor, name_of: Callable[[], str]) -> None:
        # An id may be that of another tensor by now: its hooks tell.
        handle = self._hooks.get(id(leaf))
        if handle is not None and handle.id in (leaf._backward_hooks or ()):
            return
        name = name_of()

        def listen(gradient: Tensor) -> None:
            if torch.compiler.is_compiling():  # compiled autograd: the hook is not to be traced
                return
            if torch._C._functorch.is_functorch_wrapped_tensor(gradient):
                return
            running = self._pass()
            if running is not None:
                running.reached(name, gradient)

        if len(self._hooks) >= self._most_hooks:  # of inputs that are gone
            live = {key: x for key, x in self._hooks.items() if x.hooks_dict_ref() is not None}
            self._hooks, self._most_hooks = live, 2 * len(live) + MOST_HOOKS
        self._hooks[id(leaf)] = leaf.register_hook(listen)

    def _came_in(self, kept: KeptRun) -> None:
        running = self._pass()
        if running is not None:
            running.kept.append(kept)

    def _ended(self, kept: Sequence[KeptRun], bad: Sequence[BadLeaf]) -> None:
        # A backward without a captured graph is one of operations between graphs.
        gaps = any(each.batch_number in self._with_gaps for each in kept) or not kept
        self.ended(kept, bad, gaps)

    def _pass(self) -> Pass | None:
        """The backward that this thread works for."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return None
        running = self._passes.get(task)
        if running is not None:
            return running
        with self._lock:
            running = self._passes.get(task)
            if running is None:
                running = self._passes[task] = Pass(self._ended, self.tells_of_all)
                # The engine owns it from now on: where the backward raises it is gone, too.
                Variable._execution_engine.queue_callback(running.end_comes)
        return running


def _name_of(plan: Plan, position: int) -> str:
    """What an argument of a graph is called: ``weight fc.weight``, ``x``."""
    value = next(value for value in plan.values if value.argument == position)
    return f"weight {value.name}" if value.role is Role.WEIGHT else value.name


class Pass:
    """One backward."""

    def __init__(
        self,
        ended: Callable[[Sequence[KeptRun], Sequence[BadLeaf]], object],
        tells_of_all: bool,
    ) -> None:
        self.ended = ended
        self.tells_of_all = tells_of_all
        self.kept: list[KeptRun] = []
        # By device: the leaves that a gradient reached there, and one number of each.
        self.reached_on: dict[torch.device, list[tuple[str, Tensor]]] = {}
        self.bad: list[BadLeaf] = []

    def reached(self, name: str, gradient: Tensor) -> None:
        """A gradient is about to be accumulated into a leaf."""
        with torch._C.DisableTorchFunction():
            bare = gradient.detach() if gradient.requires_grad else gradient
            if bare.is_cpu or not is_plain(bare):
                if not (is_plain(bare) and math.isfinite(bare.sum().item())):
                    self.look_at(name, bare)
            elif bare.numel() and not bare.is_meta:
                # Nobody waits for the device before the backward has ended.
                number = torch.stack(torch.aminmax(bare)).float().sum()
                self.reached_on.setdefault(bare.device, []).append((name, number))

    def look_at(self, name: str, gradient: Tensor) -> None:
        """Look at a gradient of which one sum does not say that it is finite."""
        with contextlib.suppress(Exception):  # a tensor that knows few operations
            found = range_of(gradient)
            if isinstance(found, Range) and found.severity:
                self.bad.append(BadLeaf(name, found.severity))

    def end_comes(self) -> None:
        """The backward ends. Callbacks that were queued since, as DDP's is, come first."""
        Variable._execution_engine.queue_callback(self.end)

    def end(self) -> None:
        """The backward has ended."""
        kept = {id(each): each for each in self.kept}.values()
        try:
            for reached in self.reached_on.values():
                with own_arithmetic():
                    numbers = torch.stack([number for _, number in reached]).tolist()
                for (name, _), number in zip(reached, numbers, strict=True):
                    if severity := Severity.of(abs(number)):
                        self.bad.append(BadLeaf(name, severity))
            if self.bad or self.tells_of_all:
                runs = sorted(kept, key=lambda each: (each.batch_number, each.index))
                self.ended(runs, self.bad)
        finally:
            for each in kept:
                each.let_go()
            self.kept.clear()


def is_plain(gradient: Tensor) -> bool:
    """Whether it can be summed: that of a DTensor would be a collective."""
    is_dense = type(gradient) is Tensor and gradient.layout is torch.strided
    return is_dense and gradient.is_floating_point()
