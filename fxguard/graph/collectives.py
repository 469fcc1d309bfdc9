"""Operations that may wait for other ranks, which a second run on one rank must not issue.

What a graph says is read from the graph: :func:`waits_in`. What it hides is refused when it is
about to happen: :func:`none_issued`.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxguard.graph import nodes
from fxguard.graph.autograd_functions import is_function
from fxguard.graph.higher_order import bodies_of
from fxguard.graph.operations import is_collective, is_custom, name_of
from fxguard.graph.wide_form import NotJudged
from fxguard.measure.traceable import inside
from fxguard.torch_names import DispatchKey, DispatchKeySet, OpOverload, TorchDispatchMode

__all__ = [
    "OWN",
    "expect_none",
    "is_of_ranks",
    "may_wait_in",
    "none_issued",
    "none_issued_by",
    "of_ranks",
    "waits",
    "waits_in",
]

OF_RANKS = "operations on {} may be collectives, and no second run issues one"
OWN = "{} is a collective, and no second run issues one"

_PLAIN = (Tensor, torch.nn.Parameter)


def is_of_ranks(value: Any) -> bool:
    """Whether operations on a tensor may wait for other ranks: a DTensor, or one inside another."""
    if type(value) in _PLAIN or not isinstance(value, Tensor):
        return False
    if any(kind.__module__.startswith("torch.distributed") for kind in type(value).__mro__):
        return True
    return any(map(is_of_ranks, inside(value)))


def of_ranks(value: Any) -> str:
    """What to say of such a tensor."""
    name = type(value).__name__
    return OF_RANKS.format(f"an {name}" if name[0] in "AEIOU" else f"a {name}")


def waits(target: Any, values: Iterable[Any]) -> str:
    """Why an operation may wait for other ranks; "" if it does not.

    Args:
        target: the operation.
        values: what it reads and makes.
    """
    for value in values:
        if is_of_ranks(value):
            return of_ranks(value)
    return OWN.format(name_of(target)) if is_collective(target) else ""


def _node_waits(node: Node) -> str:
    """The same for an operation of a graph, its bodies left out."""
    read = (nodes.example_of(each) for each in (*node.all_input_nodes, node))
    return waits(node.target, (x for example in read for _, x in nodes.elements_of(example)))


_KNOWN: weakref.WeakKeyDictionary[GraphModule, str] = weakref.WeakKeyDictionary()


def waits_in(module: GraphModule) -> str:
    """Why an operation of a graph, or of a body in it, may wait for other ranks; "" if none does.

    The bodies of a backward count.

    Example:
        >>> waits_in(graph_module)
        'all_reduce is a collective, and no second run issues one'
    """
    found = _KNOWN.get(module)
    if found is None:
        found = next(filter(None, map(_node_waits, module.graph.nodes)), "")
        bodies = (each for each in module.children() if isinstance(each, GraphModule))
        _KNOWN[module] = found = found or next(filter(None, map(waits_in, bodies)), "")
    return found


def expect_none(node: Node, module: GraphModule, *, enters: bool = False) -> None:
    """Raise if an operation may wait for other ranks.

    Args:
        node: the operation, about to run.
        module: its graph.
        enters: whether each of its bodies runs as a graph of its own, which is looked at then.

    Raises:
        NotJudged: with the reason.
    """
    reason = _node_waits(node)
    if not enters and not reason:
        bodies = bodies_of(node, module)
        reason = next(filter(None, (waits_in(each.graph_module) for each in bodies)), "")
    if reason:
        raise NotJudged(reason)


@contextlib.contextmanager
def none_issued(module: GraphModule, given: Sequence[Any] = ()) -> Iterator[None]:
    """Refuse every collective in the block, also those inside of custom operations.

    Args:
        module: the graph that runs.
        given: its arguments.

    Raises:
        NotJudged: in place of a collective.
    """
    with _Refusing() if _has_ranks() and _hides(module, given) else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def none_issued_by(target: Any) -> Iterator[None]:
    """The same for one operation on tensors of torch.

    Raises:
        NotJudged: also if it is a collective itself.
    """
    if reason := waits(target, ()):
        raise NotJudged(reason)
    with _Refusing() if _has_ranks() and _is_opaque(target) else contextlib.nullcontext():
        yield


def may_wait_in(module: GraphModule, given: Sequence[Any]) -> bool:
    """Whether a graph may wait for other ranks, as far as it shows what it runs.

    Args:
        module: the graph.
        given: its arguments, or examples of them.
    """
    return bool(waits_in(module)) or (_has_ranks() and _hides(module, given))


def _has_ranks() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _hides(module: GraphModule, given: Sequence[Any]) -> bool:
    """Whether some code that a graph runs is not in the graph: a custom operation, a subclass."""
    if any(isinstance(x, Tensor) and type(x) not in _PLAIN for x in given):
        return True
    graphs = [each for each in module.modules() if isinstance(each, GraphModule)]
    return any(
        node.op == "call_module" or (node.op == "call_function" and _is_opaque(node.target))
        for graph in graphs
        for node in graph.graph.nodes
    )


def _is_opaque(target: Any) -> bool:
    return is_custom(target) or is_function(target)


class _Refusing(TorchDispatchMode):
    """Raises where a collective would be issued; everything else runs as without it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's has no annotations

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if is_collective(func):
            raise NotJudged(OWN.format(name_of(func)))
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # the subclass says which operations it runs
        if isinstance(func, OpOverload) and is_custom(func):
            return self._entered(func, args, named)
        return func(*args, **named)

    def _entered(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a custom operation with this mode on, so that what it calls is seen."""
        devices = {x.device.type for x in nodes.leaves((args, kwargs)) if isinstance(x, Tensor)}
        key = getattr(DispatchKey, DISPATCH_KEYS.get(next(iter(devices), "cpu"), ""), None)
        if len(devices) != 1 or key is None:
            raise NotJudged(f"{name_of(func)} may issue a collective, and no second run issues one")
        with self:
            return func.redispatch(DispatchKeySet(key), *args, **kwargs)


DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
