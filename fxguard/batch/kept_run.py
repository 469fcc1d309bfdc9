"""What one run of a graph leaves for its backward: its inputs, and the gradients that came in."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fxguard.batch.events import GraphRun
from fxguard.batch.samples import inner_outputs, sample_of
from fxguard.batch.tape import Tape
from fxguard.graph.random_state import RandomState
from fxguard.graph.torch_settings import settings_now
from fxguard.measure.at_hand import VERSION, has_memory, version_of
from fxguard.measure.finite import is_plain
from fxguard.measure.func_levels import has_levels
from fxguard.records import Role

__all__ = [
    "LOSS",
    "Kept",
    "KeptRun",
    "KeptTape",
    "Listener",
    "keep",
    "keep_tape",
    "keep_tape_before",
    "versions_of",
]

LOSS = 1 << 30  # in place of the index of an event: a loss comes after all of them


class Kept(Protocol):
    """What is kept for a backward."""

    batch_number: int
    index: int  # of the event in its batch
    incoming: dict[int, Tensor]

    def came_in(self, position: int, gradient: Tensor) -> None:
        """A gradient has come to an output."""

    def let_go(self) -> None:
        """A backward has ended."""


Arrived = Callable[[Kept], object]


@dataclass(slots=True, eq=False)
class KeptRun:
    """A run of a graph whose backward has yet to come.

    The hooks on what the graph returned own it: it dies with the autograd graph.
    """

    event: GraphRun  # of its batch, which ends with the forward
    batch_number: int
    index: int  # of the event in its batch
    args: tuple[Any, ...]  # what the graph ran on; weak references once a backward has ended
    random_state: RandomState | None
    versions: tuple[int | None, ...]  # of the arguments, when the graph had run
    restore_settings: Callable[[], None]  # those of torch under which it ran
    # By position among the outputs, in the backward that runs now.
    incoming: dict[int, Tensor] = field(default_factory=dict)
    # In place of what came from inside of the graph: nothing of it is kept alive.
    samples: dict[int, Tensor] = field(default_factory=dict)
    # Whether those hold what came from inside of the graph, too: an output that another one is made
    # of gets gradients from both sides. A compiled graph is one node of autograd.
    are_sums: bool = True
    # Large outputs to the losses that are made of them.
    inner: Mapping[int, Collection[int]] = field(default_factory=dict)
    of_tape: bool = False  # what ran is no captured graph

    def came_in(self, position: int, gradient: Tensor) -> None:
        """A gradient has come to an output; perhaps from a loss, whose own is there already."""
        from_loss = any(loss in self.incoming for loss in self.inner.get(position, ()))
        if from_loss and is_plain(gradient):
            self.samples[position] = sample_of(gradient)
        else:
            self.incoming[position] = gradient.detach()

    def let_go(self) -> None:
        """A backward has ended: keep nothing alive that nobody else needs.

        Another one may follow, through a graph that was retained.
        """
        self.incoming.clear()
        self.samples.clear()
        args, plan = list(self.args), self.event.plan
        for position, _ in plan.inputs:
            args[position] = _let_go(args[position])
        for position in plan.overwritten:  # these are copies
            args[position] = None
        self.args = tuple(args)

    def _arguments(self) -> tuple[Any, ...] | None:
        """What the graph ran on; None where some of it is gone."""
        args = tuple(x() if isinstance(x, weakref.ref) else x for x in self.args)
        return None if any(x is None for x in args) else args

    def is_unchanged(self) -> bool:
        """Whether nobody has written its arguments since."""
        args = self._arguments()
        return args is not None and versions_of(args) == self.versions

    def freed_weights(self) -> list[str]:
        """The names of weights that the graph read and that FSDP has freed since."""
        args = self._arguments()
        if args is None:
            return []
        weights = (value for value in self.event.plan.values if value.role is Role.WEIGHT)
        return [
            value.name
            for value in weights
            if value.argument is not None and not has_memory(args[value.argument])
        ]

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Torch's settings as they were in the forward, autocast among them."""
        restore = settings_now()
        try:
            self.restore_settings()
            yield
        finally:
            restore()

    def opened(self) -> GraphRun:
        """The run as it was before its batch was closed: it can run again."""
        return replace(self.event, args=self._arguments(), random_state=self.random_state)


def keep(
    run: GraphRun, outputs: Sequence[Any], batch_number: int, index: int, arrived: Arrived
) -> KeptRun | None:
    """Keep what a second run needs, and listen to the gradients of what the graph returned.

    The nodes of autograd are hooked, not the tensors: users do not see it.

    Args:
        run: of the graph, which has returned.
        outputs: what it returned.
        batch_number: of the batch that it is a part of.
        index: of the event in that batch.
        arrived: called in the backward, when gradients have come in.

    Returns:
        None where nothing that it has made requires a gradient.
    """
    hooked = {
        position: output
        for position, output in enumerate(outputs)
        if isinstance(output, Tensor) and output.requires_grad and output.grad_fn is not None
    }
    for position in run.plan.handed_on:
        hooked.pop(position, None)
    if not hooked:
        return None
    args = run.args
    assert args is not None
    positions: dict[Any, list[int]] = {}  # node of autograd to outputs
    for position, output in hooked.items():
        positions.setdefault(output.grad_fn, []).append(position)
    are_sums = not any(map(_is_compiled, positions))
    kept = KeptRun(
        event=run,
        batch_number=batch_number,
        index=index,
        args=args,
        random_state=run.random_state,
        versions=versions_of(args),
        restore_settings=settings_now(),
        are_sums=are_sums,
        inner=inner_outputs(run.plan, hooked) if are_sums else {},
    )
    for node, at in positions.items():
        numbers = [(hooked[position].output_nr, position) for position in at]
        node.register_prehook(Listener(kept, numbers, arrived))
    return kept


def _is_compiled(node: Any) -> bool:
    """Whether a node of autograd is a graph that AOTAutograd has compiled, or a view of that."""
    before = [function for function, _ in node.next_functions[:1]]
    return any(type(each).__name__ == "CompiledFunctionBackward" for each in (node, *before))


@dataclass(slots=True, eq=False)
class KeptTape:
    """Operations outside every graph that have made a tensor."""

    tape: Tape
    root: int  # number of that tensor on it
    batch_number: int
    index: int
    incoming: dict[int, Tensor] = field(default_factory=dict)

    def came_in(self, position: int, gradient: Tensor) -> None:
        self.incoming[position] = gradient.detach()

    def let_go(self) -> None:
        self.incoming.clear()


def keep_tape(tape: Tape, root: Tensor, batch_number: int, index: int, arrived: Arrived) -> None:
    """The same for a tensor that operations on a tape have made.

    Args:
        tape: with these operations.
        root: what a gradient may come to from elsewhere.
        batch_number: of the last batch that it is made in.
        index: of the last event before it.
        arrived: as above.
    """
    number = tape.number_of(root)
    if number is not None and root.grad_fn is not None:
        _keep_tape(tape, number, root.grad_fn, root.output_nr, batch_number, index, arrived)


def keep_tape_before(
    tape: Tape, node: Any, batch_number: int, index: int, arrived: Arrived
) -> None:
    """The same for what was given to a node of autograd, as far as it is on the tape."""
    for before, output in node.next_functions:
        number = None if before is None else tape.number_at(before, output)
        if number is not None:
            _keep_tape(tape, number, before, output, batch_number, index, arrived)


def _keep_tape(
    tape: Tape, number: int, node: Any, output: int, batch_number: int, index: int, arrived: Arrived
) -> None:
    if tape.is_repeatable:
        kept = KeptTape(tape, number, batch_number, index)
        node.register_prehook(Listener(kept, [(output, 0)], arrived))


@dataclass(slots=True, eq=False)
class Listener:
    """A hook of autograd's on what made something that is kept for the backward."""

    kept: Kept
    numbers: Sequence[tuple[int, int]]  # of the node's outputs, and what came_in calls them
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
    is_kept = not isinstance(value, Tensor) or isinstance(value, torch.nn.Parameter)
    return value if is_kept else weakref.ref(value)


def versions_of(values: Sequence[Any]) -> tuple[int | None, ...]:
    """How often each tensor of some arguments was written."""
    try:
        return tuple(map(VERSION, values))
    except (AttributeError, RuntimeError):  # no tensor, or one of inference mode
        return tuple(version_of(x) if isinstance(x, Tensor) else None for x in values)
