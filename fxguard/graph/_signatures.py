"""Facts about an operation that do not depend on arguments: its name, and the ways to call it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxguard.graph import tables
from fxguard.torch_names import OpOverload, OpOverloadPacket

__all__ = [
    "FIRST",
    "NOTHING_SAID",
    "Operation",
    "Signature",
    "is_collective",
    "is_custom",
    "name_of",
    "operation_of",
]

# The first operand's names in schemas and in Python.
FIRST = ("self", "input", "tensor")


@dataclass(frozen=True, slots=True)
class Signature:
    """One way to call an operation."""

    positional: tuple[str, ...] = ()
    keywords: frozenset[str] = frozenset()  # all parameters that may be given by keyword
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Parameters whose memory changes: those that then hold a result, and the others.
    results: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    outs: frozenset[str] = frozenset()  # those of the results that are only overwritten
    returns: bool = True

    def takes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether it can be called with these arguments."""
        return len(args) <= len(self.positional) and all(
            name in self.keywords or name in FIRST for name in kwargs
        )


NOTHING_SAID = Signature()


@dataclass(frozen=True)
class Operation:
    """One operation."""

    name: str
    in_place: bool  # whether its name says that it writes its first operand
    random: bool
    # The ways to call it, if they matter: if one of them writes something, or has a parameter that
    # makes it write.
    signatures: tuple[Signature, ...] = ()
    reflected: bool = False  # whether its operands are swapped: __rsub__(x, 1) is 1 - x

    @functools.cached_property
    def may_write(self) -> bool:
        """Whether it may write a positional argument."""
        return self.in_place or bool(self.signatures) or self.name in tables.UNSAID_WRITES


_REFLECTED = frozenset(["__rdiv__", "__rpow__", "__rsub__", "__rtruediv__", "rsub"])


@functools.lru_cache(maxsize=4096)
def operation_of(target: Any) -> Operation:
    """The facts about a function, an operator, a method by name, or a class of modules."""
    name = name_of(target)
    in_place = name.endswith("_") and not name.endswith("__") and name not in tables.NOT_IN_PLACE
    in_place = in_place or name in tables.IN_PLACE
    random = name in tables.RANDOM
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        overloads = _overloads(target)
        random = random or any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)
        signatures = tuple(_of_schema(overload._schema) for overload in overloads)
        return Operation(name, False, random, signatures)
    if inspect.isfunction(target):
        reflected = target.__name__ in _REFLECTED
        return Operation(name, in_place, random, _of_function(target), reflected)
    # A torch function written in C++ has no signature, but usually a schema with its name.
    packet = None if in_place or isinstance(target, type) else getattr(torch.ops.aten, name, None)
    if not isinstance(packet, OpOverloadPacket):
        return Operation(name, in_place, random)
    found = tuple(_of_schema(each._schema) for each in _overloads(packet))
    matters = name in tables.UNSAID_WRITES or any(each.written for each in found)
    return Operation(name, in_place, random, found if matters else ())


def _packet(target: Any) -> Any:
    return target.overloadpacket if isinstance(target, OpOverload) else target


def _overloads(target: Any) -> list[Any]:
    if isinstance(target, OpOverload):
        return [target]
    return [getattr(target, name) for name in target.overloads()]


def _of_schema(schema: Any) -> Signature:
    def stands_in(argument: Any) -> bool:
        places = argument.alias_info.before_set
        returned = [result.alias_info for result in schema.returns]
        return any(other is not None and other.before_set & places for other in returned)

    arguments = schema.arguments
    tensors = [a for a in arguments if "Tensor" in str(a.type)]
    changed = [a for a in tensors if a.alias_info is not None and a.alias_info.is_write]
    return Signature(
        positional=tuple(a.name for a in arguments if not a.kwarg_only),
        keywords=frozenset(a.name for a in arguments),
        defaults={a.name: a.default_value for a in arguments if a.has_default_value()},
        results=tuple(a.name for a in changed if stands_in(a)),
        written=tuple(a.name for a in changed if not stands_in(a)),
        outs=frozenset(a.name for a in changed if a.kwarg_only),
        returns=bool(schema.returns),
    )


def _of_function(function: Any) -> tuple[Signature, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    names = {p.name for p in parameters}
    if "inplace" not in names and name_of(function) not in tables.UNSAID_WRITES:
        return ()
    return (
        Signature(
            positional=tuple(
                p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            ),
            keywords=frozenset(names),
            defaults={p.name: p.default for p in parameters if p.default is not p.empty},
        ),
    )


@functools.lru_cache(maxsize=4096)
def name_of(target: Any) -> str:
    """The operation's usual name: ``mul``, ``softmax``, ``masked_fill_``.

    A user's own ``softmax`` is ``library.softmax``: what is known of torch's does not hold for it.
    """
    if isinstance(target, str):
        name = target
    elif isinstance(target, (OpOverload, OpOverloadPacket)):
        namespace, _, name = _packet(target)._qualified_op_name.partition("::")
        if is_custom(target) and any(hasattr(place, name) for place in NAMES_OF_TORCH):
            return f"{namespace}.{name}"
    else:
        name = getattr(target, "__name__", None) or type(target).__name__
        if name in SHARED_NAMES and is_collective(target):
            return f"distributed.{name}"
    if name.startswith("__") and name.endswith("__") and name not in tables.NOT_OPERATIONS:
        name = name.strip("_")
    return tables.OPERATORS.get(name, name)


def is_custom(target: Any) -> bool:
    """Whether an operation is not torch's own, so that it may have hidden effects."""
    if inspect.isfunction(target):
        return target.__module__.partition(".")[0] != "torch"
    if not isinstance(target, (OpOverload, OpOverloadPacket)):
        return False
    return _packet(target)._qualified_op_name.partition("::")[0] not in TORCH_NAMESPACES


def is_collective(target: Any) -> bool:
    """Whether an operation waits for other ranks; a second run on one rank must not issue it."""
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return _packet(target)._qualified_op_name.partition("::")[0] in COLLECTIVES
    module = getattr(target, "__module__", None) or ""
    return callable(target) and module.startswith("torch.distributed")


SHARED_NAMES = ("gather", "scatter")  # torch.distributed's are not those of torch
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
NAMES_OF_TORCH = (torch, torch.Tensor, torch.nn.functional, torch.ops.aten)
TORCH_NAMESPACES = ("aten", "prims", "prim", "quantized", "_quantized", "quantized_decomposed")
