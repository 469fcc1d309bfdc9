"""Reads the call of an operation: what it reads, moves, writes, draws and hides.

The same reading serves nodes of a graph and calls that Python makes between graphs. Whether an
argument is changed is looked up in the operator's schema if there is one, in the signature of a
Python function, and otherwise in :mod:`fxguard.graph.tables`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import Module

from fxguard.formats import LIMITS
from fxguard.graph import nodes, tables
from fxguard.graph._signatures import (
    FIRST,
    NOTHING_SAID,
    Operation,
    Signature,
    is_collective,
    is_custom,
    name_of,
    operation_of,
)
from fxguard.graph.autograd_functions import is_function, name_of_function

__all__ = [
    "WRITES",
    "Call",
    "has_effects",
    "is_collective",
    "is_custom",
    "is_move",
    "name_of",
    "read_call",
    "read_node",
]

_NO_WRITE = tables.UnsaidWrite(())

_LIMITS = frozenset(LIMITS.values())

Slot = int | str  # position or keyword of an argument


@dataclass(slots=True, eq=False)  # not frozen, for speed: between graphs each operation makes one
class Call:
    """What one call does with its arguments. Operands are nodes in a graph, otherwise tensors."""

    kind: str  # the operation's name: "mul", "softmax", "masked_fill_"
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    first: Any  # the first operand, also if given by keyword; None if there is none
    # (keyword or None, operand) of operands that the result depends on, in order of use. Operands
    # that are only overwritten are left out.
    reads: tuple[tuple[str | None, Any], ...]
    # Operands whose memory holds the results, in the order of the results.
    in_place: tuple[Any, ...] = ()
    overwrites: bool = False  # whether operands in place are written without being read
    beside: tuple[tuple[str, Any], ...] = ()  # (parameter, operand): both read and written
    # (parameter, operand): updated from their old values, and not read for the result.
    apart: tuple[tuple[str, Any], ...] = ()
    random: bool = False  # whether it draws random numbers
    returns: bool = True
    literals: tuple[float, ...] = ()  # Python numbers among its arguments, in order of use
    reflected: bool = False  # whether its operands are swapped: __rsub__(x, 1) is 1 - x

    @property
    def written(self) -> tuple[Any, ...]:
        """Every operand whose memory changes."""
        others = (*self.beside, *self.apart)
        return (*self.in_place, *(operand for _, operand in others))

    @property
    def casts(self) -> bool:
        return self.kind in tables.CASTS

    @property
    def moves(self) -> bool:
        """Whether the result has the elements of the first operand, judging by the name."""
        return (self.kind in tables.MOVES or self.casts) and not self.written

    @property
    def selects(self) -> bool:
        return self.kind in tables.SELECTS

    @property
    def number_first(self) -> bool:
        """Whether its first operand is a Python number, as in ``2 / x``."""
        if self.reflected:
            return len(self.reads) == 1 and len(self.literals) == 1
        return bool(self.args) and isinstance(self.args[0], (int, float))

    @property
    def infinite_literal(self) -> bool:
        """Whether the call was given an infinity on purpose, as in ``masked_fill(mask, -inf)``."""
        literals = self.literals
        return bool(literals) and any(isinstance(x, float) and math.isinf(x) for x in literals)

    @property
    def limit_literal(self) -> bool:
        """Whether it was given a dtype's largest magnitude, as in masks of ``finfo.min``."""
        if not self.literals or self.kind in tables.LIMITERS:
            return False
        return any(isinstance(x, float) and abs(x) in _LIMITS for x in self.literals)


def read_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Read one call.

    Args:
        target: a function, an operator, the name of a tensor's method, or a module that is one
            operation.
        args: its arguments: tensors, or the nodes that represent them.
        kwargs: likewise.

    Example:
        >>> read_call(torch.nn.functional.relu, (x, True), {}).in_place
        (x,)
    """
    module = target if isinstance(target, Module) else None
    called: Any = target if module is None else type(module)
    operation = operation_of(called)
    if args and not operation.may_write and module is None and WRITES.isdisjoint(kwargs):
        return _read_plain_call(operation, args, kwargs)  # most calls
    signature = next((s for s in operation.signatures if s.takes(args, kwargs)), NOTHING_SAID)
    leaves = _leaves_of(args, kwargs)
    literals = tuple(filter(_is_number, itertools.chain.from_iterable(leaves.values())))
    given = _Given(args, kwargs, signature, leaves)
    first = given.first()
    in_place: list[Slot] = []
    unread: set[Slot] = set()
    beside: list[tuple[str, Slot]] = []
    apart: list[tuple[str, Slot]] = []
    if kwargs.get("out") is not None:
        in_place = ["out"]
        unread = {"out"}
    elif signature.results:
        in_place = [slot for _, slot in given.slots(signature.results)]
        unread = set(in_place).intersection(signature.outs)
    elif first is not None and (
        operation.in_place
        or getattr(module, "inplace", False) is True
        or given.value("inplace") is True
    ):
        in_place = [first]
    if in_place == [first] and _overwrites(operation.name, args):
        unread = {*in_place}
    unsaid = tables.UNSAID_WRITES.get(operation.name, _NO_WRITE)
    beside = given.slots(name for name in signature.written if name not in unsaid.operands)
    if unsaid.switch is None or given.value(unsaid.switch) not in (None, False):
        found = given.slots(unsaid.operands)
        if unsaid.apart:
            apart = found
            unread.update(slot for _, slot in found)
        else:
            beside += found
    return Call(
        kind=operation.name,
        args=tuple(args),
        kwargs=kwargs,
        first=None if first is None else next(iter(given.operands(first)), None),
        reads=tuple(
            (None if isinstance(slot, int) else slot, operand)
            for slot in (*range(len(args)), *kwargs)
            if slot not in unread
            for operand in given.operands(slot)
        ),
        in_place=tuple(operand for slot in in_place for operand in given.operands(slot)),
        overwrites=bool(in_place) and unread.issuperset(in_place),
        beside=tuple((name, each) for name, slot in beside for each in given.operands(slot)),
        apart=tuple((name, each) for name, slot in apart for each in given.operands(slot)),
        random=operation.random and _draws(operation.name, args, kwargs),
        returns=signature.returns and operation.name != "setitem",
        literals=literals,
        reflected=operation.reflected,
    )


def has_effects(target: Any) -> bool:
    """Whether an operation may do more than read its arguments: write, draw, send, or be a user's.

    ``out`` and ``inplace`` make any operation write.
    """
    operation = operation_of(target)
    draws_or_writes = operation.may_write or operation.random
    return draws_or_writes or is_collective(target) or is_custom(target)


def _draws(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operation that may draw random numbers does so."""
    parameters = DROPS.get("dropout" if name in tables.DROPOUTS else name)
    if parameters is None:
        return True
    (p, unless_given), training = parameters
    if _is_zero(_argument(p, args, kwargs, unless_given)):
        return False
    return training is None or _argument(training, args, kwargs, True) is not False


# Operations that drop elements: position and names of the parameters for the probability, with its
# default, and for training.
DROPS: dict[str, tuple[tuple[tuple[Any, ...], float], tuple[Any, ...] | None]] = {
    "dropout": (((1, "p"), 0.5), (2, "training", "train")),
    "scaled_dot_product_attention": (((4, "dropout_p"), 0.0), None),
    "multi_head_attention_forward": (((10, "dropout_p"), 0.5), (13, "training")),
}


def _argument(
    parameter: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any], default: Any
) -> Any:
    """What a call was given for a parameter with this position and these names."""
    position, *names = parameter
    if len(args) > position:
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), default)


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0


WRITES = frozenset({"out", "inplace"})  # keywords that make any operation write


def _read_plain_call(operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Read a call of an operation that writes nothing."""
    reads: list[tuple[str | None, Any]] = []
    literals: list[float] = []
    first = None

    def read(keyword: str | None, argument: Any) -> None:
        for leaf in (argument,) if isinstance(argument, Tensor) else nodes.leaves(argument):
            if _is_operand(leaf):
                reads.append((keyword, leaf))
            elif _is_number(leaf):
                literals.append(leaf)  # type: ignore[arg-type]

    for position, argument in enumerate(args):
        read(None, argument)
        if position == 0 and reads:
            first = reads[0][1]
    for keyword, argument in kwargs.items():
        read(keyword, argument)
    return Call(
        operation.name,
        tuple(args),
        kwargs,
        first,
        tuple(reads),
        random=operation.random and _draws(operation.name, args, kwargs),
        literals=tuple(literals),
        reflected=operation.reflected,
    )


def read_node(node: Node, graph_module: GraphModule | None = None) -> Call:
    """Read the call that a node of a graph represents.

    Args:
        node: a node that calls something.
        graph_module: its graph's module, to look up modules that nodes call.
    """
    target: Any = node.target
    if node.op == "call_module" and graph_module is not None:
        target = graph_module.get_submodule(str(target))
    call = read_call(target, node.args, node.kwargs)
    if graph_module is not None and is_function(target):
        call = replace(call, kind=name_of_function(node, graph_module) or call.kind)
    return call


def is_move(call: Call, before: Any, after: Any) -> bool:
    """Whether a result has exactly the elements of the first operand.

    Args:
        call: the call.
        before: its first operand, or the capture's example of it.
        after: its result, likewise.
    """
    if not call.moves or not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    # ``view`` may read the bits as another dtype, and ``expand_as`` has a second operand.
    return before.dtype == after.dtype and not (_is_empty(after) and not _is_empty(before))


def _is_empty(value: Tensor) -> bool:
    # A size that is known only at run time is not evaluated, which would end the trace.
    return value.layout is torch.strided and not value.is_nested and 0 in _known(value.shape)


def _known(shape: Sequence[Any]) -> list[int]:
    return [size for size in shape if isinstance(size, int)]


@dataclass(frozen=True, slots=True)
class _Given:
    """The arguments of one call."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    signature: Signature
    leaves: Mapping[Slot, Sequence[Any]]  # the items in each argument, however nested

    def first(self) -> Slot | None:
        """The first parameter, also if given by keyword."""
        if self.args:
            return 0
        return next((name for name in (*FIRST, *self.kwargs) if name in self.kwargs), None)

    def slot(self, name: str) -> Slot | None:
        """The slot of a parameter; None if it was not given."""
        if name in self.kwargs:
            return name
        if name in self.signature.positional:
            index = self.signature.positional.index(name)
            if index < len(self.args):
                return index
        return self.first() if name in FIRST and not self.args else None

    def slots(self, names: Iterable[str]) -> list[tuple[str, Slot]]:
        """Name and slot of the parameters that were given."""
        return [(name, slot) for name in names if (slot := self.slot(name)) is not None]

    def operands(self, slot: Slot) -> list[Any]:
        """The nodes or tensors in an argument."""
        return [leaf for leaf in self.leaves[slot] if _is_operand(leaf)]

    def value(self, name: str) -> Any:
        """The value of a parameter in this call."""
        slot = self.slot(name)
        if slot is None:
            return self.signature.defaults.get(name)
        return self.args[slot] if isinstance(slot, int) else self.kwargs[slot]


def _overwrites(name: str, args: Sequence[Any]) -> bool:
    """Whether the whole first operand is written, whatever it held."""
    if name == "setitem":  # x[:] = y and x[...] = y
        index = args[1] if len(args) > 1 else None
        is_all = isinstance(index, slice) and all(each is None for each in nodes.leaves(index))
        return index is Ellipsis or is_all
    return name in tables.OVERWRITES


def _leaves_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Slot, Sequence[Any]]:
    slots: list[tuple[Slot, Any]] = [*enumerate(args), *kwargs.items()]
    return {slot: nodes.leaves(value) for slot, value in slots}


def _is_operand(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, Node))


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
