"""The backward passes of one guarded model: gradients that reach its leaves, and bad ones.

Hooks look at the gradient of each leaf before it is accumulated or reduced. Hooks may run in
threads of autograd: the number of the graph task tells which pass a hook belongs to.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun
from fxguard.batch.kept_function import KeptFunction, keep_functions
from fxguard.batch.kept_run import Kept, KeptRun, keep, keep_tape, keep_tape_before
from fxguard.batch.runs_again import runs_of
from fxguard.batch.tape import Tape
from fxguard.capture import traced_hooks
from fxguard.measure import native
from fxguard.measure.finite import Finite
from fxguard.measure.func_levels import are_levels_open, has_levels
from fxguard.torch_names import graph_task
from fxguard.verdict.backward_origins import BadLeaf, name_of_leaf
from fxguard.verdict.backward_report import GAPS, OUTSIDE, Ended

__all__ = ["BackwardPasses", "OnCompiled", "OnEnd", "OnZero"]

# Called when a backward that brought bad gradients to leaves has ended.
OnEnd = Callable[[Ended], object]

# Called when a healthy backward has ended, with its graph runs, for a callee that wants them, and
# with the names of leaves whose gradients were 0 throughout.
OnZero = Callable[[Iterator[KeptRun], Sequence[str]], object]

# Called with the first bad leaf of a backward that TorchDynamo compiled, before the backward ends.
OnCompiled = Callable[[BadLeaf], object]

MOST_HOOKS = 1024  # before hooks of tensors that are gone are forgotten
MOST_DIFFERENTIATED = 8  # graph runs whose gradients autograd has recorded
MOST_BATCHES = 64  # remembered as having operations between their graphs


# The range of a gradient that C can read, in a transform of nobody; else None.
_read = native.reading_or(lambda gradient: None)


_of_all_models: weakref.WeakSet[BackwardPasses] = weakref.WeakSet()


class BackwardPasses:
    """Listens to the backward passes of one model.

    Args:
        ended: see :data:`OnEnd`.
        zero: see :data:`OnZero`.
        compiled: see :data:`OnCompiled`.
        tells_of_all: whether ``ended`` is also called after healthy passes.
        hears_of_all_zero: whether ``zero`` is called even if ``tells_of_all`` is set.
        passed: called first after each pass; None for nobody.
    """

    def __init__(
        self,
        ended: OnEnd,
        zero: OnZero,
        compiled: OnCompiled,
        *,
        tells_of_all: bool = False,
        hears_of_all_zero: bool = False,
        passed: Callable[[], object] | None = None,
    ) -> None:
        self.passed = passed
        self.ended = ended
        self.zero = zero
        self.compiled = compiled
        self.tells_of_all = tells_of_all
        self.hears_of_all_zero = hears_of_all_zero
        self._passes: dict[int, weakref.ref[Pass]] = {}  # those that run, by graph task
        self._hooks: dict[int, Any] = {}  # id of a leaf to the handle of our hook on it
        self.largest = 0.0  # of the gradients of the last pass; see Finite.largest
        self.count = 0  # of passes that have ended
        # The pass that was asked for last.
        self._last: tuple[int, Callable[[], Pass | None]] = (-1, lambda: None)
        # The graph task of a pass, and the largest gradient that a leaf has had in it.
        self._largest = [(-1, 0.0)]
        self._is_small = native.below(self._largest, graph_task)
        self._lock = threading.Lock()
        self._most_hooks = MOST_HOOKS
        self._with_gaps: deque[int] = deque(maxlen=MOST_BATCHES)
        self._differentiated: deque[KeptRun] = deque(maxlen=MOST_DIFFERENTIATED)
        self._number = traced_hooks.number_of(self)
        _of_all_models.add(self)

    def batch_ended(self, batch: Batch, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Called when a batch that may have a backward has ended.

        Args:
            batch: the batch.
            weights: of the model, by name: operations between graphs may have read any of them.
        """
        if not batch.uncaptured():
            return
        self._with_gaps.append(batch.number)
        named = list(weights)
        for position, weight in self._unheard_leaves([weight for _, weight in named]):
            self._listen_to(weight, f"weight {named[position][0]}")

    def graph_ran(
        self, run: GraphRun, outputs: Sequence[Any], batch_number: int, index: int
    ) -> None:
        """Listen to the backward of a run that has returned, if there can be one.

        Args:
            run: the run; its batch does not know it yet.
            outputs: what it returned.
            batch_number: number of the batch of the run.
            index: index of the run's event in that batch.
        """
        if are_levels_open():
            return  # under torch.func.grad or vmap: gradients there are values of the transform
        if keep(run, outputs, batch_number, index, self._came_in) is None:
            return
        if native.all_hooked is None or not native.all_hooked(run.live, self._hooks):
            for position, leaf in self._unheard_leaves(run.live):
                self._listen_to(leaf, name_of_leaf(run, position))

    def tape_left(
        self,
        tape: Tape,
        roots: Iterable[Any],
        batch_number: int,
        index: int,
        *,
        are_returned: bool = False,
    ) -> None:
        """Listen to gradients of what operations outside every graph have made.

        Args:
            tape: records these operations.
            roots: tensors that a graph reads, a model returns, or a backward begins with. Some of
                them may be on the tape.
            batch_number: number of the batch.
            index: index of the last event before the operations.
            are_returned: whether these are what the model returned.
        """
        if are_levels_open():
            return
        named = list(tape.new_leaves())
        for position, leaf in self._unheard_leaves([leaf for leaf, _ in named]):
            self._listen_to(leaf, named[position][1])
        starts = [root for root in roots if isinstance(root, Tensor) and root.grad_fn is not None]
        for root in starts:
            keep_tape(*(tape, root, batch_number, index, self._came_in), is_returned=are_returned)
        for tensor in (*tape.made_by_functions(), *starts):
            for node in keep_functions(tensor, batch_number, self._function_ran):
                keep_tape_before(tape, node, batch_number, index, self._came_in)

    def close(self, weights: Iterable[Tensor]) -> None:
        """Take every hook away.

        Args:
            weights: weights of the model; empty dictionaries of hooks are taken off them.
        """
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        for weight in weights:
            if weight._backward_hooks is not None and not weight._backward_hooks:
                weight._backward_hooks = None

    def _unheard_leaves(self, values: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
        """Those of some values to whose gradients nobody listens yet, with their positions."""
        hooks = self._hooks
        for position, value in enumerate(values):
            if not isinstance(value, Tensor):
                continue
            handle = hooks.get(id(value))
            # The id may belong to another tensor by now: the tensor's hooks tell.
            if handle is not None and handle.id in (value._backward_hooks or ()):
                continue
            if value.requires_grad and value.is_leaf:
                yield position, value

    def _listen_to(self, leaf: Tensor, name: str) -> None:
        number, where = self._number, weakref.ref(leaf)

        def stays() -> bool:
            running = self._pass()
            return running is not None and running.is_alone and _stays(where(), handle.id)

        def hear(gradient: Tensor | None) -> None:
            if gradient is None:  # the backward of a function of the script gives none
                return
            task, last = self._last
            if task == graph_task() and (running := last()) is not None:
                found = _read(gradient)
                if found is not None:
                    running.leaves.note(name, found[1])
                    self._largest[0] = task, running.leaves.largest
                    return
            if not has_levels(gradient) and (running := self._pass()) is not None:
                running.leaves.look_at(name, gradient, stays)

        if len(self._hooks) >= self._most_hooks:  # hooks of inputs that are gone
            live = {key: x for key, x in self._hooks.items() if x.hooks_dict_ref() is not None}
            self._hooks, self._most_hooks = live, 2 * len(live) + MOST_HOOKS
        self._hooks[id(leaf)] = handle = leaf.register_hook(
            traced_hooks.hook_of_leaf(self._is_small, hear, number, name)
        )

    def reached(self, name: str, gradient: Tensor) -> None:
        """Called when a compiled backward is about to accumulate a gradient into a leaf."""
        running = None if has_levels(gradient) else self._pass()
        if running is not None:
            running.tell_of(name, gradient)

    def _came_in(self, kept: Kept) -> None:
        if traced_hooks.in_compiled_autograd():  # nobody is told when it ends
            kept.let_go()
            return
        running = self._pass()
        if running is not None:
            running.kept.append(kept)

    def _unseen(self, kept: Sequence[KeptRun]) -> str:
        """The part of a backward whose gradients nobody has seen."""
        if not kept:
            return GAPS if self._with_gaps else OUTSIDE
        has_gaps = any(each.batch_number in self._with_gaps for each in kept)
        return GAPS if has_gaps else ""

    def _function_ran(self, kept: KeptFunction) -> None:
        running = None if traced_hooks.in_compiled_autograd() else self._pass()
        if running is not None:
            running.functions.append(kept)

    def has_ended(
        self,
        task: int,
        runs: Iterator[KeptRun],
        leaves: Finite[str],
        functions: Sequence[KeptFunction],
    ) -> None:
        """Called when a backward has ended.

        Args:
            task: its graph task.
            runs: the graph runs that gradients reached, in the order of their forward.
            leaves: the gradients that reached leaves.
            functions: autograd functions outside every graph that returned gradients.
        """
        if self.passed is not None:
            self.passed()
        bad: list[BadLeaf] = []
        if not leaves.is_fine:
            bad += [BadLeaf(name, severity) for name, severity in leaves.bad()]
        self.largest = leaves.largest
        self.count += 1
        # Gradients that are bad in another model may have turned bad in this one, such as in a
        # frozen network behind it.
        passes_on = not bad and self._is_bad_elsewhere(task)
        kept = list(runs) if bad or passes_on or self.tells_of_all else None
        if leaves.zero and not bad and (self.hears_of_all_zero or not self.tells_of_all):
            self.zero(runs if kept is None else iter(kept), leaves.zero)
        if kept is not None:
            again = tuple(self._differentiated)
            ended = Ended(kept, bad, self._unseen(kept), functions, passes_on, differentiated=again)
            self.ended(ended)

    def _is_bad_elsewhere(self, task: int) -> bool:
        """Whether a leaf of another model has got a bad gradient in this backward."""
        others = (each._passes.get(task) for each in tuple(_of_all_models) if each is not self)
        found = (running for each in others if each is not None and (running := each()))
        return any(not running.leaves.is_fine for running in found)

    def forget(self, ended: Pass) -> None:
        """Forget a backward that has ended; the next one forgets one that raised.

        Graph runs whose gradients autograd has recorded are known until a backward records none.
        """
        again = [x for x in ended.kept if isinstance(x, KeptRun) and x.is_differentiated_again]
        if again:
            self._differentiated.extend(again)
        else:
            self._differentiated.clear()
        with self._lock:
            self._passes.pop(ended.task, None)

    def _pass(self) -> Pass | None:
        """The backward that this thread is running."""
        task = graph_task()
        last, found = self._last
        if task == last and (running := found()) is not None:
            return running
        if task == -1:
            return None
        with self._lock:
            known = self._passes.get(task)
            running = None if known is None else known()
            if running is None:
                others = {key: each for key, x in self._passes.items() if (each := x()) is not None}
                running = Pass(self, task)
                self._passes = {key: self._passes[key] for key in others}
                self._passes[task] = weakref.ref(running)
                for each in others.values():  # one inside the other: both reach the same leaves
                    each.is_alone = running.is_alone = False
                    each.leaves.measure()
                # The engine owns it from now on, and drops it if the backward raises.
                Variable._execution_engine.queue_callback(running.end_comes)
        self._last = task, weakref.ref(running)
        return running


class Pass:
    """One backward."""

    def __init__(self, passes: BackwardPasses, task: int) -> None:
        self.passes = passes
        self.task = task  # of autograd
        self.kept: list[Kept] = []
        self.functions: list[KeptFunction] = []
        self.leaves: Finite[str] = Finite()
        self.is_alone = True  # while it runs, no other backward has begun
        self.has_told = False  # has reported a bad gradient before the end
        passes.largest = 0.0  # of the new pass nothing is known yet

    def tell_of(self, name: str, gradient: Tensor) -> None:
        """Report the first bad leaf of a compiled backward at once: nobody calls end_comes."""
        if not self.has_told:
            leaf: Finite[str] = Finite()
            leaf.look_at(name, gradient)
            for _, severity in leaf.bad():
                self.has_told = True
                self.passes.compiled(BadLeaf(name, severity))

    @traced_hooks.never_compiled
    def end_comes(self) -> None:
        """Called as the backward ends. Callbacks queued since then, such as DDP's, run first."""
        Variable._execution_engine.queue_callback(self.end)

    @traced_hooks.never_compiled
    def end(self) -> None:
        """Called when the backward has ended."""
        kept = self.kept.copy()
        if len(kept) > 1:  # gradients of several outputs of a run
            kept = [*{id(each): each for each in kept}.values()]
        try:
            self.passes.has_ended(self.task, runs_of(kept), self.leaves, self.functions)
        finally:
            self.passes.forget(self)
            for each in kept:
                each.let_go()
            self.kept.clear()
            self.functions.clear()


def _stays(leaf: Tensor | None, ours: int) -> bool:
    """Whether nobody writes the gradient of a leaf until its backward has ended.

    A hook that runs after ours may, and so does who reduces gradients among ranks.

    Args:
        leaf: the leaf.
        ours: the id of our hook.
    """
    if leaf is None or getattr(leaf, "_post_accumulate_grad_hooks", None):
        return False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    return next(reversed(leaf._backward_hooks or (None,))) == ours
