"""What happened during one call of the root module, as it happens.

Captured graphs report their statistics here; what runs between graphs is measured here. Nothing
is read back from the device before the batch ends, except what ran between graphs on the CPU.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef

from fxguard.batch.arguments import Call
from fxguard.batch.weights import Moment
from fxguard.errors import InternalError
from fxguard.graph.nodes import memory_of
from fxguard.graph.random_state import RandomState
from fxguard.graph.source_lines import Place
from fxguard.measure import eager, traceable
from fxguard.measure.func_levels import unwrapped
from fxguard.plan.plan import FramePlan, Plan, Value
from fxguard.records import Role, Source

__all__ = ["BETWEEN_GRAPHS", "Batch", "GapOperation", "GraphRun", "Key", "ModuleReturn"]

# A value of the batch: (index of the graph run in Batch.events, index in its plan), or
# (BETWEEN_GRAPHS, index in Batch.values).
Key = tuple[int, int]
BETWEEN_GRAPHS = -1


@dataclass(slots=True)
class GraphRun:
    """One run of a captured graph.

    Made by the backend that runs the graph, which also sets ``statistics``. :class:`Batch` links it
    to earlier events (``inputs``, ``derived``), brings its numbers to the host, and drops ``args``
    and ``random_state`` at the end. :mod:`fxguard.rerun.whole_graph` replaces ``plan`` and
    ``statistics`` together, once, where they were put off. All of this happens in the thread of
    the batch.
    """

    plan: Plan
    graph_module: GraphModule  # as it was captured, without checks
    statistics: Tensor  # [len(plan.checks), 2]
    # What it ran on, with copies of what it wrote; None once the batch is closed.
    args: tuple[Any, ...] | None
    random_state: RandomState | None  # before the run, where the graph draws random numbers
    names: tuple[str, str]  # the module it was captured in, and the one it ran in
    calls: tuple[str, ...]  # calls of modules around it that no graph knows of
    live: tuple[Any, ...] = ()  # the arguments themselves, until the batch has linked them
    inputs: dict[int, Key] = field(default_factory=dict)  # values made by an earlier event
    derived: dict[int, Key] = field(default_factory=dict)  # values in the memory of an earlier one
    # Where the graph raised: the values that the operation which raised had read.
    stopped_at: tuple[int, ...] = ()
    raised: FramePlan | None = None  # that operation
    postponed: Postponed | None = None  # what to do when the statistics are asked for
    repeated: bool = True  # False: a second run gave other numbers, and no further one is asked


@dataclass(slots=True)
class Postponed:
    """The statistics of a run of which only what left the graph was measured."""

    values: tuple[int, ...]  # of the plan: what left the graph
    leaving: Any  # their ranges, as they were measured; shape [count, 2] once they are read
    ways: Callable[[], Iterable[Callable[..., Any]]]  # checked forms of the graph, best first
    # Of the plan: what inputs held before the graph wrote them, where no copy was made.
    overwritten: tuple[int, ...] = ()


@dataclass(slots=True)
class GapOperation:
    """One operation that ran outside every graph."""

    kind: str
    module: str
    calls: tuple[str, ...]
    source: Source | None
    inputs: list[tuple[str, Key]]
    outputs: list[tuple[str, Key]]
    framed: bool
    infinite_literal: bool = False
    limit_literal: bool = False
    counts: bool = True  # see Step


@dataclass(slots=True)
class ModuleReturn:
    """A module returned outside every graph, or the root module returned."""

    name: str
    kind: str
    calls: tuple[str, ...]
    rows: list[tuple[str, Key | None, str]]  # label, value, note


@dataclass(slots=True)
class Known:
    """A tensor that is alive, and the value that it holds as long as nobody writes it."""

    tensor: weakref.ref[Tensor]
    version: int | None
    key: Key


@dataclass(slots=True)
class ModuleCall:
    """A module that was called outside every graph and has not returned yet."""

    name: str
    key: str


class Batch:
    """One call of the root module.

    Owned by the thread that called the model; no other thread may change it. Its life:

    1. open: events and values are added in the order in which they happen, by graphs
       (:meth:`graph_ran`), observers and module hooks;
    2. read (:meth:`read`): the numbers are on the host, and nothing is added any more. Judging may
       replace the numbers of runs that were put off;
    3. closed (:meth:`close`): it holds no tensor of the forward, nothing changes it again, and any
       thread may read it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.call: Call | None = None  # what the model was called with, while the batch is open
        self.caller: Place | None = None  # the user's line that called it
        self.autocast = False  # it was on where something ran between graphs
        self.ended: Moment | None = None  # its weights then; None before, and where it has none
        self.events: list[GraphRun | GapOperation | ModuleReturn] = []
        self.values: list[Value] = []  # measured between graphs
        self.pairs: list[traceable.Pair] = []  # their ranges, until they are read
        self.between: Tensor | None = None  # the same, read: [len(values), 2]
        self.details: dict[int, traceable.Detail] = {}  # of bad ones
        self.tensors: dict[int, weakref.ref[Tensor]] = {}  # of weights and inputs among them
        self.copied: dict[Key, Any] = {}  # arguments that a graph wrote and of which it has a copy
        self.known: dict[int, Known] = {}
        self.memories: dict[int | None, tuple[StorageWeakRef, Key]] = {}
        self.modules: list[ModuleCall] = []
        self.module_calls = 0
        self.closer_looks = 0  # at bad values made between graphs
        self.labels: dict[Key, str] = {}  # names that the user gave to values
        self.failed: GraphRun | None = None  # the last one that raised; it has no statistics yet
        # The last operation between graphs that raised, and what it raised.
        self.raised: tuple[GapOperation, BaseException] | None = None
        self.measuring = False  # what runs now is fxguard's own arithmetic

    # Graphs.

    def graph_ran(self, run: GraphRun, outputs: Sequence[Any]) -> None:
        """Add one run of a graph; ``outputs`` are what it returned, without the statistics."""
        index = len(self.events)
        args, run.live = run.live, ()
        for position, value in run.plan.inputs:
            tensor = args[position]
            key = self.key_of(tensor)
            if key is not None:
                run.inputs[value] = key
                continue
            origin = self.origin_of(tensor)
            if origin is not None:
                run.derived[value] = origin
            if run.args is not None and run.args[position] is not tensor:
                self.copied[index, value] = tensor
            self.remember(tensor, (index, value))
        for position, value in run.plan.buffers:  # what the batch has not written is the model's
            if (key := self.key_of(args[position])) is not None:
                run.inputs[value] = key
        for position, written in run.plan.written:
            if written is None:
                self.forget(args[position])
            else:
                self.remember(args[position], (index, written))
        for tensor, output in zip(outputs, run.plan.outputs, strict=False):
            if output is not None:
                self.remember(tensor, (index, output))
        self.events.append(run)

    # Which value a live tensor holds.

    def remember(self, tensor: Any, key: Key) -> None:
        if isinstance(tensor, Tensor):
            self.known[id(tensor)] = Known(weakref.ref(tensor), _version(tensor), key)
            for part in _parts(tensor):
                memory = memory_of(part)
                if memory is not None:
                    self.memories[memory] = (StorageWeakRef(part.untyped_storage()), key)

    def key_of(self, tensor: Any) -> Key | None:
        """The value that a tensor holds; None where nobody has measured what it holds now."""
        known = self.known.get(id(tensor))
        if known is None or known.tensor() is not tensor:
            return None
        return known.key if known.version == _version(tensor) else None

    def origin_of(self, tensor: Any) -> Key | None:
        """The value that stands in the same memory: a view of it, or what it was before."""
        for part in _parts(tensor) if isinstance(tensor, Tensor) else ():
            memory, key = self.memories.get(memory_of(part), (None, None))
            if memory is not None and not memory.expired():
                return key
        return None

    def forget(self, tensor: Any) -> None:
        """A tensor was given other memory: nobody knows what it holds now."""
        self.known.pop(id(tensor), None)

    # Between graphs.

    def value_of(self, tensor: Tensor, name: str, role: Role = Role.INPUT) -> Key:
        """The value that a tensor holds, measured now if nobody has measured it yet."""
        key = self.key_of(tensor)
        if key is not None:
            return key
        origin = self.origin_of(tensor)
        key = self.measure(tensor, role if origin is None else Role.MADE, name)
        if origin is not None:
            self.events.append(
                GapOperation(
                    kind="view",
                    module=self.module,
                    calls=self.calls,
                    source=None,
                    inputs=[("input[0]", origin)],
                    outputs=[("output", key)],
                    framed=False,
                    counts=False,
                )
            )
        return key

    def measure(self, tensor: Tensor, role: Role, name: str) -> Key:
        """Measure a tensor that no graph has measured."""
        index = len(self.values)
        note = "meta" if tensor.is_meta else ""
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.values.append(Value(role, name, dtype, None if note else index, note))
        # Neither the user's autograd nor an observer is to see this.
        with self.own_arithmetic(), torch._C.DisableTorchFunction(), torch.no_grad():
            try:
                bare = unwrapped(tensor)  # it may run under vmap or grad
                pair = traceable.abs_min_max(bare)
                if pair[1].device.type == "cpu" and not math.isfinite(float(pair[1])):
                    self.details[index] = traceable.describe(bare)
            except Exception:  # a tensor that knows few operations: the model is healthy
                pair = traceable.mark(traceable.NO_DATA)
            self.pairs.append(pair)
            self.autocast = self.autocast or torch._C._is_any_autocast_enabled()
        if role.is_given:
            self.tensors[index] = weakref.ref(tensor)
        key = (BETWEEN_GRAPHS, index)
        self.remember(tensor, key)
        return key

    @contextlib.contextmanager
    def own_arithmetic(self) -> Iterator[None]:
        """What runs in here is fxguard's, not the model's."""
        before, self.measuring = self.measuring, True
        try:
            yield
        finally:
            self.measuring = before

    def weight(self, tensor: Tensor, name: str) -> Key:
        """A weight that was read between graphs: it is measured with the report."""
        index = len(self.values)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.values.append(Value(Role.WEIGHT, name, dtype, note="not measured"))
        self.pairs.append((torch.zeros(()), torch.zeros(())))
        self.tensors[index] = weakref.ref(tensor)
        key = (BETWEEN_GRAPHS, index)
        self.remember(tensor, key)
        return key

    def enter_module(self, name: str) -> None:
        self.module_calls += 1
        self.modules.append(ModuleCall(name, f"{name}#{self.module_calls}"))

    @property
    def module(self) -> str:
        """Name of the innermost module that is running outside every graph."""
        return self.modules[-1].name if self.modules else ""

    @property
    def calls(self) -> tuple[str, ...]:
        return tuple(call.key for call in self.modules)

    def add_raised(self, error: BaseException) -> None:
        """Add the operation between graphs that raised what ended the forward."""
        behind: BaseException | None = error
        while behind is not None and self.raised is not None:
            if behind is self.raised[1]:
                self.events.append(self.raised[0])
                return
            behind = behind.__cause__ or behind.__context__

    # The end.

    def unmeasured(self) -> int:
        """How many operations made what could not be measured."""
        count = 0
        between = [] if self.between is None else self.between[:, 1].tolist()
        for event in self.events:
            if isinstance(event, GraphRun) and event.postponed is None:
                highs = event.statistics[:, 1].tolist()
                if traceable.NO_DATA in highs:
                    slots = {n for n, high in enumerate(highs) if high == traceable.NO_DATA}
                    lacking = {i for i, v in enumerate(event.plan.values) if v.slot in slots}
                    steps = (step for step in event.plan.steps if step.counts)
                    count += sum(not lacking.isdisjoint(step.outputs) for step in steps)
            elif isinstance(event, GapOperation) and event.counts:
                count += any(between[index] == traceable.NO_DATA for _, (_, index) in event.outputs)
        return count

    def statistics(self) -> list[Tensor]:
        """Every number of the batch, one tensor for each graph run and one for the gaps."""
        runs = [
            event.statistics if event.postponed is None else event.postponed.leaving
            for event in self.events
            if isinstance(event, GraphRun)
        ]
        return runs if self.between is None else [*runs, self.between]

    def read(self) -> None:
        """Bring the numbers to the host: one transfer for each graph, and the only wait.

        They may not stay on the device: a CUDA graph writes its next ones to the same place.

        Raises:
            InternalError: when a graph did not return one row for each check of its plan: then no
                number may be taken for that of another value.
        """
        for event in self.events:
            if isinstance(event, GraphRun):
                if event.postponed is not None:
                    numbers = eager.collect(event.postponed.leaving).cpu()
                    event.postponed.leaving = numbers
                    expect_rows(numbers, len(event.postponed.values))
                    continue
                event.statistics = event.statistics.cpu()
                expect_rows(event.statistics, len(event.plan.checks))
        if self.pairs:
            with torch.no_grad():
                self.between = traceable.collect(self.pairs).cpu()
            expect_rows(self.between, len(self.values))
            self.pairs.clear()

    @property
    def postponed(self) -> list[GraphRun]:
        """The runs of which only what left the graph was measured."""
        runs = [event for event in self.events if isinstance(event, GraphRun)]
        return [run for run in runs if run.postponed is not None]

    @property
    def repeated(self) -> bool:
        """Whether each graph that had to run again gave the numbers of its first run."""
        return all(event.repeated for event in self.events if isinstance(event, GraphRun))

    def close(self) -> None:
        """Let go of everything that keeps memory of the forward alive."""
        for event in self.events:
            if isinstance(event, GraphRun):
                event.args = None
                event.random_state = None
        self.failed = None
        self.call = None
        self.copied.clear()
        self.known.clear()
        self.memories.clear()


def expect_rows(numbers: Tensor, count: int) -> None:
    """Raise where there is not one row of numbers for each value that was measured."""
    if numbers.shape != (count, 2):
        raise InternalError(f"{tuple(numbers.shape)} numbers were measured for {count} values")


def _parts(tensor: Tensor) -> list[Tensor]:
    """What holds the memory of a tensor: itself, or what a subclass or a level is made of."""
    bare = unwrapped(tensor)
    return [bare, *traceable.inside(bare)]


def _version(tensor: Any) -> int | None:
    return None if tensor.is_inference() else tensor._version
