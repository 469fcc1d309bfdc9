"""Runs a captured graph again, operation by operation, for watchers.

The model's form of each operation repeats what the model computed. A :class:`Watcher` sees what
each operation reads and makes. A :class:`SecondForm` is a watcher that computes the same in another
way, side by side with the model's form: in float64 throughout, or as the model would continue if
one value were different. Nothing is kept longer than an operation needs it, so that no second copy
of the weights is made.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from fxguard.forgiving import theirs
from fxguard.graph import higher_order, operations
from fxguard.graph.collectives import expect_none, waits_in
from fxguard.graph.operations import Call, read_node
from fxguard.graph.random_state import RandomState
from fxguard.graph.wide_form import NotJudged, Ran
from fxguard.measure.func_levels import levels_opened_by
from fxguard.plan.plan import Place
from fxguard.rerun._regions import Regions
from fxguard.rerun.drawn import Drawn
from fxguard.rerun.two_forms import TwoForms, joined, parts, stacked

__all__ = ["EdgeWatcher", "Ended", "SecondForm", "Walk", "Watcher", "Watchers"]


class Ended(Exception):  # noqa: N818 - a signal, not an error
    """A watcher has seen everything that it needs."""


class Watcher:
    """Looks at a second run. One object serves a graph and all its bodies.

    Attributes:
        keeps_values: whether all values have to live as long as the run.
        whole_functions: whether a user's function with its own backward runs as one operation.
    """

    keeps_values = False
    whole_functions = False

    @property
    def last_places(self) -> Collection[Place] | None:
        """Where it looks, if it has seen enough after that; None if it may see the whole run."""
        return None

    def begins(self, walk: Walk) -> None:
        """Called when a graph or a body begins to run."""

    def enters(self, walk: Walk, node: Node) -> bool:
        """Whether a higher-order operation is to run as its bodies, which are watched too."""
        kind = higher_order.kind_of(node)
        return kind is not None and not (self.whole_functions and kind.has_own_backward)

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        """Whether to look at an operation.

        Args:
            walk: the graph that runs.
            node: the node that is about to run.
            differs: whether one of its operands differs in the second form.
        """
        return False

    def before(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> None:
        """Called before a wanted operation runs with these arguments in the model's form."""

    def after(self, walk: Walk, node: Node, ran: Ran) -> None:
        """Called after a wanted operation has run, in the second form too."""

    def passed(self, walk: Walk, node: Node) -> None:
        """Called after each node, wanted or not; inputs, attributes and bodies count."""


class SecondForm(Watcher, abc.ABC):
    """Defines the second form of a graph. A run has at most one."""

    @abc.abstractmethod
    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        """Whether an operation has a second form, see :meth:`Watcher.wants`."""

    @abc.abstractmethod
    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        """The second form of an operation that has run.

        Args:
            walk: the graph that runs.
            node: the operation.
            ran: the operation in the model's form.
            args: its arguments in the second form; the same objects if nothing differs.
            kwargs: likewise.

        Returns:
            Its result; ``ran.result`` itself, or items of it, if they are the same.
        """

    @abc.abstractmethod
    def copy_of(self, memory: Tensor) -> Tensor:
        """The contents of a piece of memory, copied for the second form, in one dimension."""


class EdgeWatcher(Watcher, abc.ABC):
    """Runs the operations itself, to hook edges for the backward. A run has at most one."""

    whole_functions = True

    @abc.abstractmethod
    def run(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> Any:
        """Run an operation in the model's form, see :meth:`Walk.run_alone`."""


class Watchers:
    """Whoever still watches a run.

    Args:
        watchers: all of them, with at most one second form and one that runs the operations.
        apart: whether one that raises, :class:`Ended` or anything else, only sees no more of the
            run, which ends with the last one; otherwise it ends the run for all.

    Attributes:
        watching: all of them.
        form: the second form among them.
        edges: the one that runs the operations.
        stopped: why some see no more, where that is known.
    """

    def __init__(self, watchers: Sequence[Watcher], *, apart: bool = False) -> None:
        self.apart = apart
        self.watching = list(watchers)
        self.form = next((each for each in watchers if isinstance(each, SecondForm)), None)
        self.edges = next((each for each in watchers if isinstance(each, EdgeWatcher)), None)
        self.stopped: dict[Watcher, str] = {}

    @contextlib.contextmanager
    def go_on_without(self, watcher: Watcher) -> Iterator[None]:
        """A block whose exceptions come from one watcher."""
        try:
            yield
        except theirs() as error:  # no kernel for what it computes
            self.stop([watcher], error)
            if not (self.apart and self.watching):
                raise
            self.form = None if watcher is self.form else self.form

    def stop(self, watchers: Sequence[Watcher], error: Exception) -> None:
        """Note what has ended the run for some watchers; its tensors are not kept alive."""
        if isinstance(error, NotJudged):
            self.stopped |= dict.fromkeys(watchers, str(error))
        self.watching = [each for each in self.watching if each not in watchers]

    def keep_values(self) -> bool:
        """Whether a value that nobody reads any more has to live on."""
        return any(each.keeps_values for each in self.watching)


class Walk(TwoForms):
    """Runs a graph and its bodies for watchers.

    Args:
        module: the graph.
        watchers: whoever looks at it.
        inside: the bodies around it, see :class:`~fxguard.plan.plan.Check`.
        drawn: what its random operations give; None if they draw.

    Attributes:
        node: the running node.
        body: the body that runs, or that raised.
        repeats: whether it is in a loop.
        loop: the innermost loop around it.
        iteration: of that loop.
        carried: how many values the loop passes on, if this is its body.
        levels: open torch.func regions.
    """

    def __init__(
        self,
        module: GraphModule,
        watchers: Watchers,
        inside: tuple[tuple[str, int], ...] = (),
        drawn: Drawn | None = None,
    ) -> None:
        super().__init__(module)
        self.drawn = drawn
        self.watchers = watchers
        self.inside = inside
        self.calls: dict[Node, Call] = {}
        self.regions = Regions()
        self.levels = 0
        self.node: Node | None = None
        self.body: Walk | None = None
        self.repeats = False
        self.loop, self.iteration, self.carried = "", 0, 0

    @property
    def form(self) -> SecondForm | None:
        """What defines the second form; None if there is none, or it has ended."""
        return self.watchers.form

    @property
    def innermost(self) -> Walk:
        """The innermost body that runs, or that raised; the graph itself if none does."""
        return self if self.body is None else self.body.innermost

    def place(self, node: Node) -> Place:
        """The place of a node."""
        return self.inside, node.name

    def call_of(self, node: Node) -> Call:
        """The call of a node, with nodes as operands."""
        if node not in self.calls:
            self.calls[node] = read_node(node, self.module)  # type: ignore[arg-type]
        return self.calls[node]

    def run_both(self, args: Sequence[Any], others: Sequence[Any] | None = None) -> tuple[Any, Any]:
        """Run the graph.

        Args:
            args: arguments of the graph in the model's form, which the graph may write.
            others: arguments in the second form; the same objects if nothing differs.

        Returns:
            Its results in the model's form and in the second form.

        Raises:
            NotJudged: when something has no second form, or a collective is reached, which is never
                issued again.
        """
        others = args if others is None else others
        given = iter(zip(args, others, strict=True))
        keeps = self.watchers.keep_values()
        try:
            self.tell("begins", self.watchers.watching)
            for node in self.module.graph.nodes:  # type: ignore[union-attr]
                if node.op == "placeholder":
                    low, other = next(given)
                    self.keep(node, low, other)
                elif node.op == "output":
                    return (
                        self.map_nodes_to_values(node.args[0], node),
                        self.other_of(node.args[0], node),
                    )
                else:
                    self.step(node)
                self.tell("passed", self.watchers.watching, node)
                for unused in () if keeps else self.user_to_last_uses.get(node, ()):
                    self.env.pop(unused, None)
                    self.others.pop(unused, None)
        finally:
            self.regions.leave()
        raise AssertionError("a graph without an output")

    def value_of(self, name: str) -> Any:
        """The result of the node with this name in the model's form; None if nobody needs it."""
        return next((value for node, value in self.env.items() if node.name == name), None)

    def tell(self, hook: str, watchers: Sequence[Watcher], *about: Any) -> None:
        """Call a method of some watchers."""
        for watcher in tuple(watchers):
            if watcher in self.watchers.watching:
                with self.watchers.go_on_without(watcher):
                    getattr(watcher, hook)(self, *about)

    def step(self, node: Node) -> None:
        """Run one node in both forms."""
        self.node = node
        if self.form is None:
            self.others.clear()
        if node.op == "get_attr":
            self.keep(node, *[self.run_node(node)] * 2)
            return
        kind = self.kind_of(node)
        expect_none(node, self.module, enters=kind is not None)  # type: ignore[arg-type]
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if kind is not None and not kind.only_a_second_run_sees:
            others = self.other_of(node.args, node)
            self.keep(node, *parts(self.run_bodies(node, kind, joined(args, others), kwargs)))
            return
        wanting = self.wanting(node)
        call = self.call_of(node)
        form = self.form if self.form in wanting else None
        if form is not None and call.written:
            with self.watchers.go_on_without(form):
                self.materialize(call.written, form.copy_of)
        before = RandomState.now((args, kwargs)) if wanting and call.random else None
        self.tell("before", wanting, node, args, kwargs)
        if kind is None:
            low = self.run_model(node, args, kwargs)
        else:
            low = parts(self.run_bodies(node, kind, args, kwargs))[0]
        self.keep(node, low, low)
        if not wanting:
            return
        if before is not None and not self.knows_drawn(node):
            before = None if before.is_same(RandomState.now((args, kwargs))) else before
        ran = self.ran(node, args, kwargs, low, before)
        if form is not None and form is self.form:
            self.follow(form, node, ran)
        self.tell("after", wanting, node, ran)

    def wanting(self, node: Node) -> list[Watcher]:
        """The watchers that want to look at an operation."""
        differs = any(read in self.others for read in node.all_input_nodes) or any(
            self.is_moved(self.env[operand]) for operand in self.call_of(node).written
        )
        return [each for each in self.watchers.watching if each.wants(self, node, differs)]

    def follow(self, form: SecondForm, node: Node, ran: Ran) -> None:
        """Run an operation in the second form."""
        with self.watchers.go_on_without(form):
            others = self.other_of(node.args, node)
            named = self.other_of(node.kwargs, node)
            self.keep(node, ran.result, form.follow(self, node, ran, others, named))

    def kind_of(self, node: Node) -> higher_order.HigherOrder | None:
        """How to enter a node; None if it runs as one operation."""
        kind = higher_order.kind_of(node)
        if kind is None:
            return None
        decides = [each for each in (self.form, self.watchers.edges) if each is not None]
        enters = any(each.enters(self, node) for each in decides or self.watchers.watching)
        if not enters or _bodies(node, kind, self.module):
            return kind if enters else None
        if self.form is not None:
            with self.watchers.go_on_without(self.form):
                raise NotJudged(f"inside {self.call_of(node).kind}")
        return None

    def ran(
        self, node: Node, args: Any, kwargs: Any, low: Any, before: RandomState | None = None
    ) -> Ran:
        """A node that has run, as an operation that can run again."""

        def run(*given: Any, **named: Any) -> Any:
            return self.run_alone(node, given, named, is_the_models=False)

        return Ran(self.call_of(node), node.target, run, args, kwargs, low, before)

    def run_model(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Run an operation in the model's form."""
        self.levels += levels_opened_by(node.target)
        edges = self.watchers.edges
        run = self.run_alone if edges is None else functools.partial(edges.run, self)
        with self.drawing_nothing_else(node, (args, kwargs)):
            result = run(node, args, kwargs)
        self.regions.passed(node.target, result)
        return result

    def run_alone(self, node: Node, args: Any, kwargs: Any, *, is_the_models: bool = True) -> Any:
        """Compute an operation on given arguments, and nothing else.

        Args:
            node: the operation.
            args: its arguments.
            kwargs: likewise.
            is_the_models: whether these are the arguments of the model's form.
        """
        if self.drawn is not None and self.knows_drawn(node):
            again = functools.partial(self.computed, node, args, kwargs) if is_the_models else None
            return self.drawn.again(self.place(node), self.call_of(node), args, kwargs, again)
        return self.computed(node, args, kwargs)

    def computed(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Compute an operation, which may draw random numbers."""
        return getattr(self, node.op)(node.target, args, kwargs)

    def knows_drawn(self, node: Node) -> bool:
        """Whether it is known what a node drew in the first run."""
        return self.drawn is not None and self.drawn.knows(self.place(node))

    def drawing_nothing_else(
        self, node: Node, given: Any
    ) -> contextlib.AbstractContextManager[None]:
        """A block in which a node runs, and draws nothing but what is known."""
        if self.drawn is None or self.knows_drawn(node):
            return contextlib.nullcontext()
        may_draw = self.call_of(node).random or higher_order.is_higher_order(node)
        return self.drawn.nothing_else(given) if may_draw else contextlib.nullcontext()

    def run_bodies(self, node: Node, kind: higher_order.HigherOrder, args: Any, kwargs: Any) -> Any:
        """Run a higher-order operation, with its bodies in two forms as well."""
        entered = _bodies(node, kind, self.module)
        iterations: Counter[int] = Counter()  # of each body, by position

        def body(position: int, *operands: Any) -> Any:
            module: Any = args[position]
            low, other = parts(operands)
            if position not in entered:
                if reason := waits_in(module):
                    raise NotJudged(reason)
                return module(*low)
            inside = (*self.inside, (node.name, position))
            self.body = Walk(module, self.watchers, inside, self.drawn)
            self.body.repeats = self.repeats or kind.runs_many_times
            self.body.loop, self.body.iteration = self.loop, self.iteration
            if kind.runs_many_times:
                self.body.loop = operations.name_of(node.target).removesuffix("_impl")
                self.body.iteration = iterations[position]
                self.body.carried = entered[position].carried
                iterations[position] += 1
            made = self.body.run_both(low, other)
            self.body = None
            return made[0] if kind.only_a_second_run_sees else joined(*made)

        return kind.run(args, kwargs, higher_order.RunBody(body, stacked))


def _bodies(
    node: Node, kind: higher_order.HigherOrder, module: Any
) -> dict[int, higher_order.Body]:
    """The bodies of a higher-order operation to enter, by position among its arguments."""
    try:
        return {body.position: body for body in kind.bodies(node, module)}
    except (LookupError, TypeError, ValueError):  # arguments of another version
        return {}
