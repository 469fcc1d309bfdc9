"""Runs a batch again in another way, up to the operation that made a bad value.

The other way is another dtype throughout, eager mode, or other samples. The result of that
operation is compared, element by element, with its result in the model's own form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.batch.batch import Batch
from fxguard.batch.dataflow import DataFlow
from fxguard.batch.events import GraphRun
from fxguard.batch.keys import Key
from fxguard.forgiving import where_theirs_may_raise
from fxguard.graph.wide_form import Ran, is_float
from fxguard.measure.at_hand import own_arithmetic
from fxguard.measure.details import not_finite_in
from fxguard.measure.free_memory import has_room
from fxguard.measure.func_levels import without_levels
from fxguard.plan.plan import Check, Place
from fxguard.records import Role, Severity
from fxguard.rerun.consequences import Replay
from fxguard.rerun.other_values import AsTheModel
from fxguard.rerun.start import Start, look_through
from fxguard.rerun.walk import Ended, SecondForm, Walk, Watcher
from fxguard.rerun.wide_run import WideForm

__all__ = [
    "Other",
    "Outcome",
    "UpTo",
    "check_in",
    "in_dtype",
    "in_eager_mode",
    "leading_to",
    "on_others",
    "up_to",
]

Other = Callable[[Tensor], Tensor]  # maps an input of a graph to its replacement


@dataclass(frozen=True, slots=True)
class Outcome:
    """One value in the model's form and in another way."""

    severity: Severity  # in the model's form; FINITE if a second run shows nothing bad
    made: str  # the same in words, with signs: "-inf"; "" if finite
    bad: int  # elements that are bad there
    rows: tuple[int, ...]  # the indices of dimension 0 that hold them, if there are several
    size: int  # of that dimension; 0 if it is the only one, which may be channels
    other: str  # what is not finite among those elements in the other way: "inf and -inf"
    still: int  # how many of them are also bad in the other way
    first: str  # the same of the first of them
    is_finite: bool  # whether everything that is finite in the model's form is finite there
    most: float  # the largest finite magnitude in the other way
    is_whole: bool = True  # whether everything leading to the value ran in the other way

    @property
    def is_mended(self) -> bool:
        """Whether no element is bad in the other way."""
        return self.still == 0 and self.is_finite


def in_eager_mode(run: GraphRun, value: int) -> Outcome | None:
    """Run a graph again as captured, operation by operation.

    Args:
        run: the graph run, still open.
        value: a value of its plan.

    Returns:
        None if no second run is possible; ``severity`` is FINITE if nothing bad was made.
    """
    look = up_to(run, value)
    if look is not None:
        look_through(run, look)
    return None if look is None else look.outcome


def up_to(run: GraphRun, value: int) -> UpTo | None:
    """A look at a value of a graph; None if no second run is possible."""
    check = check_in(run, value)
    return None if check is None or not _may_run(run) else UpTo(check, in_second_form=False)


def in_dtype(batch: Batch, flow: DataFlow, key: Key, dtype: torch.dtype) -> Outcome | None:
    """Run what led to a value in a wide dtype: from the first graph of the batch, or the last one.

    Args:
        batch: the batch, still open.
        flow: the data flow of the batch.
        key: key of a value that an operation of a graph made.
        dtype: the wide one.

    Returns:
        None if no such run is possible, or if it does not show the model's result.
    """
    events, is_all = leading_to(batch, flow, key.event)
    form = WideForm(dtype)
    for starts, is_whole in ((events, is_all), (frozenset({key.event}), False)):
        outcome = _replayed(batch, flow, key, form, starts, {})
        if outcome is not None:
            alone = is_whole and not form.taken_over
            return outcome if alone else _in_part(outcome)
        if len(events) == 1:
            break
    return None


def on_others(
    batch: Batch, flow: DataFlow, key: Key, given: Mapping[Key, Other], index: Sequence[int]
) -> Outcome | None:
    """Run what led to a value as the model does, with some samples replaced by others.

    Args:
        batch: the batch, still open.
        flow: the data flow of the batch.
        key: key of a value that an operation of a graph made.
        given: replacements for some inputs.
        index: the sample in each place then.
    """
    starts = frozenset({key.event})
    return _replayed(batch, flow, key, AsTheModel(), starts, given, index)


def check_in(run: GraphRun, value: int) -> Check | None:
    """The check of a value; None if no operation that a second run enters made it."""
    later = run.plan.values[value].later
    check = run.plan.check_of(value) if later is None else run.plan.later[later]
    return None if check is None or check.region_end is not None else check


def _may_run(run: GraphRun, dtype: torch.dtype | None = None) -> bool:
    """Whether a graph may run again, and its inputs fit into free memory twice.

    Weights are read in place; in another dtype, one copy exists at a time.
    """
    if Start(run, to_the_end=False).why_not():
        return False
    assert run.args is not None
    floats = {i: x for i, x in enumerate(run.args) if is_float(x)}
    weights = {v.argument for v in run.plan.values if v.role is Role.WEIGHT}
    largest = max((floats[i] for i in floats.keys() & weights), key=Tensor.numel, default=None)
    copied = [x for i, x in floats.items() if i not in weights]
    return has_room(copied if largest is None else [*copied, largest], dtype)


def leading_to(batch: Batch, flow: DataFlow, event: int) -> tuple[frozenset[int], bool]:
    """The graph runs that made the inputs of one of them, and whether nothing else did."""
    found, todo, is_all = set[int](), [event], True
    while todo:
        found.add(index := todo.pop())
        run = batch.run_of(Key(index, 0))
        assert run is not None
        for key in (*run.inputs.values(), *run.derived.values()):
            if not key.is_between_graphs and key.event not in found:
                todo.append(key.event)
            made = flow.values[flow.place[key]].role is Role.MADE
            is_all = is_all and not (key.is_between_graphs and made)
    return frozenset(found), is_all


def _replayed(
    batch: Batch,
    flow: DataFlow,
    key: Key,
    form: SecondForm,
    starts: frozenset[int],
    given: Mapping[Key, Other],
    index: Sequence[int] | None = None,
) -> Outcome | None:
    run = batch.run_of(key)
    check = None if run is None else check_in(run, key.value)
    dtype = form.dtype if isinstance(form, WideForm) else None
    runs = [batch.run_of(Key(event, 0)) for event in starts]
    if check is None or not all(each is not None and _may_run(each, dtype) for each in runs):
        return None
    look = UpTo(check, index)
    replay = Replay(batch, flow, lambda event: form, starts, given, {key.event: [look]})
    with where_theirs_may_raise():  # whatever stops it, the findings until then are valid
        replay.run()
    outcome = look.outcome
    return None if outcome is None or outcome.severity is Severity.FINITE else outcome


class UpTo(Watcher):
    """Looks at one value in both forms; in a loop, at the first bad one.

    Args:
        check: where the value is measured.
        index: the sample in each place in the other form; None if unchanged.
        in_second_form: whether the other form is the second form of the run. If not, it is the
            model's own: a second form may run beside it for another watcher.
    """

    def __init__(
        self, check: Check, index: Sequence[int] | None = None, *, in_second_form: bool = True
    ) -> None:
        self.index = index
        self.in_second_form = in_second_form
        self.check = check
        self.outcome: Outcome | None = None
        self.infinite: list[Tensor] = []  # where operands are infinite

    @property
    def last_places(self) -> Collection[Place]:
        return (self.check.place,)

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return walk.place(node) == self.check.place

    def before(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> None:
        operands = filter(is_float, trees.tree_leaves((args, kwargs)))
        found = [without_levels(x).isinf() for x in operands]
        self.infinite = [each for each in found if bool(each.any())]

    def after(self, walk: Walk, node: Node, ran: Ran) -> None:
        made = next((each for each in walk.env if each.name == self.check.node), None)
        if made is None:
            return
        low = walk.env[made]
        other = walk.others.get(made, low) if self.in_second_form else low
        for index in self.check.path:
            low, other = low[index], other[index]
        if not (is_float(low) and is_float(other)):
            return
        with own_arithmetic():
            found = outcome_of(
                without_levels(low), without_levels(other), self.infinite, self.index
            )
        if found is not None and (self.outcome is None or found.severity):
            self.outcome = found
            if found.severity:
                raise Ended


def outcome_of(
    low: Tensor,
    other: Tensor,
    infinite: Iterable[Tensor] = (),
    index: Sequence[int] | None = None,
) -> Outcome | None:
    """Compare the result of an operation with its result in another way.

    Args:
        low: the result in the model's form.
        other: the result in the other way.
        infinite: where operands are infinite, so that infinities there are inherited.
        index: the sample of dimension 0 in each place in the other way.

    Returns:
        None if it is unknown which elements it made.

    Example:
        >>> outcome_of(torch.tensor([1.0, math.inf]), torch.tensor([1.0, 7e4])).most
        70000.0
    """
    if low.shape != other.shape:
        return None
    bad = low.isnan()
    severity = Severity.NAN if bool(bad.any()) else Severity.INF
    if severity is Severity.INF:
        bad = low.isinf()
        for each in infinite:
            if each.dim() > low.dim():
                return None  # it does not work elementwise
            try:
                bad = bad & ~each.broadcast_to(low.shape)
            except RuntimeError:
                return None
    where = bad.nonzero()
    intended = ~(low.isfinite() | bad)  # a mask, or otherwise not a fault
    if index is not None:
        intended = intended[list(index)]
    is_bad = ~(other.isfinite() | intended)
    finite = other[other.isfinite()].abs()
    still = is_bad & bad
    at_bad = other.where(is_bad, 0)[bad]
    rows = bad.flatten(1).any(1).nonzero().flatten().tolist() if bad.dim() > 1 else []
    return Outcome(
        severity=severity if len(where) else Severity.FINITE,
        made=not_finite_in(low[bad]),
        bad=len(where),
        rows=tuple(rows),
        size=low.shape[0] if low.dim() > 1 else 0,
        other=not_finite_in(at_bad),
        still=int(still.sum()),
        first=not_finite_in(at_bad[:1]),
        is_finite=not bool((is_bad & ~bad).any()),
        most=float(finite.max()) if finite.numel() else 0.0,
    )


def _in_part(outcome: Outcome) -> Outcome:
    return dataclasses.replace(outcome, is_whole=False)
