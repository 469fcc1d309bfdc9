"""The start of a second run: the gate that each one passes, and the state that it begins with.

A second run is made on one rank, because of what this rank has seen. If it issued a collective, it
would wait for ranks that make no such run, or take their numbers for its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxguard.batch.events import GraphRun
from fxguard.batch.kept_run import versions_of
from fxguard.forgiving import theirs
from fxguard.graph.collectives import is_of_ranks, none_issued, of_ranks, waits_in
from fxguard.graph.overwritten_inputs import written_inputs
from fxguard.graph.random_state import random_state_kept
from fxguard.graph.torch_settings import settings_now
from fxguard.graph.wide_form import NotJudged
from fxguard.measure import traceable
from fxguard.measure.at_hand import has_memory, own_arithmetic, range_of
from fxguard.measure.func_levels import levels_restored
from fxguard.passes.draws import draws_from
from fxguard.passes.unmark import without_marks
from fxguard.records import Range, Role
from fxguard.rerun.differences import TOLERANCE
from fxguard.rerun.drawn import Drawn, drawn_in
from fxguard.rerun.walk import Walk, Watcher, Watchers

__all__ = ["GONE", "Start", "copies_of", "look_through", "with_aliases", "written_since"]

GONE = "an input of its graph is gone"
FREED = "an input of its graph has been freed"
CHANGED = "an input of its graph was written since"

TINY = 1e-37  # kernels may take smaller numbers of float32 for 0


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a second run of a graph: nothing else runs a graph again.

    Attributes:
        run: the first run, still open.
        to_the_end: whether the whole graph has to run. A look at its beginning ends where the
            first operation would wait for other ranks.
        draws_itself: whether the random operations of a compiled graph may draw other numbers than
            they drew in the first run.
    """

    run: GraphRun
    to_the_end: bool = True
    draws_itself: bool = False

    def why_not(self) -> str:
        """Why no second run may begin; "" if one may.

        Example:
            >>> Start(run).why_not()
            'all_reduce is a collective, and no second run issues one'
        """
        run = self.run
        if run.not_again:
            return run.not_again
        if run.args is None:
            return GONE
        for argument in run.args:
            if is_of_ranks(argument):
                return of_ranks(argument)
        if not all(has_memory(x) for x in run.args if isinstance(x, Tensor)):
            return FREED
        if written_since(run):
            return CHANGED
        return waits_in(run.graph_module) if self.to_the_end else ""

    def copies(self) -> list[Any]:
        """The graph's inputs, with copies of everything that it may write.

        Raises:
            NotJudged: when no second run may begin.
        """
        if reason := self.why_not():
            raise NotJudged(reason)
        return copies_of(self.run)

    @contextlib.contextmanager
    def begun(self, watchers: Watchers | None = None) -> Iterator[list[Any]]:
        """The graph's inputs, in a block with the random state and the settings of the first run.

        Everything that the graph may write is a copy. The block has no visible side effects.

        Args:
            watchers: those of :meth:`walk`, if they may end it early.

        Raises:
            NotJudged: when no second run may begin, and in place of a collective.
        """
        run = self.run
        asks = run.draws is not None and not self.draws_itself and self._will_draw(watchers)
        if asks and run.draws is not None and not self.why_not():
            drawn_in(run, run.draws, Start(run, draws_itself=True).begun)
        copies = self.copies()
        assert run.args is not None
        with random_state_kept(run.args), own_arithmetic(), levels_restored():
            if run.random_state is not None:
                run.random_state.restore()
            restore = settings_now()
            try:
                with self.alone():
                    yield copies
            finally:
                restore()

    def again(
        self, *watchers: Watcher, others: Callable[[list[Any]], Sequence[Any]] | None = None
    ) -> tuple[Any, Any]:
        """Run the graph again, with its original inputs and random numbers.

        Args:
            watchers: whoever looks at the run; at most one of them is a second form.
            others: makes the arguments of the second form from those of the model's form; None if
                nothing differs.

        Returns:
            What the graph returns in both forms.

        Raises:
            NotJudged: when that is not possible.
            Exception: whatever the operations or the watchers raise.
        """
        with self.begun(Watchers(watchers)) as given:
            return self.walk(given, *watchers, others=None if others is None else others(given))

    def walk(
        self, given: Sequence[Any], *watchers: Watcher, others: Sequence[Any] | None = None
    ) -> tuple[Any, Any]:
        """The same in a block of :meth:`begun` or :meth:`alone`, on its inputs.

        Args:
            given: the arguments of the model's form, which the graph may write.
            watchers: see :meth:`again`.
            others: the arguments of the second form; None if nothing differs.
        """
        return self.walk_of(Watchers(watchers)).run_both(given, others)

    def walk_of(self, watchers: Watchers) -> Walk:
        """A walk through the graph in such a block."""
        run, drawn = self.run, None
        if run.draws is not None and not self.draws_itself:
            drawn = Drawn({} if run.draws.found is None else run.draws.found)
        return Walk(without_marks(run.graph_module), watchers, drawn=drawn)

    def _will_draw(self, watchers: Watchers | None) -> bool:
        """Whether a walk reaches an operation that may draw random numbers."""
        graph_module = self.run.graph_module
        first = draws_from(graph_module)
        if first is None or watchers is None:
            return first is not None
        order = {node.name: i for i, node in enumerate(graph_module.graph.nodes)}
        ends = [
            max((order[inside[0][0] if inside else name] for inside, name in places), default=0)
            for each in watchers.watching
            if (places := each.last_places) is not None
        ]
        if watchers.apart:  # it ends with the last of them
            return len(ends) < len(watchers.watching) or max(ends, default=0) >= order[first]
        return min(ends, default=len(order)) >= order[first]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A block that issues no collective, as :meth:`begun` does; for a backward after it.

        Raises:
            NotJudged: in place of a collective.
        """
        with none_issued(self.run.graph_module, self.run.args or ()):
            yield


def with_aliases(args: Sequence[Any], copies: Sequence[Any]) -> tuple[list[Tensor], list[Any]]:
    """Leaves of autograd in the place of a graph's arguments that require a gradient.

    Args:
        args: the arguments.
        copies: what a second run is given.

    Returns:
        The leaves, and what the run is given now.
    """
    aliases, given = list[Tensor](), list[Any]()
    for argument, copy in zip(args, copies, strict=True):
        if not (isinstance(argument, Tensor) and argument.requires_grad):
            given.append(copy)
            continue
        alias = copy.detach().requires_grad_()
        aliases.append(alias)
        # Copies may be written, which leaves may not be.
        given.append(alias if copy is argument else alias.clone())
    return aliases, given


def look_through(run: GraphRun, *watchers: Watcher) -> dict[Watcher, str]:
    """Run a graph again to let some watchers look at it, each as far as possible.

    Whatever stops one of them, or the second run, the findings until then are valid.

    Returns:
        Why it did not begin, or had to end, for each watcher for which that is known.
    """
    start, watching = Start(run, to_the_end=False), Watchers(watchers, apart=True)
    try:
        with start.begun(watching) as given:
            start.walk_of(watching).run_both(given)
    except theirs() as error:  # no memory, or an operation that does not run twice
        watching.stop(watching.watching, error)
    return watching.stopped


def written_since(run: GraphRun) -> frozenset[int]:
    """Positions of the inputs of a graph that somebody else has written since it ran.

    Not every write counts a version: other ranks, numpy and foreign kernels write memory. So an
    input has to have the range, too, that the first run has measured.
    """
    if run.args is None or run.versions is None:
        return frozenset()
    own = {position for position, _ in run.plan.written}  # a second run writes the same again
    pairs = enumerate(zip(run.versions, versions_of(run.args), strict=True))
    found = {i for i, (one, two) in pairs if one != two}
    first = run.statistics if run.postponed is None else ()
    for position, value in (*run.plan.inputs, *run.plan.buffers):
        slot = run.plan.values[value].slot
        if slot is not None and slot < len(first) and position not in own:
            low, high = first[slot].tolist()
            if not _is_still(run.args[position], low, high):
                found.add(position)
    return frozenset(found - own)


def _is_still(tensor: Tensor, low: float, high: float) -> bool:
    """Whether a tensor has this range; also if its range cannot be told."""
    with own_arithmetic():
        before, now = traceable.decode(low, high), range_of(tensor)
    if not isinstance(before, Range) or not isinstance(now, Range):
        return True
    if before.severity or now.severity:
        return before.severity == now.severity
    pairs = ((before.abs_min, now.abs_min), (before.abs_max, now.abs_max))
    return all(math.isclose(one, two, rel_tol=TOLERANCE, abs_tol=TINY) for one, two in pairs)


def copies_of(run: GraphRun) -> list[Any]:
    """The arguments of a run, with copies of everything that it may write."""
    assert run.args is not None
    writable, may_write_more = written_inputs(run.graph_module)
    if may_write_more:  # except weights, for which unseen writes are unknown
        others = (v.argument for v in run.plan.values if v.role in (Role.INPUT, Role.BUFFER))
        writable |= {argument for argument in others if argument is not None}
    return [
        a.detach().clone() if i in writable and isinstance(a, Tensor) else a
        for i, a in enumerate(run.args)
    ]
