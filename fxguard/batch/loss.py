"""What a script computes from the outputs of guarded models, up to its backward: the loss."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
import torch.amp.grad_scaler
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.optim.optimizer import Optimizer

from fxguard.batch import active
from fxguard.batch.active import ActiveForward
from fxguard.batch.assemble import assemble
from fxguard.batch.autograd_nodes import metadata_of
from fxguard.batch.batch import Batch
from fxguard.batch.dataflow import DataFlow
from fxguard.batch.events import GraphRun, ModuleReturn
from fxguard.batch.forget import keep_only, leading_to
from fxguard.batch.keys import Key
from fxguard.batch.observer import observe_undisturbed
from fxguard.batch.plain_operations import (
    LossBatch,
    TurnedBad,
    is_plain,
    observe_plain,
    reads_of,
)
from fxguard.batch.tape import Tape
from fxguard.graph import nodes
from fxguard.graph.operations import name_of
from fxguard.measure import native
from fxguard.measure.at_hand import range_of
from fxguard.ranks.pipelines import stage_now
from fxguard.records import Range, Role, Severity
from fxguard.source.lines import calling_line, is_line_given
from fxguard.torch_names import DisableTorchFunction

__all__ = ["BACKWARDS", "Loss", "Owner"]

BACKWARDS = frozenset({Tensor.backward, torch.autograd.grad})  # functions that begin one

# Attributes of a tensor that are views of it.
VIEWS = frozenset(
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag", "data")
)
# Functions that ask a tensor for what is no number of it.
_QUIET = (
    *("data_ptr", "dim", "element_size", "get_device", "is_complex", "is_contiguous"),
    *("is_floating_point", "ndimension", "nelement", "numel", "size", "storage_offset", "stride"),
)
QUIET = frozenset(
    getattr(place, name) for place in (Tensor, torch) for name in _QUIET if hasattr(place, name)
)
NESTED = (tuple, list, dict)
GIVEN = "fxguard.given"  # key in the metadata of autograd nodes of models' outputs
ARGUMENTS = "fxguard.arguments"  # likewise, of the outputs of graphs
FRAMES_TO_SCALER = 8  # of fxguard, at most, between a GradScaler's frame and ours


class Owner(Protocol):
    """The owner of outputs that a loss is computed from."""

    def loss_comes(self, loss: Loss, roots: Iterable[Tensor]) -> None:
        """Called when gradients may reach these parts of a loss, and then the owner's weights."""

    def loss_graph_ran(self, loss: Loss, run: GraphRun, outputs: Sequence[Any]) -> None:
        """Called when a graph of a loss has returned; gradients may reach it."""

    def judge_loss(self, loss: Loss) -> None:
        """Report what is wrong with a loss. Its exceptions come out of ``backward()``."""

    def hear_loss(self, loss: Loss) -> None:
        """Called in place of ``judge_loss`` where the owner that returned last judges it."""


MOST_VALUES = 256  # in its batch, before those that lead nowhere are forgotten


@dataclass(frozen=True, slots=True)
class _Output:
    """An output of a guarded model."""

    made_in: Batch
    label: str  # in that batch
    tensors: Mapping[int, tuple[Role, str]]  # of the model
    modules: Mapping[int, str]  # likewise
    owner: Owner


@dataclass(eq=False)
class _Arguments:
    """The arguments of a graph; the autograd nodes of its outputs hold them, and nobody else."""

    args: tuple[Any, ...] | None


class Loss:
    """Everything computed from the outputs of one or several calls, as its own batch.

    It holds no tensor. What led to a tensor is known as long as the tensor is there.

    Args:
        number: number of the batch whose outputs it begins with.
        turned_bad: see :class:`LossBatch`.
    """

    def __init__(self, number: int, turned_bad: TurnedBad | None = None) -> None:
        self.batch = LossBatch(number, Counter() if turned_bad is None else turned_bad)
        self.weights: ChainMap[int, tuple[Role, str]] = ChainMap()
        self.modules: ChainMap[int, str] = ChainMap()  # id of a module of the models to its name
        self.forward = ActiveForward(self.batch, self.modules, self.weights, None)
        self.tape = Tape(self.weights)
        self.owners: list[Owner] = []  # in the order of their returns
        self.roots: Sequence[Tensor] = ()  # tensors that the next backward begins with
        self.token = object()  # marks its first tensors in the metadata of autograd nodes
        self.has_ended = False  # a backward has begun since the last output was added
        self.scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()  # those that scaled it
        self.given: dict[Key, _Output] = {}  # outputs of guarded models
        self._arguments: dict[int, weakref.ref[_Arguments]] = {}  # by id of the run in its batch
        self._forgotten = 0  # events
        self._most_values = MOST_VALUES

    def add(
        self,
        made_in: Batch,
        outputs: Iterable[tuple[str, Tensor]],
        tensors: Mapping[int, tuple[Role, str]],
        modules: Mapping[int, str],
        owner: Owner,
    ) -> None:
        """Called when a guarded model has returned outputs that a backward may begin from.

        Args:
            made_in: its batch, which has ended.
            outputs: its outputs, with labels.
            tensors: id of a parameter or buffer to its role and qualified name.
            modules: id of a module to its qualified name.
            owner: the model's owner.
        """
        self.own(owner, tensors, modules)
        self.batch.number = made_in.number
        self.batch.parts.append((self.batch.event_count, made_in))
        made_in.part_of = weakref.ref(self)
        for watcher in made_in.watchers:
            if self.batch.watcher(type(watcher)) is None and (own := watcher.of_loss()) is not None:
                self.batch.watchers.append(own)
        for label, tensor in outputs:
            key = self.batch.given_later(tensor, label)
            self.given[key] = _Output(made_in, label, tensors, modules, owner)
            self.batch.given[key] = made_in, label
            self.batch.judged_before.add(key)
            if tensor.grad_fn is not None:
                metadata_of(tensor.grad_fn).setdefault(GIVEN, set()).add(self.token)

    def own(
        self, owner: Owner, tensors: Mapping[int, tuple[Role, str]], modules: Mapping[int, str]
    ) -> None:
        """Let an owner hear of the loss, and know the names in its model."""
        self.owners = [*(each for each in self.owners if each is not owner), owner]
        if not any(known is tensors for known in self.weights.maps):
            self.weights.maps.append(tensors)  # type: ignore[arg-type] # it is not written
            self.modules.maps.append(modules)  # type: ignore[arg-type] # likewise

    @property
    def events_so_far(self) -> int:
        """How many events there were, forgotten ones included."""
        return self._forgotten + self.batch.event_count

    def turn(self) -> None:
        """Called when a model has returned, before its outputs are added."""
        self.tape.turn()
        if self.has_ended:
            self._begin_again()
        elif len(self.batch.values) > self._most_values:
            self._keep([key for tensor, key in self.batch.live.alive() if tensor.requires_grad])

    def _begin_again(self) -> None:
        """Keep only what a later backward may still begin with."""
        live = [(x, key) for x, key in self.batch.live.alive() if x.requires_grad]
        self._keep([key for x, key in live if key in self.given or self.tape.may_run_to(x)])
        self.batch.look_anew()
        self.has_ended, self.batch.watchers = False, []
        self.owners, self.weights.maps[1:], self.modules.maps[1:] = [], [], []
        for output in self.given.values():
            self.own(output.owner, output.tensors, output.modules)
        if len(self.given) == len(self.batch.values):  # nothing that was scaled is left
            self.scalers.clear()

    def _keep(self, wanted: Sequence[Key]) -> None:
        """Forget all values but some, and what led to them."""
        events = self.batch.event_count
        if self.given.keys() >= set(wanted):
            self.batch.forget_events()
        keys = keep_only(self.batch, wanted)
        self._forgotten += events - self.batch.event_count
        self.given = {keys[key]: output for key, output in self.given.items() if key in keys}
        self.batch.given = {key: (each.made_in, each.label) for key, each in self.given.items()}
        wanted_parts = {id(made_in) for made_in, _ in self.batch.given.values()}
        self.batch.parts = [each for each in self.batch.parts if id(each[1]) in wanted_parts]
        for _, part in self.batch.parts:
            if part.received is not None:
                loss, rows = part.received
                part.received = loss, [(row, keys[key]) for row, key in rows if key in keys]
        runs = set(map(id, self.batch.runs))
        self._arguments = {run: args for run, args in self._arguments.items() if run in runs}
        self._most_values = 2 * len(self.batch.values) + MOST_VALUES

    def let_go(self, roots: Iterable[Tensor]) -> None:
        """Called when a backward has freed the autograd graph of these tensors."""
        self.tape.let_go(roots)
        for reference in self._arguments.values():
            arguments = reference()
            if arguments is not None:
                arguments.args = None

    def module_begins(self, module: Module) -> None:
        """Called when a script calls a module: perhaps one of a guarded model."""
        name = self.modules.get(id(module))
        if name is not None:
            self.batch.enter_module(name)

    def module_ends(self, module: Module) -> None:
        """Called when it has returned or raised."""
        name = self.modules.get(id(module))
        running = self.batch.modules
        if any(each.name == name for each in running):
            while running.pop().name != name:
                pass  # modules whose end nobody has seen

    def may_read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Whether :meth:`is_read_by` is worth calling: for most calls of a script it is not."""
        known, weights = self.batch.live.by_id, self.weights
        if func in QUIET:
            return False
        name = getattr(func, "__name__", "")
        if name == "__get__":  # such as of a weight's gradient
            return func in VIEWS
        if name == "__set__":
            return id(args[0]) in known
        if func in BACKWARDS:
            return True
        for argument in args if not kwargs else (*args, *kwargs.values()):
            if id(argument) in known or id(argument) in weights or type(argument) in NESTED:
                return True
        return False

    def followed(self, compiles: Callable[[], object]) -> tuple[Any, ...]:
        """What operations are followed with in C, from now on, as in Python.

        Args:
            compiles: gives who compiles what runs now; None for nobody.

        Returns:
            What :meth:`may_read` looks at: tensors, weights, and quiet functions; and what
            :func:`observe_plain` does, and asks before.
        """
        batch = self.batch
        asked = batch.live.by_id, self.weights.maps, QUIET
        if native.bind_losses is None:
            return asked
        return *asked, (batch, batch.live, self.tape, self.forward, self._is_in_brief, compiles)

    def _is_in_brief(self) -> bool:
        """Whether a plain operation may be written down in brief now, and in C."""
        batch, here = self.batch, active.here
        is_watched = batch.watchers or batch.arrivals or batch.measuring
        is_inside = here.forward or here.call or is_line_given()
        return not (is_watched or is_inside or len(batch.values) > self._most_values)

    def is_read_by(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call reads a part of the loss."""
        # Code after a backward, such as an optimizer's step, may read weights and is no loss.
        weights = {} if self.has_ended else self.weights
        for argument in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(argument, (*NESTED, slice)):
                if any(self._has(each, weights) for each in nodes.leaves(argument)):
                    return True
            elif self._has(argument, weights):
                return True
        return False

    def _has(self, argument: Any, weights: Mapping[int, Any]) -> bool:
        """Whether an argument is a part of the loss, or one of these weights."""
        if not isinstance(argument, Tensor):
            return False
        return self.batch.live.key_of(argument) is not None or id(argument) in weights

    def is_of(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds a weight of the models behind the loss."""
        groups = optimizer.param_groups
        return any(id(weight) in self.weights for group in groups for weight in group["params"])

    def differentiate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``torch.autograd.grad``, whose result may be a part of the loss."""
        return self._observed(None, func, args, kwargs)

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation that belongs to the loss."""
        if len(self.batch.values) > self._most_values:
            self._keep([key for _, key in self.batch.live.alive()])
        # A view, and a loss scaled by a GradScaler, count as the original tensor.
        scaler = scaler_that_calls(func)
        if scaler is not None:
            self.scalers.add(scaler)
        if func in VIEWS or scaler is not None:
            noted = self.tape.before(func, args, kwargs)
            key = self.batch.live.key_of(args[0])
            result = func(*args, **kwargs)
            with DisableTorchFunction():
                if key is not None:
                    self.batch.live.remember(result, key)
                self.tape.after(noted, result, calling_line())
            return result
        batch = self.batch
        if not (batch.watchers or batch.arrivals or batch.measuring) and is_plain(func):
            reads = reads_of(args, kwargs)
            if reads is not None:
                return observe_plain(self.forward, self.tape, func, args, kwargs, reads)
        return self._observed(self.tape, func, args, kwargs)

    def _observed(
        self, tape: Tape | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = active.current()
        try:
            active.here.forward, self.forward.tape = self.forward, tape
            return observe_undisturbed(func, args, kwargs)
        finally:
            active.here.forward = before

    def graph_ran(self, run: GraphRun, outputs: Sequence[Any]) -> None:
        """Called when a compiled function of the script has run, as a graph."""
        read = [x for x in run.live if isinstance(x, Tensor)]
        for owner in reversed(self.owners):
            owner.loss_comes(self, [x for x in read if x.requires_grad])
            owner.loss_graph_ran(self, run, outputs)
        self.batch.graph_ran(run, outputs)
        arguments, run.args = _Arguments(run.args), None
        self._arguments[id(run)] = weakref.ref(arguments)
        for output in outputs:
            if isinstance(output, Tensor) and output.grad_fn is not None:
                metadata_of(output.grad_fn)[ARGUMENTS] = arguments

    def model_reads(self, tensors: Sequence[Tensor]) -> None:
        """Called when a guarded model is about to read tensors; gradients may come to them."""
        computed = [x for x in tensors if self.tape.may_run_to(x)]
        for owner in reversed(self.owners) if computed else ():
            owner.loss_comes(self, computed)

    def backward_comes(self, roots: Sequence[Tensor]) -> None:
        """Called when a backward is about to begin with these tensors."""
        self.roots = roots
        if stage_now() is not None:
            self._is_of_micro_batch()
        try:
            # A head that reads a backbone's output is the first to say what its backward made.
            for owner in reversed(self.owners):
                owner.loss_comes(self, roots)
            for owner in self.owners[:-1]:
                owner.hear_loss(self)
            self.owners[-1].judge_loss(self)
        finally:
            self.roots, self.batch.part = (), None

    def _is_of_micro_batch(self) -> None:
        """Judge the roots alone: a pipeline may have computed the losses of all micro-batches."""
        live = self.batch.live
        ends = [key for root in self.roots if (key := live.key_of(root)) is not None]
        needed, events = leading_to(self.batch, ends)
        calls = [each.made_in.number for key, each in self.given.items() if key in needed]
        self.batch.number = max(calls, default=self.batch.number)
        self.batch.part = frozenset(needed), frozenset(events)

    def is_fine(self) -> bool:
        """Whether it is known without reading it that all its numbers are finite."""
        numbers = None if self.batch.runs else native.packed(self.batch.pairs)
        return numbers is not None and native.all_finite(numbers)

    @contextlib.contextmanager
    def read(self, *, given: bool = False) -> Iterator[Batch]:
        """The batch with its numbers; more may be added to it afterwards.

        Args:
            given: whether to always include the numbers of the models' outputs; if not, only if
                something is not finite.
        """
        batch, live = self.batch, self.batch.live
        batch.ends = [key for root in self.roots if (key := live.key_of(root)) is not None]
        pairs = list(batch.pairs)
        for run in batch.runs:
            reference = self._arguments.get(id(run))
            arguments = None if reference is None else reference()
            run.args = None if arguments is None else arguments.args
        try:
            batch.read()
            if given or not batch.is_finite():
                self._read_given()
            yield batch
        finally:
            batch.pairs[:] = pairs
            for run in batch.runs:
                run.args = None

    def keys_of(self, tensors: Iterable[Tensor]) -> list[Key]:
        """The values that some tensors hold, of those that belong to it."""
        return [key for each in tensors if (key := self.batch.live.key_of(each)) is not None]

    def bad_roots(self) -> Iterator[Severity]:
        """How bad the tensors are that a backward begins with and whose making was not seen."""
        for root in self.roots:
            if self.batch.live.key_of(root) is None and _leads_to(root, self.token):
                found = range_of(root)
                if isinstance(found, Range) and found.severity:
                    yield found.severity

    def _read_given(self) -> None:
        """Read the ranges of models' outputs, which their batches have measured."""
        flows: dict[int, DataFlow] = {}
        for key, output in self.given.items():
            made_in, label = output.made_in, output.label
            if id(made_in) not in flows:
                flows[id(made_in)] = assemble(made_in)
            flow = flows[id(made_in)]
            returned = (e for e in made_in.events if isinstance(e, ModuleReturn) and not e.name)
            rows = (row for event in returned for row in event.rows if row.label == label)
            made = next((row.key for row in rows), None)
            found = None if made is None else flow.ranges[flow.place[made]]
            if isinstance(found, Range):
                self.batch.given_was(key, found)


def _leads_to(root: Tensor, token: object) -> bool:
    """Whether a gradient of a tensor may reach outputs of the models of a loss."""
    todo, seen = [root.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if token in metadata_of(node).get(GIVEN, ()):
            return True
        todo += [before for before, _ in node.next_functions]
    return False


def scaler_that_calls(func: Any) -> GradScaler | None:
    """The GradScaler that is about to scale a loss."""
    if name_of(func) != "mul":
        return None
    frame: FrameType | None = sys._getframe(1)
    for _ in range(FRAMES_TO_SCALER):
        if frame is None:
            return None
        if frame.f_code.co_filename == torch.amp.grad_scaler.__file__:
            scaler = frame.f_locals.get("self")
            return scaler if isinstance(scaler, GradScaler) else None
        frame = frame.f_back
    return None
