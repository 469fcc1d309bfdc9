"""Runs a captured graph again, with two forms of each operation side by side.

The first form is the model's and repeats what the model computed. The second form is another way to
compute the same, defined by a :class:`SecondForm`: in float64 throughout, or as the model would
continue if one value were different. Nothing is kept longer than an operation needs it, so that no
second copy of the weights is made.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fxguard.batch.events import GraphRun
from fxguard.graph import higher_order
from fxguard.graph.collectives import expect_none, waits_in
from fxguard.graph.nodes import memory_of
from fxguard.graph.operations import Call, read_node
from fxguard.graph.random_state import RandomState
from fxguard.graph.wide_form import NotJudged, Ran, is_float
from fxguard.passes.unmark import without_marks
from fxguard.plan.plan import Place
from fxguard.rerun._regions import Regions
from fxguard.rerun.start import Start
from fxguard.rerun.two_forms import joined, parts, same_leaves, stacked

__all__ = ["Ended", "Lockstep", "SecondForm", "again", "look_through"]


class SecondForm(abc.ABC):
    """Defines the second form of a graph. One object serves a graph and all its bodies."""

    @abc.abstractmethod
    def wants(self, step: Lockstep, node: Node, differs: bool) -> bool:
        """Whether an operation has a second form.

        Args:
            step: the graph that runs.
            node: the node that is about to run.
            differs: whether one of its operands differs in the second form.
        """

    @abc.abstractmethod
    def follow(self, step: Lockstep, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        """The second form of an operation that has run.

        Args:
            step: the graph that runs.
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

    def before(  # noqa: B027 - nothing, unless a form looks at it
        self, step: Lockstep, node: Node, args: Any, kwargs: Any
    ) -> None:
        """Called before an operation runs with these arguments in the model's form."""

    def after(  # noqa: B027 - likewise
        self, step: Lockstep, node: Node, args: Any, kwargs: Any
    ) -> None:
        """Called after it has run; ``args`` are those of its second form, after its writes."""


class Lockstep(Interpreter):
    """Runs a graph and its bodies in two forms.

    Args:
        module: the graph.
        second: defines the second form.
        inside: the bodies around it, see :class:`~fxguard.plan.plan.Check`.

    Attributes:
        env: results of nodes that are still needed, in the model's form.
        others: those that differ, in the second form.
    """

    def __init__(
        self,
        module: GraphModule,
        second: SecondForm,
        inside: tuple[tuple[str, int], ...] = (),
    ) -> None:
        super().__init__(module)
        self.second = second
        self.inside = inside
        self.others: dict[Node, Any] = {}
        self.calls: dict[Node, Call] = {}
        self.regions = Regions()
        self.node: Node | None = None

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
        try:
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
                for unused in self.user_to_last_uses.get(node, ()):
                    self.env.pop(unused, None)
                    self.others.pop(unused, None)
        finally:
            self.regions.leave()
        raise AssertionError("a graph without an output")

    def keep(self, node: Node, low: Any, other: Any) -> None:
        """Note the two forms of a node's result."""
        self.env[node] = low
        if other is low or same_leaves(low, other):
            self.others.pop(node, None)
        else:
            self.others[node] = other

    def other_of(self, argument: Any, node: Node) -> Any:
        """An argument of a node in the second form."""
        return torch.fx.node.map_arg(argument, lambda read: self.others.get(read, self.env[read]))

    def step(self, node: Node) -> None:
        """Run one node in both forms."""
        self.node = node
        if node.op == "get_attr":
            self.keep(node, *[self.run_node(node)] * 2)
            return
        kind = self.kind_of(node)
        expect_none(node, self.module, enters=kind is not None)  # type: ignore[arg-type]
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        differs = any(read in self.others for read in node.all_input_nodes)
        if kind is not None and not kind.only_a_second_run_sees:
            others = self.other_of(node.args, node)
            self.keep(node, *parts(self.run_bodies(node, kind, joined(args, others), kwargs)))
            return
        call = self.call_of(node)
        differs = differs or any(self.is_moved(self.env[operand]) for operand in call.written)
        wants = self.second.wants(self, node, differs)
        if wants and call.written:
            self.materialize(call.written)
        before = RandomState.now((args, kwargs)) if wants and call.random else None
        self.second.before(self, node, args, kwargs)
        if kind is None:
            low = self.run_plain(node, args, kwargs)
        else:
            low = parts(self.run_bodies(node, kind, args, kwargs))[0]
        if not wants:
            self.keep(node, low, low)
            return
        if before is not None and before.is_same(RandomState.now((args, kwargs))):
            before = None

        ran = self.ran(node, args, kwargs, low, before)
        others = self.other_of(node.args, node)
        named = self.other_of(node.kwargs, node)
        self.keep(node, low, self.run_other(node, ran, others, named))
        self.second.after(self, node, others, named)

    def kind_of(self, node: Node) -> higher_order.HigherOrder | None:
        """How to enter a node; None if it runs as one operation."""
        return higher_order.kind_of(node)

    def nested(self, module: GraphModule, inside: tuple[tuple[str, int], ...]) -> Lockstep:
        """The interpreter for a body."""
        return Lockstep(module, self.second, inside)

    def run_other(self, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        """Run an operation in the second form."""
        return self.second.follow(self, node, ran, args, kwargs)

    def ran(
        self, node: Node, args: Any, kwargs: Any, low: Any, before: RandomState | None = None
    ) -> Ran:
        """A node that has run, as an operation that can run again."""

        def run(*given: Any, **named: Any) -> Any:
            return getattr(self, node.op)(node.target, given, named)

        return Ran(self.call_of(node), node.target, run, args, kwargs, low, before)

    def run_plain(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Run an operation in the model's form."""
        result = getattr(self, node.op)(node.target, args, kwargs)
        self.regions.passed(node.target, result)
        return result

    def run_bodies(self, node: Node, kind: higher_order.HigherOrder, args: Any, kwargs: Any) -> Any:
        """Run a higher-order operation, with its bodies in two forms as well."""
        entered = _positions(node, kind, self.module)

        def body(position: int, *operands: Any) -> Any:
            module: Any = args[position]
            low, other = parts(operands)
            if position not in entered:
                if reason := waits_in(module):
                    raise NotJudged(reason)
                return module(*low)
            inside = (*self.inside, (node.name, position))
            made = self.nested(module, inside).run_both(low, other)
            return made[0] if kind.only_a_second_run_sees else joined(*made)

        if not entered:
            raise NotJudged(f"inside {self.call_of(node).kind}")
        return kind.run(args, kwargs, higher_order.RunBody(body, stacked))

    def materialize(self, written: Sequence[Node]) -> None:
        """Give a second form to values about to be written, and to all that share their memory."""
        for operand in written:
            low = self.env[operand]
            if operand in self.others or not is_float(low):
                continue
            memory = memory_of(low)
            if memory is None:
                raise NotJudged(f"a tensor of type {type(low).__name__} is written")
            shift, copy = self.moved(low, memory)
            for alias, value in self.env.items():
                if alias not in self.others:
                    self.keep(alias, value, _in_memory(value, low, memory, shift, copy))

    def moved_in(self, memory: int | None) -> Node | None:
        """A node whose second form is another piece of memory than this; None if there is none.

        A view whose own elements do not differ is still one of a memory that does.
        """
        for node in self.others if memory is not None else ():
            value = self.env[node]
            if isinstance(value, Tensor) and memory_of(value) == memory:
                return node
        return None

    def is_moved(self, low: Any) -> bool:
        """Whether the memory of a value has a second form."""
        return is_float(low) and self.moved_in(memory_of(low)) is not None

    def moved(self, low: Tensor, memory: int) -> tuple[int, Tensor]:
        """The second form of a piece of memory: how far elements are moved there, and a tensor."""
        node = self.moved_in(memory)
        if node is not None:
            value, other = self.env[node], self.others[node]
            if not isinstance(other, Tensor) or other.stride() != value.stride():
                raise NotJudged("memory with a second form in another order is written")
            return other.storage_offset() - value.storage_offset(), other
        flat = torch.empty(0, dtype=low.dtype, device=low.device)
        return 0, self.second.copy_of(flat.set_(low.untyped_storage()))


class Ended(Exception):  # noqa: N818 - a signal, not an error
    """A second form has seen everything that it needs."""


def again(run: GraphRun, second: SecondForm) -> tuple[Any, Any]:
    """Run a graph again in both forms, with its original inputs and random numbers."""
    return _both(Start(run), second)


def look_through(run: GraphRun, look: SecondForm) -> str:
    """Run a graph again to let a form look at it, as far as possible.

    Whatever stops the second run, the findings until then are valid.

    Returns:
        Why the second run did not begin, or had to end; "" if nothing is known to have stopped it.
    """
    try:
        _both(Start(run, to_the_end=False), look)
    except NotJudged as reason:
        return str(reason)
    except Exception:
        return ""
    return ""


def _both(start: Start, second: SecondForm) -> tuple[Any, Any]:
    with start.begun() as given:
        return Lockstep(without_marks(start.run.graph_module), second).run_both(given)


def _in_memory(value: Any, low: Tensor, memory: int, shift: int, copy: Tensor) -> Any:
    """The counterpart of a value in the copy of its memory."""

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != low.dtype or memory_of(x) != memory:
            return x
        return copy.as_strided(x.size(), x.stride(), x.storage_offset() + shift)

    return pytree.tree_map(moved, value)


def _positions(node: Node, kind: higher_order.HigherOrder, module: Any) -> set[int]:
    """The positions of a higher-order operation's arguments that are bodies to enter."""
    try:
        return {body.position for body in kind.bodies(node, module)}
    except (LookupError, TypeError, ValueError):  # arguments of another version
        return set()
