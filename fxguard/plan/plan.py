"""The Plan of a graph: everything that can be known before there are numbers.

The Plan says which values are measured and in which row of the statistics each stands, which
operations made them out of which others, which frames there are and what their rows are called.
It is plain, frozen data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fxguard.records import Role, Source, title_of

__all__ = [
    "LATER",
    "WHOLE_GRAPH",
    "Check",
    "FramePlan",
    "Place",
    "Plan",
    "RowPlan",
    "Step",
    "Value",
    "link",
    "merge_root",
    "merge_single_operations",
]


WHOLE_GRAPH = "graph"  # the kind of a step that stands for all of a graph's operations
LATER = "measured later"  # the note of a value that is measured when something turned bad


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the graph."""

    role: Role  # what it is to the graph
    name: str  # the user's variable where known, or the weight's or input's name
    dtype: str = ""  # "float16", ...; "" where the graph does not know
    slot: int | None = None  # row in the statistics; None where it is not measured
    note: str = ""  # shown in place of numbers where slot is None
    argument: int | None = None  # position among the graph's inputs, for inputs and weights
    later: int | None = None  # index into Plan.later
    # No check reaches it: it is taken to be as bad as what the operation that made it has read.
    is_assumed: bool = False

    @property
    def can_be_bad(self) -> bool:
        """Whether it is of a dtype that holds NaN or inf, as far as the graph knows."""
        return not self.dtype or "float" in self.dtype or "complex" in self.dtype


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: what it read, what it made."""

    kind: str  # "mul", "softmax", ...
    module: str  # qualified name of the module in whose forward it stands
    inputs: tuple[int, ...]  # values, in order of use
    outputs: tuple[int, ...]  # values
    infinite_literal: bool = False  # was given an infinity on purpose
    limit_literal: bool = False  # was given a dtype's largest magnitude, to make a mask
    literals: tuple[float, ...] = ()  # the Python numbers that it was given, in order
    number_first: bool = False  # its first operand is one of them, as in 2 / x
    source: Source | None = None
    # False where it is no operation of its own: what an operation wrote besides its results, or a
    # link that says that one value stands in the memory of another.
    counts: bool = True
    # The node that made it, and the bodies around that, as in :class:`Check`; "" where it stands
    # for no node of a graph.
    node: str = ""
    inside: tuple[tuple[str, int], ...] = ()

    @property
    def title(self) -> str:
        """``encoder.block.0 mul``."""
        return title_of(self.module, self.kind)


def link(module: str, inputs: tuple[int, ...], output: int) -> Step:
    """The step that says that a value stands in the memory of others. It is no operation."""
    return Step("view", module, inputs, (output,), counts=False)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row of a frame, before there are numbers."""

    label: str
    value: int | None = None  # index into Plan.values; None where the row has no tensor
    note: str = ""  # shown where there is no value


@dataclass(frozen=True, slots=True)
class FramePlan:
    """One frame, before there are numbers."""

    name: str
    kind: str
    is_op: bool
    rows: tuple[RowPlan, ...]  # without the parameters of a module: those are read with the report
    source: Source | None = None
    step: int | None = None  # the operation that the frame shows, also where a module is just that
    calls: tuple[str, ...] = ()  # the module calls around it, outermost first; the last is its own


# A node by name, and the bodies of higher-order operations around it.
Place = tuple[tuple[tuple[str, int], ...], str]


@dataclass(frozen=True, slots=True)
class Check:
    """Measure one result, right after a node has run."""

    node: str  # whose result
    path: tuple[int, ...]  # indices into the result, where it is a tuple
    after: str  # usually the same node; another one where that wrote the result's memory
    # The bodies of higher-order operations in which the node stands, outermost first: each the
    # operation's node and the body's position among its arguments.
    inside: tuple[tuple[str, int], ...] = ()
    # The node that ends the torch.func region in which the node stands: taken there.
    region_end: str | None = None
    wide: bool = False  # the number is float64
    may_be_infinite: bool = False  # made of an infinity that somebody wrote on purpose

    @property
    def place(self) -> Place:
        """Where the node stands after which it is measured."""
        return self.inside, self.after


@dataclass(frozen=True, slots=True)
class Plan:
    """What a graph computes and what of it is measured.

    What holds of every plan:

    - ``values``, ``steps`` and ``checks`` are in the order in which a run makes them: a step reads
      values that entered the graph, or that a step before it made. No two steps make one value.
    - The value with ``slot`` ``i`` is what ``checks[i]`` measures, and no other value has that
      slot: the statistics of a run have one row for each check, in their order. The same holds of
      ``later`` and :attr:`Value.later`, for a second run.
    - A value has no ``slot`` where a ``note`` says why, where it is read with the report (weights,
      constants), or where ``later`` says that a second run measures it.
    - Checks in the bodies of one higher-order operation follow each other.
    """

    values: tuple[Value, ...] = ()
    steps: tuple[Step, ...] = ()  # in order of execution
    frames: tuple[FramePlan, ...] = ()  # in order of display
    # (position among the graph's inputs, value) of those that are no weights or buffers.
    inputs: tuple[tuple[int, int], ...] = ()
    buffers: tuple[tuple[int, int], ...] = ()  # the same of buffers
    # Likewise of those that the graph wrote, with the value that they hold when it ends; None where
    # that is not known.
    written: tuple[tuple[int, int | None], ...] = ()
    # Positions of the inputs that are to be copied before a run, to make a second one possible.
    overwritten: tuple[int, ...] = ()
    outputs: tuple[int | None, ...] = ()  # the value of each item that the graph returns
    # For each of these items, the positions of others that it is made of.
    outputs_made_of: tuple[frozenset[int], ...] = ()
    handed_on: frozenset[int] = frozenset()  # positions of items that are inputs as they came in
    checks: tuple[Check, ...] = field(default=(), repr=False)  # one for each row of the statistics
    # Of values that only a second run can see, with the operations in which they are.
    later: tuple[Check, ...] = field(default=(), repr=False)
    operations: int = 0  # how many there are, with those in subgraphs that no step stands for
    unchecked: tuple[tuple[str, int], ...] = ()  # reason, how many of them are not checked
    random: bool = False  # draws random numbers

    def check_of(self, value: int) -> Check | None:
        """Where a value is measured; None where it is not, or by nothing that a node has made.

        A plan of one step for a whole graph has numbers, and no checks.
        """
        slot = self.values[value].slot
        return self.checks[slot] if slot is not None and self.checks else None


def merge_single_operations(frames: Iterable[FramePlan]) -> list[FramePlan]:
    """Give a module that is one operation one frame, not two."""
    merged: list[FramePlan] = []
    for frame in frames:
        if not frame.is_op and frame.calls and frame.step is None:
            inside = 0
            while inside < len(merged) and frame.calls[-1] in merged[-1 - inside].calls:
                inside += 1
            if inside == 1 and merged[-1].is_op and merged[-1].calls[-1] == frame.calls[-1]:
                single = merged.pop()
                frame = replace(frame, step=single.step, source=single.source)
        merged.append(frame)
    return merged


def merge_root(frames: list[FramePlan]) -> list[FramePlan]:
    """Give a root module of torch that is one operation, such as a ``Linear``, one frame."""
    if len(frames) != 2 or frames[1].is_op or frames[1].name or not frames[0].is_op:
        return frames
    operation, root = frames
    if operation.calls or operation.source is not None or operation.kind == WHOLE_GRAPH:
        return frames  # the user wrote it, and the frame shows its line; or it stands for many
    return [replace(root, step=operation.step)]
