"""Records one call of the root module as it happens.

Captured graphs report their statistics here; operations between graphs are measured here. Nothing
is read back from the device before the batch ends, except for CPU operations between graphs.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxguard.batch.arguments import ModelCall
from fxguard.batch.arrivals import Arrivals, with_outputs
from fxguard.batch.events import Event, GraphRun, ModuleReturn, UncapturedOperation, expect_rows
from fxguard.batch.keys import BETWEEN_GRAPHS, Key
from fxguard.batch.live_tensors import LiveTensors
from fxguard.batch.watchers import BatchWatcher
from fxguard.batch.weights import Snapshot
from fxguard.findings import BROUGHT
from fxguard.forgiving import theirs
from fxguard.graph import nodes
from fxguard.graph.collectives import OWN
from fxguard.graph.evidence import Evidence
from fxguard.measure import eager, traceable
from fxguard.measure.at_hand import dtype_of, has_memory, may_wait_for
from fxguard.measure.details import Detail, describe
from fxguard.measure.func_levels import levels_left, without_levels
from fxguard.plan.plan import Plan, Value
from fxguard.records import NOT_MEASURED, Frame, Range, Role, RowRole
from fxguard.source.held_tensors import held_name
from fxguard.source.lines import Place
from fxguard.torch_names import DisableTorchFunction, is_any_autocast_on

__all__ = ["Batch"]

Watcher = TypeVar("Watcher", bound=BatchWatcher)


@dataclass(slots=True)
class RunningModule:
    """A module that was called outside every graph and has not returned yet."""

    name: str
    key: str


class Batch:
    """One call of the root module.

    It is owned by the thread that called the model; no other thread may change it. Its life cycle:

    1. open: graphs (:meth:`graph_ran`), observers and module hooks add events and values in the
       order in which they happen;
    2. read (:meth:`read`): the numbers are on the host, and nothing more is added. Judging may
       replace the numbers of postponed runs;
    3. closed (:meth:`close`): it holds no tensor of the forward, nothing changes it again, and any
       thread may read it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.held_as = ""  # the name of the model, if a script has several: names begin with it
        self.call: ModelCall | None = None  # the model's arguments, while the batch is open
        self.caller: Place | None = None  # the user's line that called the model
        self.autocast = False  # whether it was on for operations between graphs
        # Batches of models that ran between events of this one: how many events came before each.
        self.parts: list[tuple[int, Batch]] = []
        # Of a loss: outputs of models, with the batch that made each, and its label there.
        self.given: dict[Key, tuple[Batch, str]] = {}
        # Of a part: the loss before it, and which of its values are arguments, by their labels.
        self.received: tuple[Callable[[], Any], list[tuple[str, Key]]] | None = None
        self.part_of: Callable[[], Any] = _nothing  # the loss that has it as a part, while it lives
        self.frames: Callable[[], list[Frame]] = list  # its frames, once it has ended
        self.ended: Snapshot | None = None  # its weights at the end; None before, or if none
        self.events: list[Event] = []
        self.runs: list[GraphRun] = []  # the events that are graph runs
        self.values: list[Value] = []  # measured between graphs
        self.pairs: list[eager.Pair] = []  # their ranges, until they are read
        self.between: Tensor | None = None  # the same once read: [len(values), 2]
        self.details: dict[int, Detail] = {}  # of bad values
        self.evidence: dict[int, Evidence] = {}  # of the operations that made them
        self.no_evidence: dict[int, str] = {}  # why there is none, for other bad values
        self.watchers: list[BatchWatcher] = []  # the notes of tools
        self.tensors: dict[int, weakref.ref[Tensor]] = {}  # of weights and inputs among `values`
        self.copied: dict[Key, Any] = {}  # arguments that a graph wrote and had copied
        self.live = LiveTensors()
        self.arrivals: Arrivals | None = None  # what other ranks may still send
        self.modules: list[RunningModule] = []
        self.module_calls = 0
        self.labels: dict[Key, str] = {}  # the user's names for values
        # The values that leave the batch, if no module returns any.
        self.ends: list[Key] | None = None
        # Of the losses of several micro-batches: the values and the events that lead to the one
        # that is judged now.
        self.part: tuple[frozenset[Key], frozenset[int]] | None = None
        self.judged_before: set[Key] = set()  # values that another batch made
        self.masks: set[Key] = set()  # given values whose infinities a model has made on purpose
        self.holds_all = True  # every operation, and not only those that led to something bad
        self.failed: GraphRun | None = None  # the last run that raised; it has no statistics yet
        # The last operation between graphs that raised, and what it raised.
        self.raised: tuple[UncapturedOperation, BaseException] | None = None
        self.measuring = False  # whether fxguard's own arithmetic is running

    def add(self, event: Event) -> None:
        """Add what has happened."""
        self.events.append(event)

    # Graphs.

    def graph_ran(self, run: GraphRun, outputs: Sequence[Any]) -> None:
        """Add one run of a graph; ``outputs`` is what it returned, without the statistics."""
        if self.arrivals is not None:
            self.arrivals.read(run.live, self.brought)
        index, live, plan = len(self.events), self.live, run.plan
        args, run.live = run.live, ()
        for position, value in plan.inputs:
            tensor = args[position]
            besides = live.besides(tensor) if live.beside else ()
            known, origin = live.enter(tensor, key := Key(index, value))
            if known is not None:
                run.inputs[value] = known
                continue
            if origin is not None:
                run.derived[value] = origin
                if besides:
                    run.besides[value] = besides
            if run.args is not None and run.args[position] is not tensor:
                self.copied[key] = tensor
        for position, value in plan.buffers:  # unless the batch wrote them, they are the model's
            if (held := live.key_of(args[position])) is not None:
                run.inputs[value] = held
        for position, written in plan.written:
            if written is None:
                live.forget(args[position])
            else:
                live.remember(args[position], Key(index, written))
        for tensor, output in zip(outputs, plan.outputs, strict=False):
            if output is not None:
                live.remember(tensor, Key(index, output))
        self.events.append(run)
        self.runs.append(run)

    # Exchanges with other ranks.

    def exchanged(self, tensor: Tensor) -> None:
        """Note that other ranks' numbers come into a tensor; no version of it tells."""
        self.live.exchanged(tensor)
        if (memory := nodes.memory_of(tensor)) is not None:
            for run in self.runs:
                run.exchanged(memory)

    def expect(self, operation: UncapturedOperation, tensors: Sequence[Tensor]) -> None:
        """Note an exchange that has begun, without outputs, and the tensors that it writes."""
        if self.arrivals is None:
            self.arrivals = Arrivals()
        self.arrivals.expect(operation, tensors)

    def brought(self, operation: UncapturedOperation, tensors: Sequence[Tensor]) -> None:
        """Add an exchange that has ended, with what it wrote: no second run tells more of it."""
        kind = operation.kind
        written = [x for x in tensors if x.is_floating_point() or x.is_complex()]
        keys: list[Key] = []
        for tensor in written:
            rest = self.live.rest_of(tensor)
            keys.append(self.measure(tensor, Role.MADE, kind, waits=False))
            self.live.came_in(tensor, keys[-1], rest)
        if keys:
            reason = "" if kind in BROUGHT else OWN.format(kind)
            self.no_evidence |= dict.fromkeys((key.value for key in keys), reason)
            self.add(with_outputs(operation, keys))

    # Between graphs.

    def value_of(self, tensor: Tensor, name: str, role: Role = Role.INPUT) -> Key:
        """The value that a tensor holds, measured now if it has not been measured yet."""
        if self.arrivals is not None:
            self.arrivals.read([tensor], self.brought)
        key = self.live.key_of(tensor)
        if key is not None:
            return key
        origin = self.live.origin_of(tensor)
        parts = [] if origin is None else [origin, *self.live.besides(tensor)]
        key = self.measure(tensor, role if origin is None else Role.MADE, name)
        if parts:
            self.add(
                UncapturedOperation(
                    kind="view",
                    module=self.module,
                    calls=self.calls,
                    place=None,
                    inputs=[(f"input[{i}]", part) for i, part in enumerate(parts)],
                    outputs=[("output", key)],
                    framed=False,
                    counts=False,
                )
            )
        return key

    def measure(self, tensor: Tensor, role: Role, name: str, *, waits: bool = True) -> Key:
        """Measure a tensor that no graph has measured.

        Args:
            tensor: the tensor.
            role: what it is for the model.
            name: how reports call it.
            waits: whether its numbers may be waited for on a GPU: only while it and what it was
                made of are there can a bad one be looked at.
        """
        index = len(self.values)
        note = "meta" if tensor.is_meta else ""
        slot, needs_gradient = None if note else index, tensor.requires_grad
        self.values.append(
            Value(role, name, dtype_of(tensor), slot, note, needs_gradient=needs_gradient)
        )
        read = eager.read(tensor)
        if read is not None and math.isfinite(read[1]):
            self.pairs.append(read)
        else:
            self._measure_closely(tensor, index, waits)
        self.autocast = self.autocast or is_any_autocast_on()
        if role.is_given:
            self.tensors[index] = weakref.ref(tensor)
        key = Key(BETWEEN_GRAPHS, index)
        for watcher in self.watchers:
            with self.own_arithmetic():
                watcher.measured(key, tensor)
        self.live.remember(tensor, key)
        return key

    def detail_of(self, key: Key) -> Detail | None:
        """What was seen of a bad value between graphs when it was measured; None if nothing."""
        return self.details.get(key.value) if key.is_between_graphs else None

    def measured_before(self, name: str, dtype: str, pair: tuple[float, float]) -> Key:
        """Add a value that an operation made, with the magnitudes that were read then."""
        index = len(self.values)
        self.values.append(Value(Role.MADE, name, dtype, index))
        self.pairs.append(pair)
        return Key(BETWEEN_GRAPHS, index)

    def _measure_closely(self, tensor: Tensor, index: int, waits: bool) -> None:
        """Measure a tensor with torch's operations, and describe bad elements."""
        with self.own_arithmetic():
            try:
                bare = without_levels(tensor)  # this may run under vmap or grad
                pair = eager.abs_min_max(bare)
                if bare.is_cpu or (waits and may_wait_for(bare)):
                    pair = eager.waited_for(pair)
                    if not math.isfinite(pair[1]):
                        self.details[index] = describe(bare)
            except theirs():  # a tensor with few operations: the model is healthy
                pair = traceable.mark(traceable.NO_DATA)
            self.pairs.append(pair)

    def watcher(self, kind: type[Watcher]) -> Watcher | None:
        """The notes of one kind on this batch; None if no tool takes them."""
        return next((each for each in self.watchers if isinstance(each, kind)), None)

    @contextlib.contextmanager
    def own_arithmetic(self) -> Iterator[None]:
        """Hide fxguard's own arithmetic from autograd and observers."""
        before, self.measuring = self.measuring, True
        try:
            with DisableTorchFunction(), torch.no_grad():
                yield
        finally:
            self.measuring = before

    def weight(self, tensor: Tensor, name: str) -> Key:
        """Add a weight that was read between graphs: it is measured with the report."""
        return self._later(tensor, name, Role.WEIGHT)

    def given_later(self, tensor: Tensor, name: str) -> Key:
        """Add a tensor that came from another batch, which has measured it."""
        return self._later(tensor, name, Role.INPUT)

    def _later(self, tensor: Tensor, name: str, role: Role) -> Key:
        index = len(self.values)
        needs_gradient = tensor.requires_grad
        self.values.append(
            Value(role, name, dtype_of(tensor), note=NOT_MEASURED, needs_gradient=needs_gradient)
        )
        self.pairs.append((0.0, 0.0))
        self.tensors[index] = weakref.ref(tensor)
        key = Key(BETWEEN_GRAPHS, index)
        self.live.remember(tensor, key)
        return key

    def name_given(self, key: Key, tensor: Tensor) -> None:
        """Give a bad tensor that nobody has named so far the name that the script has for it."""
        value = self.values[key.value]
        if value.role is Role.INPUT and value.name.startswith("input["):
            found = held_name(tensor)
            if found is not None:
                self.values[key.value] = replace(value, role=found[0], name=found[1])

    def given_was(self, key: Key, found: Range) -> None:
        """Note the range of a given tensor, once the numbers of the batch were read."""
        assert self.between is not None
        with levels_left():
            self.between[key.value] = torch.tensor([found.abs_min, found.abs_max])
        self.values[key.value] = replace(self.values[key.value], slot=key.value, note="")

    def enter_module(self, name: str) -> None:
        self.module_calls += 1
        self.modules.append(RunningModule(name, f"{name}#{self.module_calls}"))

    @property
    def module(self) -> str:
        """The name of the innermost module that is running outside every graph."""
        return self.modules[-1].name if self.modules else ""

    @property
    def calls(self) -> tuple[str, ...]:
        """Keys of the modules that are running outside every graph, the outermost first."""
        return tuple([call.key for call in self.modules]) if self.modules else ()

    def add_raised(self, error: BaseException) -> None:
        """Add the operation between graphs whose exception ended the forward."""
        behind: BaseException | None = error
        while behind is not None and self.raised is not None:
            if behind is self.raised[1]:
                self.events.append(self.raised[0])
                return
            behind = behind.__cause__ or behind.__context__

    def runs_of(self, plan: Plan) -> list[GraphRun]:
        """One run of a graph for each module that it ran for."""
        return list({run.names[1]: run for run in self.runs if run.plan is plan}.values())

    def returned_by_graphs(self) -> dict[int, set[int]]:
        """What the model returned and did not read itself: event of a graph to its outputs."""
        read = {key for event in self.events for key in event.reads()}
        returned: dict[int, set[int]] = {}
        for key in self._returned() - read:
            run = self.run_of(key)
            if run is not None:
                made_of = frozenset[int]().union(*run.plan.outputs_made_of)
                outputs = {i for i, value in enumerate(run.plan.outputs) if value == key.value}
                returned.setdefault(key.event, set()).update(outputs - made_of)
        return returned

    def _returned(self) -> set[Key]:
        """What the root module returned."""
        returns = (event for event in self.events if isinstance(event, ModuleReturn))
        rows = (row for event in returns if not event.name for row in event.rows)
        keys = (row.key for row in rows if RowRole.of(row.label) is RowRole.OUTPUT)
        return {key for key in keys if key is not None}

    def is_apart(self, key: Key) -> bool:
        """Whether a value belongs to another micro-batch than that which is judged."""
        if self.part is None:
            return False
        values, events = self.part
        return key not in values if key.is_between_graphs else key.event not in events

    def tensor_of(self, key: Key) -> Tensor | None:
        """The tensor of a weight, an input or a constant, while the batch is open and holds it."""
        tensor = self._tensor_of(key)
        if tensor is None:
            return None
        bare = without_levels(tensor)  # the forward may have run under vmap or grad
        return bare if has_memory(bare) else None

    def _tensor_of(self, key: Key) -> Tensor | None:
        run = self.run_of(key)
        if run is None:
            reference = self.tensors.get(key.value)
            return None if reference is None else reference()
        value = run.plan.values[key.value]
        if not value.role.is_given:  # a kernel may have made it unmeasured
            return None
        if value.argument is None:
            attribute = nodes.attribute_of(run.graph_module, value.name)
            return attribute if isinstance(attribute, Tensor) else None
        return None if run.args is None else run.args[value.argument]

    def run_of(self, key: Key) -> GraphRun | None:
        """The graph run that a value belongs to; None if measured between graphs."""
        if key.is_between_graphs:
            return None
        run = self.events[key.event]
        assert isinstance(run, GraphRun)
        return run

    # The end.

    def unmeasured(self) -> int:
        """How many operations made results that could not be measured."""
        between = [] if self.between is None else self.between[:, 1].tolist()
        return sum(event.unmeasured(between) for event in self.events)

    def uncaptured(self) -> int:
        """How many operations ran outside every graph."""
        return sum(isinstance(e, UncapturedOperation) and e.counts for e in self.events)

    def statistics(self) -> list[Tensor]:
        """All numbers of the batch: one tensor per graph run, one for operations in between."""
        numbers = [run.numbers for run in self.runs]
        return numbers if self.between is None else [*numbers, self.between]

    def is_finite(self) -> bool:
        """Whether no number is NaN or inf."""
        if self.between is not None and not eager.are_finite(self.between):
            return False
        for run in self.runs:  # noqa: SIM110 - a generator costs as much as the check
            if not run.is_finite():
                return False
        return True

    def numbers_of(self, event: int) -> Tensor | None:
        """The numbers of a graph run, or of operations between graphs; None if postponed."""
        if event == BETWEEN_GRAPHS:
            return self.between
        run = self.events[event]
        assert isinstance(run, GraphRun)
        return run.statistics if run.postponed is None else None

    def read(self) -> None:
        """Bring the numbers to the host, in one transfer for each graph.

        They may not stay on the device, because a CUDA graph writes its next numbers to the same
        place.

        Raises:
            InternalError: when a graph did not return one row for each check of its plan, so that
                numbers could be taken for those of other values.
        """
        for run in self.runs:
            run.read()
        if self.pairs:
            with torch.no_grad():
                self.between = eager.collect(self.pairs).cpu()
            expect_rows(self.between, len(self.values))
            self.pairs.clear()

    @property
    def postponed(self) -> list[GraphRun]:
        """The runs of which only the graph's outputs were measured."""
        return [run for run in self.runs if run.postponed is not None]

    @property
    def repeated(self) -> bool:
        """Whether each graph that had to run again repeated the numbers of its first run."""
        return not any(run.not_again for run in self.runs)

    def close(self) -> None:
        """Release everything that keeps memory of the forward alive."""
        for run in self.runs:
            run.close()
        self.failed = None
        self.call = None
        self.copied.clear()
        self.live.clear()


def _nothing() -> None:
    """What a batch is a part of, while no loss has it."""
