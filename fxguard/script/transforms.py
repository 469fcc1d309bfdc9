"""What a script computes under ``torch.func``: ``vmap``, ``grad`` and what is made of them.

Tensors are wrapped there, one level for each transform. Their numbers are read without the levels.
What a transform returns is known again by its memory, and only while it holds the same numbers.
"""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxguard.batch.autograd_nodes import metadata_of
from fxguard.batch.keys import BETWEEN_GRAPHS, Key
from fxguard.batch.live_tensors import LiveTensors
from fxguard.forgiving import where_theirs_may_raise
from fxguard.graph.nodes import leaves
from fxguard.graph.operations import name_of
from fxguard.measure.func_levels import has_levels, without_levels
from fxguard.script.in_front import Arrival
from fxguard.script.noted import NOTED, flat, note, noted_at
from fxguard.script.operations import (
    INNER,
    MOST_DEPTH,
    NESTED,
    OF_SCRIPT,
    PLAIN,
    UNKNOWN,
    PlainRecord,
    Record,
    is_record,
    kind_of_code,
)
from fxguard.script.tangents import Derived, Tangents, derivative_of, is_not_finite, pair_inside
from fxguard.torch_names import DisableTorchFunction, without_func_level

__all__ = ["Differentiated", "Transforms"]

MOST_OF_ONE = 64  # nodes of autograd that one backward leaves
MOST_KNOWN = 4096  # results, before half of them are forgotten


class Differentiated(NamedTuple):
    """A backward inside a transform."""

    began: list[Arrival]
    leaves: list[Tensor]
    bad: Tensor  # the first gradient that was


class Transforms:
    """The records of what one thread computes inside transforms.

    Args:
        known: gives the record of a tensor outside of them.
        ended: gives a record in the place of one of what is bad, which begins a new chain.
        look_closer: is given the record of what an operation made bad, its arguments and result.
        differentiated: is given the record of what made a derivative bad first, and its backward,
            or for forward mode the operation.

    Attributes:
        has_bad: whether something was bad.
        count: of the results that were noted.
    """

    def __init__(
        self,
        known: Callable[[Tensor], Record | None],
        ended: Callable[[Record], Record],
        look_closer: Callable[[PlainRecord, Any, Any, Tensor], object],
        differentiated: Callable[[PlainRecord, Differentiated | Derived], object],
    ) -> None:
        self._outside, self._ended = known, ended
        self._look_closer, self._differentiated = look_closer, differentiated
        self._live = LiveTensors()
        self._records: list[PlainRecord] = []
        self._first: PlainRecord | None = None  # the backward that first made something bad
        self._tangents = Tangents(differentiated)
        self.has_bad = False
        self.count = 0

    def of(self, tensor: Tensor) -> Record | None:
        """The record of what a tensor holds; None if it was made by no transform."""
        key = self._live.key_of(tensor) or self._live.origin_of(tensor)
        if key is None:
            return None
        record = self._records[key.value]
        # Repr: NaN is not equal to itself.
        return record if repr(pair_inside(tensor)) == repr(record.pair) else None

    def look(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Look at what an operation inside a transform has made."""
        made = result if isinstance(result, (tuple, list)) else [result]
        found = []
        for path, each in enumerate(made):
            if isinstance(each, Tensor) and each.is_floating_point():
                pair = pair_inside(each)
                if pair is not None:
                    found.append((None if made is not result else path, each, pair))
        if not found or (place := _place_of_caller()) is None:
            return
        if len(self._records) > MOST_KNOWN:
            half = MOST_KNOWN // 2
            self._live.forget_before(half)
            del self._records[:half]
        is_bad = not all(math.isfinite(high) for _, _, (_, high) in found)
        self.has_bad |= is_bad
        is_backward = func is torch.autograd.grad
        unpacks = name_of(func) == "_unpack_dual"
        computes = not (is_backward or unpacks)
        is_new = is_bad and computes and not any(map(is_not_finite, leaves((args, kwargs))))
        if is_backward and is_bad and self._first is not None:
            args, kwargs = (self._first,), {}
        depths = [-1]
        read = tuple(self._kept(each, depths) for each in args)
        if unpacks and is_bad and (first := self._tangents.of(read)) is not None:
            depths = [-1]
            read, kwargs = (self._kept(first, depths),), {}
        named = {name: self._kept(each, depths) for name, each in kwargs.items()}
        needs = not is_backward and any(each.requires_grad for _, each, _ in found)
        all_read = read, named
        if max(depths) >= MOST_DEPTH and not needs:  # a node of autograd keeps what led to it
            read, named, depths = self._ending(read), self._ending(named), [-1]
        for position, each, pair in found:
            record = PlainRecord(func, *place, read, named, pair, max(depths) + 1, position, each)
            self._live.remember(each, Key(BETWEEN_GRAPHS, len(self._records)))
            self._records.append(record)
            self.count += 1
            if not unpacks:
                self._tangents.look(record, each, all_read, args, kwargs)
            if needs and each.requires_grad:
                note(record, args, kwargs, each, {})
                _note_further_in(record, each)
            if is_new and not math.isfinite(pair[1]):
                self._look_closer(record, args, kwargs, each)

    def _kept(self, value: Any, depths: list[int]) -> Any:
        """What a record keeps of an argument."""
        if isinstance(value, Tensor):
            record = self.of(value) or self._outside(without_levels(value))
            if record is None:
                return UNKNOWN
            depths.append(record.depth)
            return record
        if type(value) is PlainRecord:
            depths.append(value.depth)
            return value
        if type(value) in NESTED:
            return type(value)([self._kept(each, depths) for each in value])
        return value if type(value) in PLAIN else UNKNOWN

    def _ending(self, value: Any) -> Any:
        """Arguments of a record that begins a new chain."""
        if type(value) is dict:
            return {name: self._ending(each) for name, each in value.items()}
        if type(value) in NESTED:
            return type(value)([self._ending(each) for each in value])
        if not is_record(value):
            return value
        return UNKNOWN if math.isfinite(value.pair[1]) else self._ended(value)

    def differentiate(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``torch.autograd.grad`` for a transform, and look for the first bad gradient.

        Each node of autograd has a hook meanwhile: the backward may not run again, because its
        graph is gone.
        """
        self._first = None
        found: list[Tensor] = []  # the first gradient that was bad
        with DisableTorchFunction():
            outputs = args[0] if args else kwargs.get("outputs")
            outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs or ())
            nodes = _nodes_behind(outputs)
            handles = [node.register_hook(self._hook(node, found)) for node in nodes]
        try:
            result = func(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        if self._first is not None and found:
            given = args[2] if len(args) > 2 else kwargs.get("grad_outputs")
            with where_theirs_may_raise(), DisableTorchFunction():  # tensors may be anything
                began = _arrivals(outputs, given)
                backward = Differentiated(began, _leaves_of(nodes), found[0])
                self._differentiated(self._first, backward)
        return result

    def _hook(self, node: Any, found: list[Tensor]) -> Callable[[Any, Any], None]:
        reference = weakref.ref(self)
        noted = noted_at(node)

        def ran(made: Any, given: Any) -> None:
            transforms = reference()
            if noted is None or transforms is None or transforms._first is not None:
                return
            with where_theirs_may_raise(), DisableTorchFunction():  # a gradient may be anything
                bad = next((each for each in made if is_not_finite(each)), None)
                # What it made of bad operands was made bad before.
                is_first = not any(map(is_not_finite, given)) and not _reads_bad(noted[0])
                if bad is None:
                    transforms._tangents.look_backward(noted[0], made)
                    _note_backward(noted[0], made)
                elif is_first:
                    transforms._first = _backward_of(noted[0], bad)
                    found.append(bad)

        return ran


def _backward_of(forward: PlainRecord, made: Tensor) -> PlainRecord:
    """The record of the backward of an operation, which read what that has read."""
    place = forward.code, forward.last
    return derivative_of("backward", forward.func, place, forward.args, made)


def _note_further_in(record: PlainRecord, result: Tensor) -> None:
    """Note an operation at the nodes that it has left for transforms around the one that runs."""
    while has_levels(result):
        result = without_func_level(result)
        if result.grad_fn is not None and noted_at(result.grad_fn) is None:
            metadata_of(result.grad_fn)[NOTED] = record, {}


def _note_backward(of: PlainRecord, made: Iterable[Any]) -> None:
    """Note the backward of an operation at the nodes of autograd that it has left, if any.

    They are those of a backward of this backward: of a gradient of gradients.
    """
    for each in made:
        while isinstance(each, Tensor):
            node = each.grad_fn
            if node is not None and noted_at(node) is None:
                _note_new(_backward_of(of, each), node)
            each = without_func_level(each) if has_levels(each) else None


def _note_new(record: PlainRecord, node: Any) -> None:
    """Note a record at a node, and at those before it of which nothing is known."""
    todo = [node]
    for _ in range(MOST_OF_ONE):
        node = todo.pop() if todo else None
        if node is None:
            return
        if noted_at(node) is None and not hasattr(node, "variable"):
            metadata_of(node)[NOTED] = record, {}
            todo += [before for before, _ in node.next_functions]


def _arrivals(outputs: list[Tensor], given: Any) -> list[Arrival]:
    """Where a backward began: at the nodes of its outputs, with the gradients that it was given."""
    gradients = [given] if isinstance(given, Tensor) else list(given or [])
    pairs = itertools.zip_longest(outputs, gradients)
    return [Arrival(each.grad_fn, gradient) for each, gradient in pairs if each.grad_fn is not None]


def _leaves_of(nodes: Iterable[Any]) -> list[Tensor]:
    """The leaves of autograd that were given to the operations of some nodes."""
    found: dict[int, Tensor] = {}
    for node in nodes:
        if (noted := noted_at(node)) is not None:
            given = (each for each, _ in noted[1].values())
            found.update({id(each): each for each in given if each.is_leaf and each.requires_grad})
    return list(found.values())


def _reads_bad(record: PlainRecord) -> bool:
    read = flat((record.args, record.kwargs))
    return any(is_record(each) and not math.isfinite(each.pair[1]) for each in read)


def _nodes_behind(outputs: list[Any]) -> list[Any]:
    todo = [each.grad_fn for each in outputs if isinstance(each, Tensor)]
    seen: dict[Any, None] = {}
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen[node] = None
            todo += [before for before, _ in node.next_functions]
    return list(seen)


def _place_of_caller() -> tuple[CodeType, int] | None:
    frame = sys._getframe(1)
    while frame is not None:
        kind = kind_of_code(frame.f_code)
        if kind == OF_SCRIPT:
            return frame.f_code, frame.f_lasti
        if kind != INNER or frame.f_back is None:
            return None
        frame = frame.f_back
    return None
