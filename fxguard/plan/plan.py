"""The Plan of a graph: everything that can be known before there are numbers.

The Plan says which values are measured, in which row of the statistics each one is, which
operations made them from which others, which frames there are, and how their rows are labelled. It
is plain, frozen data.
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


WHOLE_GRAPH = "graph"  # the kind of a step that represents all operations of a graph
LATER = "measured later"  # the note of a value that is measured once something has turned bad


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the graph."""

    role: Role  # what it is in the graph
    name: str  # the user's variable if known, or the weight's or input's name
    dtype: str = ""  # "float16", ...; "" if the graph does not know
    slot: int | None = None  # row in the statistics; None if it is not measured
    note: str = ""  # shown in place of numbers if slot is None
    argument: int | None = None  # position among the graph's inputs, for inputs and weights
    later: int | None = None  # index into Plan.later
    # No check reaches it: it is assumed to be as bad as the operands of its operation.
    is_assumed: bool = False
    needs_gradient: bool = False  # whether what gave it to the graph asks for its gradient

    @property
    def can_be_bad(self) -> bool:
        """Whether its dtype can hold NaN or inf, as far as the graph knows."""
        return not self.dtype or "float" in self.dtype or "complex" in self.dtype


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: what it read and what it made."""

    kind: str  # "mul", "softmax", ...
    module: str  # qualified name of the module whose forward contains it
    inputs: tuple[int, ...]  # values, in order of use
    outputs: tuple[int, ...]  # values
    infinite_literal: bool = False  # whether it was given an infinity on purpose
    limit_literal: bool = False  # whether it was given a dtype's largest magnitude, to make a mask
    literals: tuple[float, ...] = ()  # Python numbers among its arguments, in order
    number_first: bool = False  # whether its first operand is one of them, as in 2 / x
    source: Source | None = None
    # False if it is not an operation of its own: a write besides an operation's results, or a link
    # between a value and the value that contains its memory.
    counts: bool = True
    # The node that made it, and the bodies around that, as in :class:`Check`; "" if it represents
    # no node of a graph.
    node: str = ""
    inside: tuple[tuple[str, int], ...] = ()

    @property
    def title(self) -> str:
        """``encoder.block.0 mul``."""
        return title_of(self.module, self.kind)


def link(module: str, inputs: tuple[int, ...], output: int) -> Step:
    """A step that links a value to the values in whose memory it is. It is not an operation."""
    return Step("view", module, inputs, (output,), counts=False)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row of a frame, before there are numbers."""

    label: str
    value: int | None = None  # index into Plan.values; None if the row has no tensor
    note: str = ""  # shown if there is no value


@dataclass(frozen=True, slots=True)
class FramePlan:
    """One frame, before there are numbers."""

    name: str
    kind: str
    is_op: bool
    rows: tuple[RowPlan, ...]  # without a module's parameters, which are read for the report
    source: Source | None = None
    step: int | None = None  # the operation of the frame, also if a module is a single operation
    calls: tuple[str, ...] = ()  # the module calls around it, outermost first; its own is the last


# The bodies of higher-order operations around a node, and the node's name.
Place = tuple[tuple[tuple[str, int], ...], str]


@dataclass(frozen=True, slots=True)
class Check:
    """Measure one result, right after a node has run."""

    node: str  # the node of the result
    path: tuple[int, ...]  # indices into the result if it is a tuple
    after: str  # usually the same node; another one if that wrote the result's memory
    # The bodies of higher-order operations around the node, outermost first: each as the
    # operation's node and the body's position among its arguments.
    inside: tuple[tuple[str, int], ...] = ()
    # The node that ends the torch.func region around the node: the numbers are taken there.
    region_end: str | None = None
    wide: bool = False  # the number is float64
    may_be_infinite: bool = False  # derived from an infinity that was written on purpose

    @property
    def place(self) -> Place:
        """The place of the node after which it is measured."""
        return self.inside, self.after


@dataclass(frozen=True, slots=True)
class Plan:
    """What a graph computes, and which of its values are measured.

    Invariants of every plan:

    - ``values``, ``steps`` and ``checks`` are in the order of a run: a step reads values that
      entered the graph or that an earlier step made. No two steps make one value.
    - ``checks[i]`` measures the only value with ``slot`` ``i``: the statistics of a run have one
      row for each check, in order. The same holds for ``later`` and :attr:`Value.later`, in a
      second run.
    - A value has no ``slot`` if a ``note`` says why, if it is read for the report (weights,
      constants), or if ``later`` says that a second run measures it.
    - Checks in the bodies of one higher-order operation follow each other.
    """

    values: tuple[Value, ...] = ()
    steps: tuple[Step, ...] = ()  # in order of execution
    frames: tuple[FramePlan, ...] = ()  # in order of display
    # (position among the graph's inputs, value) of inputs that are neither weights nor buffers.
    inputs: tuple[tuple[int, int], ...] = ()
    buffers: tuple[tuple[int, int], ...] = ()  # the same for buffers
    # The same for inputs that the graph wrote, with their value at the end; None if not known.
    written: tuple[tuple[int, int | None], ...] = ()
    # Positions of the inputs that must be copied before a run, to make a second run possible.
    overwritten: tuple[int, ...] = ()
    outputs: tuple[int | None, ...] = ()  # the value of each item that the graph returns
    # For each of these items, the positions of other items that it is made from.
    outputs_made_of: tuple[frozenset[int], ...] = ()
    handed_on: frozenset[int] = frozenset()  # positions of items that are unchanged inputs
    checks: tuple[Check, ...] = field(default=(), repr=False)  # one for each row of the statistics
    # Checks of values that only a second run can see, inside certain operations.
    later: tuple[Check, ...] = field(default=(), repr=False)
    operations: int = 0  # how many there are, including those in subgraphs without steps
    unchecked: tuple[tuple[str, int], ...] = ()  # reason, number of unchecked operations
    random: bool = False  # whether it draws random numbers

    def check_of(self, value: int) -> Check | None:
        """The check that measures a value; None if there is none, or if no node made the value.

        A plan with one step for a whole graph has numbers but no checks.
        """
        slot = self.values[value].slot
        return self.checks[slot] if slot is not None and self.checks else None


def merge_single_operations(frames: Iterable[FramePlan]) -> list[FramePlan]:
    """Give a module that is a single operation one frame instead of two."""
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
    """Give a torch root module that is a single operation, such as a ``Linear``, one frame."""
    if len(frames) != 2 or frames[1].is_op or frames[1].name or not frames[0].is_op:
        return frames
    operation, root = frames
    if operation.calls or operation.source is not None or operation.kind == WHOLE_GRAPH:
        return frames  # the user wrote it, and the frame shows its line; or it represents many
    return [replace(root, step=operation.step)]
