"""What is kept of a graph run for its backward: its inputs, and the incoming gradients."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fxguard.batch.autograd_nodes import metadata_of
from fxguard.batch.events import GraphRun
from fxguard.batch.samples import inner_outputs, sample_of
from fxguard.batch.tape import Tape
from fxguard.batch.tape_graph import Made
from fxguard.graph.random_state import RandomState
from fxguard.graph.torch_settings import settings_now
from fxguard.measure import native
from fxguard.measure.at_hand import VERSION, has_memory, version_of
from fxguard.measure.finite import is_plain
from fxguard.measure.func_levels import has_levels
from fxguard.records import Role

__all__ = [
    "LOSS",
    "RAN",
    "Kept",
    "KeptRun",
    "KeptTape",
    "Listener",
    "keep",
    "keep_tape",
    "keep_tape_before",
    "runs_that_made",
    "versions_of",
]

LOSS = 1 << 30  # the event index of a loss, which comes after all events
RAN = "fxguard.ran"  # key in the metadata of autograd nodes: the run, and which output of it


class Kept(Protocol):
    """Something that is kept for a backward."""

    batch_number: int
    index: int  # of the event in its batch
    incoming: dict[int, Tensor]

    def came_in(self, position: int, gradient: Tensor) -> None:
        """Called when a gradient has reached an output."""

    def let_go(self) -> None:
        """Called when a backward has ended."""


Arrived = Callable[[Kept], object]


@dataclass(slots=True, eq=False)
class KeptRun:
    """A graph run whose backward is still to come.

    The hooks on the graph's outputs own it, so it dies with the autograd graph.
    """

    event: GraphRun  # in its batch, which ends with the forward
    batch_number: int
    index: int  # of the event in its batch
    args: tuple[Any, ...]  # the arguments of the graph; weak references once a backward has ended
    random_state: RandomState | None
    versions: tuple[int | None, ...]  # of the arguments after the run
    restore_settings: Callable[[], None]  # restores the torch settings of the run
    # Incoming gradients by position among the outputs, in the current backward.
    incoming: dict[int, Tensor] = field(default_factory=dict)
    # Samples of gradients from inside the graph, which are not kept alive.
    samples: dict[int, Tensor] = field(default_factory=dict)
    # Whether these gradients include those from inside the graph: an output that another output
    # depends on gets gradients from both sides. A compiled graph is one node of autograd.
    are_sums: bool = True
    # Large outputs to the losses that depend on them.
    inner: Mapping[int, Collection[int]] = field(default_factory=dict)
    of_tape: bool = False  # True if it is not a run of a captured graph
    # Outputs that the model returned and did not read itself: gradients come from outside only.
    returned: Collection[int] = ()
    is_differentiated_again: bool = False  # whether a backward was recorded: create_graph=True

    def came_in(self, position: int, gradient: Tensor) -> None:
        """Note a gradient that reached an output, maybe from a loss whose own gradient is known."""
        self.is_differentiated_again |= torch.is_grad_enabled()
        losses = self.inner.get(position)
        if losses and any(loss in self.incoming for loss in losses) and is_plain(gradient):
            self.samples[position] = sample_of(gradient)
        else:
            self.incoming[position] = gradient.detach()

    def let_go(self) -> None:
        """Called when a backward has ended: keep nothing alive that nobody else needs.

        Another backward may follow through a retained graph.
        """
        self.incoming.clear()
        self.samples.clear()
        if self.event.draws is not None:
            self.event.draws.let_go()
        args, plan = list(self.args), self.event.plan
        for position, _ in plan.inputs:
            args[position] = _let_go(args[position])
        for position in plan.overwritten:  # these are copies
            args[position] = None
        self.args = tuple(args)

    def arguments(self) -> tuple[Any, ...] | None:
        """The arguments of the graph; None if some of them are gone."""
        args = tuple(x() if isinstance(x, weakref.ref) else x for x in self.args)
        return None if any(x is None for x in args) else args

    def argument(self, value: int) -> Any:
        """The argument that a value of its plan is; None if it is none, or gone."""
        args, position = self.arguments(), self.event.plan.values[value].argument
        return None if args is None or position is None else args[position]

    def freed_weights(self) -> list[str]:
        """The names of weights that the graph read and that FSDP has since freed."""
        args = self.arguments()
        if args is None:
            return []
        weights = (value for value in self.event.plan.values if value.role is Role.WEIGHT)
        return [
            self.event.running_name(value.name)
            for value in weights
            if value.argument is not None and not has_memory(args[value.argument])
        ]

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Torch's settings as in the forward, including autocast."""
        restore = settings_now()
        try:
            self.restore_settings()
            yield
        finally:
            restore()

    def opened(self) -> GraphRun:
        """The run as it was before its batch was closed, so that it can run again."""
        return replace(
            self.event,
            args=self.arguments(),
            random_state=self.random_state,
            versions=self.event.versions or self.versions,  # the event's know of exchanges
        )


def keep(
    run: GraphRun, outputs: Sequence[Any], batch_number: int, index: int, arrived: Arrived
) -> KeptRun | None:
    """Keep what a second run needs, and listen to the gradients of the graph's outputs.

    The autograd nodes are hooked, not the tensors, so users do not see the hooks. What is kept is
    also found with the nodes.

    Args:
        run: a graph run that has returned.
        outputs: what it returned.
        batch_number: number of its batch.
        index: index of the event in that batch.
        arrived: called in the backward when gradients have come in.

    Returns:
        None if none of its results requires a gradient.
    """
    # Autograd node to outputs: their numbers there, and their positions.
    nodes: dict[Any, list[tuple[int, int]]] = {}
    hooked: dict[int, Tensor] = {}
    handed_on = run.plan.handed_on
    for position, output in enumerate(outputs):
        if not isinstance(output, Tensor) or not output.requires_grad or position in handed_on:
            continue
        if (node := output.grad_fn) is not None:
            hooked[position] = output
            nodes.setdefault(node, []).append((output.output_nr, position))
    if not nodes:
        return None
    args = run.args
    assert args is not None
    are_sums = not (run.is_compiled and any(map(_is_compiled, nodes)))
    kept = KeptRun(
        event=run,
        batch_number=batch_number,
        index=index,
        args=args,
        random_state=run.random_state,
        versions=versions_of(args) if run.versions is None else run.versions,
        restore_settings=settings_now(),
        are_sums=are_sums,
        inner=inner_outputs(run.plan, hooked) if are_sums and len(hooked) > 1 else {},
    )
    for node, numbers in nodes.items():
        node.register_prehook(Listener(kept, numbers, arrived))
        for number, position in numbers:
            metadata_of(node)[RAN, number] = kept, position
    return kept


def runs_that_made(node: Any) -> list[KeptRun]:
    """The runs of graphs that made what an autograd node stands for, as far as they are kept."""
    found = metadata_of(node).items()
    return [value[0] for key, value in found if isinstance(key, tuple) and key[0] == RAN]


def _is_compiled(node: Any) -> bool:
    """Whether an autograd node is a graph compiled by AOTAutograd, or a view of one."""
    if type(node).__name__ == "CompiledFunctionBackward":
        return True
    before = node.next_functions
    return bool(before) and type(before[0][0]).__name__ == "CompiledFunctionBackward"


@dataclass(slots=True, eq=False)
class KeptTape:
    """The operations outside every graph that made a tensor."""

    tape: Tape
    root: Made  # what they made
    batch_number: int
    index: int
    incoming: dict[int, Tensor] = field(default_factory=dict)
    is_returned: bool = False  # whether the model returned it

    def came_in(self, position: int, gradient: Tensor) -> None:
        self.incoming[position] = gradient.detach()

    def let_go(self) -> None:
        self.incoming.clear()


def keep_tape(
    tape: Tape,
    root: Tensor,
    batch_number: int,
    index: int,
    arrived: Arrived,
    *,
    is_returned: bool = False,
) -> None:
    """The same for a tensor that was made by operations on a tape.

    Args:
        tape: records these operations.
        root: a tensor that may receive a gradient from elsewhere.
        batch_number: number of the last batch that it depends on.
        index: index of the last event before it.
        arrived: as for :func:`keep`.
        is_returned: whether the model returned it.
    """
    value = tape.value_of(root)
    if value is not None and root.grad_fn is not None:
        kept = KeptTape(tape, value, batch_number, index, is_returned=is_returned)
        root.grad_fn.register_prehook(Listener(kept, [(root.output_nr, 0)], arrived))


def keep_tape_before(
    tape: Tape, node: Any, batch_number: int, index: int, arrived: Arrived
) -> None:
    """The same for the inputs of an autograd node, as far as they are on the tape."""
    for before, output in node.next_functions:
        value = None if before is None else tape.value_at(before, output)
        if value is not None:
            kept = KeptTape(tape, value, batch_number, index)
            before.register_prehook(Listener(kept, [(output, 0)], arrived))


@dataclass(slots=True, eq=False)
class Listener:
    """An autograd hook on the node of something that is kept for the backward."""

    kept: Kept
    numbers: Sequence[tuple[int, int]]  # output of the node, and its position for came_in
    arrived: Arrived

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        if torch.compiler.is_compiling():  # compiled autograd: the hook is not to be traced
            return
        for number, position in self.numbers:
            gradient = gradients[number]
            if gradient is not None and not has_levels(gradient):
                self.kept.came_in(position, gradient)
        self.arrived(self.kept)


def _let_go(value: Any) -> Any:
    is_plain = type(value) is Tensor and not hasattr(value, "_is_param")  # no Parameter, for sure
    if not is_plain and (not isinstance(value, Tensor) or isinstance(value, torch.nn.Parameter)):
        return value
    return weakref.ref(value)


def versions_of(values: Sequence[Any]) -> tuple[int | None, ...]:
    """How often each tensor among some arguments was written."""
    if (found := native.versions_of(values)) is not None:
        return found
    try:
        return tuple(map(VERSION, values))
    except (AttributeError, RuntimeError):  # not a tensor, or an inference tensor
        return tuple(version_of(x) if isinstance(x, Tensor) else None for x in values)
