"""Run a captured graph again, node by node, to look at what only the graph has seen."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from fxguard.batch.events import GraphRun
from fxguard.errors import FxguardError
from fxguard.graph import higher_order, nodes
from fxguard.graph.in_float64 import needed_by, reads_masked_row
from fxguard.graph.operations import read_node
from fxguard.graph.random_state import random_state_kept
from fxguard.graph.source_lines import source_of_trace
from fxguard.graph.torch_settings import settings_now
from fxguard.measure import traceable
from fxguard.measure.at_hand import has_memory, own_arithmetic
from fxguard.measure.details import Detail, describe
from fxguard.measure.func_levels import levels_restored, without_levels
from fxguard.plan.plan import Check, FramePlan, RowPlan
from fxguard.records import Range, Role

__all__ = [
    "agree",
    "as_before",
    "copies_of",
    "detail_of",
    "numbers_inside",
    "run_until_it_raises",
]


# How far the largest magnitudes of the two runs may be apart: compilers keep more digits between
# fused operations. Other random numbers differ by more.
TOLERANCE = 0.02

# A second run may end inside a region that a node has opened: what closes it.
CLOSES = {
    torch.amp.autocast_mode._enter_autocast: torch.amp.autocast_mode._exit_autocast,
    torch.autograd.grad_mode._enter_inference_mode: torch.autograd.grad_mode._exit_inference_mode,
}

# Given the check's number, what is measured, and whether a loop may measure it many times.
Visit = Callable[[int, Any, bool], None]


class Replay(Interpreter):
    """Runs a graph and the bodies of its higher-order operations, and shows what is measured.

    Args:
        module: the graph.
        checks: those of this graph and of its bodies, with their numbers.
        visit: called for each when its value is there.
        inside: the higher-order operations around this graph, as in :class:`Check`.
        repeats: whether one of them is a loop.
        before: called before an operation that a check follows, with the check's number, the
            operation's node, and its arguments.
    """

    def __init__(
        self,
        module: GraphModule,
        checks: Sequence[tuple[int, Check]],
        visit: Visit,
        inside: tuple[tuple[str, int], ...] = (),
        repeats: bool = False,
        before: Callable[[int, Check, Node, Any, Any], None] | None = None,
    ) -> None:
        super().__init__(module)
        self.before = before
        self.visit = visit
        self.inside = inside
        self.repeats = repeats
        self.by_name = {node.name: node for node in module.graph.nodes}
        self.after: dict[str, list[tuple[int, Check]]] = {}
        self.bodies: dict[tuple[str, int], list[tuple[int, Check]]] = {}
        for slot, check in checks:
            if len(check.inside) > len(inside):
                self.bodies.setdefault(check.inside[len(inside)], []).append((slot, check))
            else:
                self.after.setdefault(check.after, []).append((slot, check))
        self.pending: dict[str, list[tuple[int, Any]]] = {}  # until their torch.func region ends
        self.open: list[tuple[Any, Any]] = []  # what closes a region, and its argument
        self.node: Node | None = None  # that is running
        self.last_body: Replay | None = None  # a body that has not returned

    @property
    def last(self) -> Replay:
        """The innermost graph that has not returned."""
        return self if self.last_body is None else self.last_body.last

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, and leave every region that it entered, also where it raises."""
        try:
            return super().run(*args, **kwargs)
        finally:
            while self.open:
                close, argument = self.open.pop()
                close(argument)

    def run_node(self, n: Node) -> Any:
        self.node = n
        if self.before is not None and n.op in ("call_function", "call_method"):
            for slot, check in self.after.get(n.name, ()):
                self.before(slot, check, n, *self.fetch_args_kwargs_from_env(n))
        result = super().run_node(n)
        if n.op == "call_function" and n.target in CLOSES:
            self.open.append((CLOSES[n.target], result))
        elif n.op == "call_function" and self.open and n.target is self.open[-1][0]:
            self.open.pop()
        for slot, check in self.after.get(n.name, ()):
            value = result if check.node == n.name else self.env.get(self.by_name[check.node])
            if value is None:
                continue  # freed already: nobody reads it any more
            for index in check.path:
                value = value[index]
            if check.region_end is not None:
                self.pending.setdefault(check.region_end, []).append((slot, _bare(value)))
            else:
                self.visit(slot, _bare(value), self.repeats)
        for slot, value in self.pending.pop(n.name, ()):
            self.visit(slot, value, self.repeats)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node = self.node
        assert node is not None
        kind = higher_order.kind_of(node)
        if kind is None or not any(name == node.name for name, _ in self.bodies):
            return super().call_function(target, args, kwargs)
        repeats = self.repeats or kind.merges == "loop"

        def body(position: int, *operands: Any) -> Any:
            module: Any = args[position]
            place = (node.name, position)
            checks = self.bodies.get(place, [])
            inside = (*self.inside, place)
            self.last_body = Replay(module, checks, self.visit, inside, repeats, self.before)
            result = self.last_body.run(*operands)
            self.last_body = None
            return result

        return kind.run(args, kwargs, body)


def _bare(value: Any) -> Any:
    return without_levels(value) if isinstance(value, Tensor) else value


class _Ended(Exception):  # noqa: N818 - a signal, not an error
    def __init__(self, detail: Detail | None) -> None:
        self.detail = detail


def detail_of(run: GraphRun, value: int) -> Detail | None:
    """What a value of a graph held that is not finite.

    The numbers on the way to it are compared with those of the first run.

    Returns:
        None where the second run did not give the numbers of the first: under a compiler whose
        random numbers differ from eager ones, or after an input was overwritten. Likewise where
        another second run has failed to already: what a third one holds is another tensor.
    """
    wanted, later = run.plan.values[value].slot, run.plan.values[value].later
    if run.args is None or not run.repeated or (wanted is None and later is None):
        return None
    expected = run.statistics.tolist()
    # Not those of integers, nor what came in: a cache that the graph wrote is another one now.
    compared = {v.slot for v in run.plan.values if v.can_be_bad and v.role is Role.MADE}

    def visit(slot: int, value: Any, repeats: bool) -> None:
        if slot == wanted:
            detail = describe(value)
            same = slot < 0 or _severity(detail) == _severity_of(expected[slot])
            if same or not repeats:
                raise _Ended(detail if same else None)
        elif (
            slot in compared
            and not repeats
            and not agree(float(traceable.abs_min_max(value)[1]), expected[slot][1])
        ):
            raise _Ended(None)

    closer: dict[str, Any] = {}

    def before(slot: int, check: Check, node: Node, args: Any, kwargs: Any) -> None:
        if slot == wanted:
            closer["needed"] = needed_by(node.target, args, kwargs, check.path)
            closer["masked_row"] = reads_masked_row(args, kwargs)

    checks = list(enumerate(run.plan.checks))
    if later is not None:  # only a second run sees it: it is compared with nothing
        wanted, checks = -1, [(-1, run.plan.later[later])]
    try:
        with as_before(run):
            Replay(run.graph_module, checks, visit, before=before).run(*copies_of(run))
    except _Ended as ended:
        return None if ended.detail is None else replace(ended.detail, **closer)
    except Exception:  # whatever stops the second run, the report goes out without counts
        return None
    return None


def run_until_it_raises(run: GraphRun) -> GraphRun:
    """The statistics of a graph that raised, as far as it got, and what it stopped at."""
    checks = run.plan.checks
    statistics = torch.full((len(checks), 2), traceable.NOT_RUN, dtype=torch.float64)

    def visit(slot: int, value: Any, repeats: bool) -> None:
        if not (
            repeats and bool(torch.isnan(statistics[slot, 1]) | torch.isinf(statistics[slot, 1]))
        ):
            statistics[slot] = torch.tensor([float(x) for x in traceable.abs_min_max(value)])

    replay = Replay(run.graph_module, list(enumerate(checks)), visit)
    try:
        with as_before(run):
            replay.run(*copies_of(run))
    except Exception:  # as the first run did; what it stopped at is the question
        run = replace(run, stopped_at=tuple(_read_by(replay, run)[0]))
        run = replace(run, raised=_frame_of(replay.last, run))
    return replace(run, statistics=statistics)


def _frame_of(replay: Replay, run: GraphRun) -> FramePlan | None:
    """The frame of the operation that raised: what it had read."""
    node, plan = replay.node, run.plan
    if node is None:
        return None
    rows = []
    for index, value in enumerate(run.stopped_at):
        known = plan.values[value]
        is_weight = known.role is Role.WEIGHT
        label = known.name.rpartition(".")[2] if is_weight else f"input[{index}]"
        rows.append(RowPlan(label, value))
    stack = list(nodes.stack_of(node).items())
    return FramePlan(
        name=nodes.path_of(*stack[-1], {}) if stack else run.names[0],
        kind=read_node(node, replay.module).kind,  # type: ignore[arg-type]
        is_op=True,
        rows=(*rows, RowPlan("output", note="raised")),
        source=source_of_trace(node.meta.get("stack_trace")),
    )


def _read_by(replay: Replay, run: GraphRun) -> tuple[list[int], bool]:
    """Values that the operation which raised had read, also through integers made of them.

    Returns:
        The values, and whether the operation had read something else that came from outside.
    """
    found: list[int] = []
    from_outside = True
    if replay.last_body is not None:
        found, from_outside = _read_by(replay.last_body, run)
    holders = _holders(replay, run)
    todo = list(replay.node.all_input_nodes) if replay.node is not None and from_outside else []
    seen: set[Node] = set()
    from_outside = False
    while todo:
        node = todo.pop(0)
        if node in seen:
            continue
        seen.add(node)
        found += holders.get(node.name, ())
        if node.name not in holders:
            todo += node.all_input_nodes
            from_outside |= node.op == "placeholder"
    return list(dict.fromkeys(found)), from_outside


def _holders(replay: Replay, run: GraphRun) -> dict[str, list[int]]:
    """The results of a graph, or of a body, to the values that they hold."""
    graph: Graph = replay.module.graph  # type: ignore[assignment]
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    attributes = {str(node.target): node.name for node in graph.nodes if node.op == "get_attr"}
    holders: dict[str, list[int]] = {}
    for index, value in enumerate(run.plan.values):
        name: str | None = None
        if value.slot is not None:
            check = run.plan.checks[value.slot]
            name = check.node if check.inside == replay.inside else None
        elif value.argument is not None:
            name = None if replay.inside else inputs[value.argument]
        elif value.role.is_given:
            name = attributes.get(value.name)
        if name is not None and value.can_be_bad:
            holders.setdefault(name, []).append(index)
    return holders


def numbers_inside(run: GraphRun) -> dict[int, Range | str]:
    """The ranges of values that only a second run can see, where the first one turned bad.

    Returns:
        Value of the plan to its range; empty where all is well or the second run is not possible.
    """
    values = {value.later: i for i, value in enumerate(run.plan.values) if value.later is not None}
    if run.args is None or bool(torch.isfinite(run.statistics).all()):
        return {}
    found: dict[int, Range | str] = {}

    def visit(later: int, value: Any, repeats: bool) -> None:
        low, high = traceable.abs_min_max(value)
        found[values[later]] = traceable.decode(float(low), float(high))

    try:
        with as_before(run):
            checks = list(enumerate(run.plan.later))
            Replay(run.graph_module, checks, visit).run(*copies_of(run))
    except Exception:  # the operation around them is blamed then
        return {}
    return found


@contextlib.contextmanager
def as_before(run: GraphRun) -> Iterator[None]:
    """The random state that the run began with, and nothing that anybody else could notice."""
    assert run.args is not None
    with (
        random_state_kept(run.args),
        own_arithmetic(),
        levels_restored(),
    ):
        if run.random_state is not None:
            run.random_state.restore()
        restore = settings_now()
        try:
            yield
        finally:
            restore()


def agree(one: float, other: float) -> bool:
    """Whether the largest magnitudes of two runs are those of one and the same computation."""
    if math.isfinite(one) and math.isfinite(other):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-30)
    return str(one) == str(other)


def _severity(detail: Detail) -> int:
    return 2 if detail.nan_count else int(detail.posinf_count + detail.neginf_count > 0)


def _severity_of(pair: list[float]) -> int:
    number = traceable.decode(*pair)
    return 0 if isinstance(number, str) else number.severity


def copies_of(run: GraphRun) -> list[Any]:
    """The graph's inputs, with everything that it may write copied."""
    assert run.args is not None
    if not all(has_memory(a) for a in run.args if isinstance(a, Tensor)):
        raise FxguardError("an input of the graph has been freed")
    writable = {
        value.argument for value in run.plan.values if value.role in (Role.INPUT, Role.BUFFER)
    }
    return [
        a.detach().clone() if i in writable and isinstance(a, Tensor) else a
        for i, a in enumerate(run.args)
    ]
