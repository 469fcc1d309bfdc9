"""What a call of ``torch.distributed`` exchanges: the tensors that leave, and those that come in.

Such a call counts no version of what it writes, so nobody else can tell that a tensor was written.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxguard.forgiving import where_theirs_may_raise
from fxguard.graph import nodes
from fxguard.graph._signatures import is_collective, name_of, operation_of
from fxguard.torch_names import OpOverload, OpOverloadPacket

__all__ = ["AFTERWARDS", "KINDS", "Exchange", "brought_later", "exchange_of"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one call reads and writes.

    Attributes:
        reads: tensors whose numbers may reach this or another rank.
        writes: tensors that hold other numbers afterwards.
    """

    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Kind:
    """The parameters of a function that it reads and writes."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


_SENDS = _Kind(reads=("tensor",))
_RECEIVES = _Kind(writes=("tensor",))
_REDUCES = _Kind(("tensor",), ("tensor",))
_GATHERS = _Kind(("input_tensor",), ("output_tensor",))
_SCATTERS_SUMS = _Kind(("input",), ("output",))
KINDS = {
    "send": _SENDS,
    "isend": _SENDS,
    "recv": _RECEIVES,
    "irecv": _RECEIVES,
    "broadcast": _Kind(("tensor",), ("tensor",)),  # see `_broadcast`
    "all_reduce": _REDUCES,
    "all_reduce_coalesced": _Kind(("tensors",), ("tensors",)),
    "reduce": _REDUCES,
    "all_gather": _Kind(("tensor",), ("tensor_list",)),
    "all_gather_single": _GATHERS,
    "all_gather_into_tensor": _GATHERS,
    "all_gather_coalesced": _Kind(("input_tensor_list",), ("output_tensor_lists",)),
    "distributed.gather": _Kind(("tensor",), ("gather_list",)),
    "gather_single": _Kind(("tensor",), ("gather_tensor",)),  # since torch 2.15
    "distributed.scatter": _Kind(("scatter_list",), ("tensor",)),
    "reduce_scatter": _Kind(("input_list",), ("output",)),
    "reduce_scatter_single": _SCATTERS_SUMS,
    "reduce_scatter_tensor": _SCATTERS_SUMS,
    "all_to_all": _Kind(("input_tensor_list",), ("output_tensor_list",)),
    "all_to_all_single": _Kind(("input",), ("output",)),
}
# What comes after an operator: its result is waited for, or wrapped in a tensor that waits.
AFTERWARDS = ("wait_tensor", "_wrap_tensor_autograd")


def exchange_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exchange | None:
    """What a call exchanges with other ranks; None if it exchanges nothing.

    Of a public function that is not known, each tensor counts as read and written.

    Example:
        >>> exchange_of(torch.distributed.recv, (x,), {"src": 0}).writes
        (x,)
    """
    if not is_collective(func):
        return None
    if name_of(func) in AFTERWARDS:
        return Exchange((), ())
    every = _tensors((args, kwargs))
    if isinstance(func, OPERATORS):
        return Exchange(every, every if _writes(func) else ())
    kind = KINDS.get(name_of(func))
    try:
        given: Mapping[str, Any] = _signature(func).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # torch is about to refuse the call
        kind = None
    if kind is None:
        return Exchange(every, every)
    read = _tensors([given.get(name) for name in kind.reads])
    written = _tensors([given.get(name) for name in kind.writes])
    if name_of(func) == "broadcast":
        read, written = (read, ()) if _is_source(given) else ((), written)
    return Exchange(read, written)


def brought_later(func: Any, result: Any, exchange: Exchange) -> tuple[Tensor, ...] | None:
    """What an exchange brings that may still run when its call has returned; None if it has ended.

    The result of an operator is a tensor of its own, which is there once somebody has waited.
    """
    is_over = not isinstance(func, OPERATORS) and not hasattr(result, "wait")
    return None if is_over else exchange.writes


OPERATORS = (OpOverload, OpOverloadPacket)

_signature = functools.cache(inspect.signature)


def _is_source(given: Mapping[str, Any]) -> bool:
    """Whether this rank is the one that sends; False if torch is about to refuse the call."""
    distributed = torch.distributed
    with where_theirs_may_raise():  # an argument that is no group
        if given.get("group_src") is not None:
            return bool(distributed.get_rank(given.get("group")) == given["group_src"])
        return bool(distributed.get_rank() == given.get("src"))
    return False


def _writes(operator: Any) -> bool:
    """Whether an operator writes: those of c10d do not declare what they write, all others do."""
    packet = getattr(operator, "overloadpacket", operator)
    if packet._qualified_op_name.startswith("c10d::"):
        return True
    return any(each.results or each.written for each in operation_of(operator).signatures)


def _tensors(values: Iterable[Any]) -> tuple[Tensor, ...]:
    return tuple(x for x in nodes.leaves(values) if isinstance(x, Tensor))
