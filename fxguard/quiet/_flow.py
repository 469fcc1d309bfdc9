"""The operations that led to a loss, from it backwards: those of scripts and those in graphs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Node

from fxguard.batch.autograd_nodes import metadata_of
from fxguard.batch.kept_run import RAN, KeptRun
from fxguard.batch.tape import MADE
from fxguard.batch.tape_graph import Given, Made
from fxguard.graph.operations import name_of
from fxguard.source.lines import Place, source_of_trace

__all__ = ["DETACHES", "Leaf", "Operation", "Value", "operations_behind"]

DETACHES = frozenset({"detach", "detach_"})
MOST = 2048  # operations
MOST_NODES = 512  # of autograd, before the model


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that no operation seen here has made, such as data or a weight."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


@dataclass(slots=True, eq=False)
class Operation:
    """An operation, with what it was given.

    Attributes:
        kind: "softmax", "sub", ...
        place: the user's line.
        given: its arguments, as a graph or a tape has them.
        named: likewise, by keyword.
        shape: of its result; None if that is not known.
        inside: the graph that it is part of; None for an operation of the script.
        with_grad: False for one that a script ran under ``no_grad``.
        shapes: of what operations of the script have made, by the identity of the tape's note.
    """

    kind: str
    place: Place | None
    given: tuple[Any, ...]
    named: dict[str, Any]
    shape: tuple[int, ...] | None = None
    inside: KeptRun | None = None
    with_grad: bool = True
    shapes: Mapping[int, tuple[int, ...]] = field(default_factory=dict, repr=False)
    _args: tuple[Any, ...] | None = field(default=None, repr=False)

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments without a keyword: values, and what is no tensor."""
        if self._args is None:
            self._args = tuple(_value(x, self) for x in self.given)
        return self._args

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by its position, or else by its keyword."""
        if len(self.given) > position:
            return self.args[position]
        return _value(self.named[name], self) if name in self.named else default

    @property
    def values(self) -> Iterator[Value]:
        """The values that it read."""
        for each in (*self.args, *(_value(x, self) for x in self.named.values())):
            yield from _values_in(each)


Value = Operation | Leaf


def operations_behind(roots: Iterable[Tensor]) -> Iterator[Operation]:
    """The operations that led to some tensors, the last ones first."""
    roots = list(roots)
    shapes = dict(_shapes_behind(roots))
    todo = deque(x for root in roots if isinstance(x := _made_by(root, shapes), Operation))
    seen = set[Any]()
    while todo and len(seen) < MOST:
        operation = todo.popleft()
        key = id(operation.inside), id(operation.given)
        if key in seen:
            continue
        seen.add(key)
        yield operation
        todo.extend(x for x in operation.values if isinstance(x, Operation))


def _shapes_behind(roots: Iterable[Tensor]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The shapes of what operations of the script have made, by what a tape notes, if autograd
    has recorded them.
    """
    todo = deque(root.grad_fn for root in roots)
    seen = set[Any]()
    while todo and len(seen) < MOST_NODES:
        node = todo.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        metadata = metadata_of(node)
        for key, noted in metadata.items():
            if isinstance(key, tuple) and key[0] == MADE:
                yield id(noted[1]), _numbers(node._input_metadata[key[1]].shape) or ()
        if not any(isinstance(key, tuple) and key[0] == RAN for key in metadata):
            todo.extend(each for each, _ in node.next_functions)


def _value(given: Any, reader: Operation) -> Any:
    """An argument with values in the place of tensors, of nodes and of what a tape notes."""
    if isinstance(given, (Tensor, Given)):
        return _made_by(given if isinstance(given, Tensor) else given.tensor, reader.shapes)
    if isinstance(given, Made):
        return _of_tape(given, reader.shapes)
    if isinstance(given, Node) and reader.inside is not None:
        return _of_graph(given, reader.inside, reader.shapes)
    if isinstance(given, (tuple, list)):  # graphs have lists of their own
        return [_value(x, reader) for x in given]
    return given


def _values_in(given: Any) -> Iterator[Value]:
    if isinstance(given, (Operation, Leaf)):
        yield given
    elif isinstance(given, (tuple, list)):
        for each in given:
            yield from _values_in(each)


def _made_by(tensor: Tensor, shapes: Mapping[int, tuple[int, ...]]) -> Value:
    node = tensor.grad_fn
    metadata = {} if node is None else metadata_of(node)
    made: Any = None
    if (ran := metadata.get((RAN, tensor.output_nr))) is not None:
        kept, position = ran
        (outputs,) = next(iter(reversed(kept.event.graph_module.graph.nodes))).args
        if isinstance(outputs, (tuple, list)):
            made = _of_graph(outputs[position], kept, shapes)
    elif (noted := metadata.get((MADE, tensor.output_nr))) is not None:
        made = _of_tape(noted[1], shapes)
    if isinstance(made, Operation):
        made.shape = tuple(tensor.shape)
        return made
    return Leaf(tensor)


def _of_tape(made: Made, shapes: Mapping[int, tuple[int, ...]]) -> Operation:
    call = made.call
    return Operation(
        name_of(call.func),
        call.place,
        call.args,
        call.kwargs,
        shapes.get(id(made)),
        with_grad=call.with_grad,
        shapes=shapes,
    )


def _of_graph(node: Any, kept: KeptRun, shapes: Mapping[int, tuple[int, ...]]) -> Any:
    """What a node of a graph stands for: an operation, or one of the graph's arguments."""
    if not isinstance(node, Node):
        return node
    if node.op == "placeholder":
        arguments = kept.arguments()
        position = [x for x in node.graph.nodes if x.op == "placeholder"].index(node)
        given = None if arguments is None else arguments[position]
        return _made_by(given, shapes) if isinstance(given, Tensor) else given
    source = source_of_trace(node.meta.get("stack_trace"))
    example = node.meta.get("example_value")
    return Operation(
        name_of(node.target),
        None if source is None else (source.file, source.line),
        node.args,
        dict(node.kwargs),
        _numbers(example.shape) if isinstance(example, Tensor) else None,
        kept,
        shapes=shapes,
    )


def _numbers(shape: Iterable[Any]) -> tuple[int, ...] | None:
    """A shape without symbols; None if it has some."""
    found = tuple(shape)
    return found if all(type(x) is int for x in found) else None
