"""Rewrites a captured graph so that some of its operations compute in float32.

A kept operation reads its low operands in float32. It passes its result on in float32 to other kept
operations, and in its original dtype to all others. So values stay in float32 inside a region and
are cast only at its borders.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from fxguard import trees
from fxguard.errors import UsageError
from fxguard.forgiving import theirs
from fxguard.formats import NEAR_LIMIT, limit_of
from fxguard.graph import marks, nodes, tables
from fxguard.graph.higher_order import is_higher_order
from fxguard.graph.operations import is_move, read_node
from fxguard.graph.wide_form import is_float
from fxguard.measure.at_hand import dtype_of
from fxguard.passes.unmark import copy_of
from fxguard.torch_names import FakeTensor, enter_autocast, exit_autocast

__all__ = ["InFloat32", "in_float32", "is_put_in"]

LOW = (torch.float16, torch.bfloat16)
CASTS_TO_LOW = frozenset({"half", "bfloat16"})  # methods
PUT_IN = "fxguard_"  # prefix of the names of new nodes
ENTERS_AUTOCAST = enter_autocast
LEAVES_AUTOCAST = exit_autocast


class InFloat32(NamedTuple):
    """The result of the pass."""

    graph_module: GraphModule
    # Positions of the weights among the inputs whose float32 copies follow as inputs.
    weights: tuple[int, ...]


def in_float32(
    graph_module: GraphModule, kept: Collection[str], weights: Collection[int] = ()
) -> InFloat32:
    """Keep some operations of a graph in float32.

    Operations that only move kept values, look at them (without a floating-point result) or write
    into them are kept as well. Bounds that are there to hide an overflow of the low dtype are
    lifted, because they would cut off values that float32 can hold.

    Args:
        graph_module: from TorchDynamo. It is not changed.
        kept: names of the nodes.
        weights: positions of the inputs that are weights. Float32 copies of the needed ones become
            inputs, so that they are not cast at each run.

    Raises:
        FxguardError: when one of them runs other graphs, whose operations cannot be kept.
    """
    return _Rewriting(graph_module, kept, weights).done()


def is_put_in(node: str) -> bool:
    """Whether this pass has put a node with this name into a graph."""
    return node.startswith(PUT_IN)


def _is_low(value: Any) -> bool:
    """Whether a value is a tensor of float16 or bfloat16."""
    return isinstance(value, Tensor) and value.dtype in LOW


class _Rewriting:
    """A graph that is being rewritten.

    Attributes:
        was: the example result of each node before.
        kept: the nodes that are kept.
        ours: the kept nodes, and the casts around them.
    """

    def __init__(
        self, original: GraphModule, kept: Collection[str], weights: Collection[int]
    ) -> None:
        self.original = original
        self.graph, result, copies = copy_of(original.graph)
        self.graph.output(result)
        self.nodes = list(self.graph.nodes)
        self.was = {node: nodes.example_of(node) for node in self.nodes}
        self.calls = {
            node: read_node(node, original)
            for node in self.nodes
            if node.op.startswith("call") and node.target not in marks.MARKS
        }
        self.written = {each for call in self.calls.values() for each in call.written}
        self.kept = {copies[node] for node in original.graph.nodes if node.name in kept}
        self._extend()
        for node in self.kept:
            if is_higher_order(node):
                kind = self.calls[node].kind
                raise UsageError(f"{kind} runs graphs of its own, and cannot be kept in float32")
        self.inputs = [node for node in self.nodes if node.op == "placeholder"]
        self.weights = {
            node: position
            for position, node in enumerate(self.inputs)
            if position in weights and node not in self.written
        }
        self.copied: dict[int, Node] = {}  # position of a weight to the input that is its copy
        self.widened: dict[Node, Node] = {}  # a value that nobody writes, to its cast
        self.bounded: dict[Node, tuple[Any, Any]] = {}  # a clamped value, to its old arguments
        self.ours = set(self.kept)
        # The mode of the capture; TorchDynamo provides another one for its backends.
        self.fake_mode = next(
            (was.fake_mode for was in self.was.values() if isinstance(was, FakeTensor)), None
        )

    def done(self) -> InFloat32:
        """Rewrite the graph."""
        for node in self.nodes:
            if node in self.kept:
                self._keep(node)
        for node in self.nodes:
            if node in self.kept:
                self._cast_back(node)
        self._leave_autocast()
        self.graph.lint()
        rewritten = GraphModule(self.original, self.graph)
        rewritten.meta.update(self.original.meta)
        if hasattr(self.original, "_param_name_to_source"):  # AOTAutograd needs it
            rewritten._param_name_to_source = self.original._param_name_to_source
        return InFloat32(rewritten, tuple(self.copied))

    # Extending the kept operations.

    def _extend(self) -> None:
        """Also keep the operations that go with kept values."""
        added = set(self.kept)
        while added:
            shared = {nodes.memory_of(self.was[node]) for node in self.kept} - {None}
            written = {nodes.memory_of(self.was[each]) for each in self.written} & shared
            leading = self._leading_to_kept()
            added = {
                node
                for node in self.calls
                if node not in self.kept and self._goes_with_kept(node, written, leading)
            }
            self.kept |= added

    def _leading_to_kept(self) -> set[Node]:
        """The moves from which moves alone lead to a kept operation."""
        leading: set[Node] = set()
        for node in reversed(self.calls):
            first = self.calls[node].first
            leads = not (self.kept.isdisjoint(node.users) and leading.isdisjoint(node.users))
            if (
                leads
                and first in self.was
                and is_move(self.calls[node], self.was[first], self.was[node])
            ):
                leading.add(node)
        return leading

    def _goes_with_kept(self, node: Node, written: set[int | None], leading: set[Node]) -> bool:
        """Whether an operation has to be kept because of another kept one.

        Args:
            node: the operation.
            written: the memory of kept values that some operation writes.
            leading: the moves that lead to a kept operation.
        """
        call, was = self.calls[node], self.was[node]
        if self.kept.isdisjoint(node.all_input_nodes) or is_higher_order(node):
            return False
        if call.kind == "getitem" and isinstance(self.was[call.first], (tuple, list)):
            return True
        if not any(is_float(x) for _, x in nodes.elements_of(was)) and call.returns:
            return True
        if not self.kept.isdisjoint(call.written) or nodes.memory_of(was) in written:
            return True
        return call.first in self.kept and node in leading

    # Rewriting.

    def _keep(self, node: Node) -> None:
        """Let an operation compute in float32."""
        call = self.calls[node]
        casts: dict[Node, Node] = {}

        def wide(argument: Any) -> Any:
            if isinstance(argument, torch.dtype):
                return torch.float32 if argument in LOW else argument
            if not isinstance(argument, Node) or argument in self.kept:
                return argument
            if not _is_low(self.was[argument]):
                return argument
            if argument not in casts:
                casts[argument] = self._widened(argument, node)
            return casts[argument]

        node.args = map_aggregate(node.args, wide)  # type: ignore[assignment]
        node.kwargs = map_aggregate(node.kwargs, wide)  # type: ignore[assignment]
        if node.op == "call_method" and node.target in CASTS_TO_LOW:
            node.target = "float"
        if call.kind in tables.LIMITERS and _is_low(self.was[call.first]):
            self.bounded[node] = (node.args, node.kwargs)
            self._lift_bounds(node, limit_of(dtype_of(self.was[call.first])))
        self._set_example(node)
        for operand in casts.keys() & set(call.written):
            with self.graph.inserting_after(node):
                self._put(node, "copy_", operand, casts[operand])

    def _widened(self, operand: Node, before: Node) -> Node:
        """A low value in float32, for a kept operation."""
        if operand in self.widened:
            return self.widened[operand]
        if operand in self.weights:
            return self._copy_of_weight(operand)
        with self.graph.inserting_before(before):
            cast = self._put(before, "to", operand, torch.float32)
        memory = nodes.memory_of(self.was[operand])
        if all(nodes.memory_of(self.was[each]) != memory for each in self.written):
            self.widened[operand] = cast
        return cast

    def _copy_of_weight(self, weight: Node) -> Node:
        with self.graph.inserting_after(self.inputs[-1]):
            copied = self.graph.placeholder(f"{weight.name}_float32")
        copied._dynamo_source = None  # type: ignore[attr-defined] # it does not come from a frame
        copied.meta = {"example_value": self._as_float32(self.was[weight])}
        self.inputs.append(copied)
        self.copied[self.weights[weight]] = copied
        self.widened[weight] = copied
        return copied

    def _cast_back(self, node: Node) -> None:
        """Pass the result of a kept operation to all others in its original dtype."""
        if not _is_low(self.was[node]):
            return
        others = [
            user for user in node.users if user not in self.ours and user.target not in marks.MARKS
        ]
        if not others:
            return
        call = self.calls[node]
        if call.in_place and call.in_place[0] not in self.kept:
            low = call.in_place[0]  # the written operand
        else:
            last = self._bounded(node)
            with self.graph.inserting_after(last):
                low = self._put(node, "to", last, self.was[node].dtype)
        for user in others:
            user.replace_input_with(node, low)

    def _bounded(self, node: Node) -> Node:
        """A kept value for other operations: within the bounds that were lifted for kept ones."""
        if node not in self.bounded or self.calls[node].in_place:
            return node
        args, kwargs = self.bounded[node]
        with self.graph.inserting_after(node):
            bounded = self.graph.create_node(node.op, node.target, args, kwargs, f"{PUT_IN}bounded")
        bounded.replace_input_with(args[0] if args else kwargs["input"], node)
        bounded.meta.update(node.meta)
        self.ours.add(bounded)
        return bounded

    def _lift_bounds(self, node: Node, limit: float) -> None:
        """Lift those bounds of an operation that hide an overflow of the low dtype."""
        nearly = NEAR_LIMIT * limit

        def lifted(bound: Any) -> Any:
            if isinstance(bound, Node):
                with self.graph.inserting_before(node):
                    for compare, infinite in (("ge", torch.inf), ("le", -torch.inf)):
                        edge = math.copysign(nearly, infinite)
                        hides = self._put(node, compare, bound, edge)
                        bound = self._put(node, "masked_fill", bound, hides, infinite)
                return bound
            is_number = isinstance(bound, (int, float)) and not isinstance(bound, bool)
            return bound * torch.inf if is_number and abs(bound) >= nearly else bound

        node.args = (*node.args[:1], *map(lifted, node.args[1:]))
        read = ("input", "self")
        node.kwargs = {name: x if name in read else lifted(x) for name, x in node.kwargs.items()}

    def _leave_autocast(self) -> None:
        """Switch autocast off around kept operations, where it is or may be on."""
        devices = {x.device.type for was in self.was.values() for _, x in nodes.elements_of(was)}
        is_entered = any(node.target is ENTERS_AUTOCAST for node in self.calls)
        if not is_entered and not any(map(torch.is_autocast_enabled, devices)):
            return  # the graph is captured anew when that changes
        for first, last in _stretches(self.graph.nodes, self.ours):
            for device in sorted(devices):
                with self.graph.inserting_before(first):
                    vals = (device, None, False, None)
                    entered = self.graph.call_function(ENTERS_AUTOCAST, vals)
                with self.graph.inserting_after(last):
                    self.graph.call_function(LEAVES_AUTOCAST, (entered,))

    # Example values in the new graph.

    def _put(self, like: Node, method: str, *args: Any) -> Node:
        """Call a method of a tensor, in a node that is put in for another one."""
        node = self.graph.create_node("call_method", method, args, name=PUT_IN + method)
        known = ("nn_module_stack", "stack_trace", "source_fn_stack")
        node.meta.update({key: like.meta[key] for key in known if key in like.meta})
        self.ours.add(node)
        self._set_example(node)
        return node

    def _set_example(self, node: Node) -> None:
        """Set the example result of a node."""
        before = node.meta.get("example_value")
        args, kwargs = map_arg((node.args, node.kwargs), nodes.example_of)
        try:
            with self._faking():
                if node.op == "call_method":
                    example = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    example = node.target(*args, **kwargs)  # type: ignore[operator]
        except theirs():  # a fake tensor cannot tell
            example = trees.tree_map_only(Tensor, self._as_float32, before)
        node.meta["example_value"] = example

    def _as_float32(self, example: Tensor) -> Tensor:
        if not _is_low(example):
            return example
        with self._faking():
            return example.detach().to(torch.float32).requires_grad_(example.requires_grad)

    @contextlib.contextmanager
    def _faking(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.fake_mode is not None:
                stack.enter_context(self.fake_mode)
            for device in ("cpu", "cuda"):
                stack.enter_context(torch.autocast(device, enabled=False))
            yield


def _stretches(all_nodes: Iterable[Node], ours: Collection[Node]) -> list[tuple[Node, Node]]:
    """The first and the last node of each run of our nodes."""
    stretches: list[tuple[Node, Node]] = []
    goes_on = False
    for node in all_nodes:
        is_ours = node in ours and node.op != "placeholder"
        if is_ours and goes_on:
            stretches[-1] = (stretches[-1][0], node)
        elif is_ours:
            stretches.append((node, node))
        goes_on = is_ours
    return stretches
