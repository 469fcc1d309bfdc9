"""Computes once more what led to a bad gradient, so that its backward can be looked at closely."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxguard.graph.operations import read_call
from fxguard.measure.eager import abs_min_max, waited_for
from fxguard.measure.func_levels import Sample
from fxguard.script.noted import Noted, flat, noted_at
from fxguard.script.operations import UNKNOWN, Record, is_record, place_of
from fxguard.source.lines import as_if_called_at

__all__ = ["NotRepeated", "Repetition"]

MOST_OPERATIONS = 4096


class NotRepeated(Exception):  # noqa: N818 - it reaches no user
    """What led to a tensor cannot be computed again."""


class Repetition:
    """Tensors computed once more from what was noted of them.

    Args:
        nodes: the nodes of autograd that made them.
        observe: runs an operation, given its function, arguments and keywords.
        instead: id of a leaf of autograd to what is taken in its place.
        sample: the one that is computed again of those that a transform maps over, if they ran
            inside one.
    """

    def __init__(
        self,
        nodes: Sequence[Any],
        observe: Callable[..., Any],
        instead: dict[int, Tensor],
        sample: Sample,
    ) -> None:
        self._observe = observe
        self._instead, self._sample = instead, sample
        self._noted = {id(record): (record, given) for record, given in _noted_behind(nodes)}
        self._made: dict[Any, Any] = {}
        self._read: dict[int, Tensor] = {}  # the tensors of the script, by id

    @property
    def given(self) -> list[Tensor]:
        """Tensors that autograd does not follow, and that were read."""
        return [each for each in self._read.values() if not each.requires_grad]

    def of(self, node: Any) -> Tensor:
        """What one of the nodes made.

        Raises:
            NotRepeated: when an operation is not known, an input was written since, or there are
                other numbers this time.
        """
        noted = noted_at(node)
        if noted is None:
            raise NotRepeated
        made: Tensor = self._again(noted[0])
        return made

    def _again(self, last: Record) -> Any:
        """What a record has made. Those that led to it come first, without recursion."""
        todo = [last]
        while todo:
            record = todo[-1]
            before = [
                each
                for position, each in enumerate(flat((record.args, record.kwargs)))
                if is_record(each)
                and id(each) not in self._made
                and position not in self._given_to(record)
            ]
            if before:
                todo += before
                if len(todo) > MOST_OPERATIONS:
                    raise NotRepeated
                continue
            todo.pop()
            if id(record) not in self._made:
                self._made[id(record)] = self._run(record)
        return self._made[id(last)]

    def _given_to(self, record: Record) -> dict[int, tuple[Tensor, int]]:
        return self._noted.get(id(record), (record, {}))[1]

    def _run(self, record: Record) -> Tensor:
        read = (id(each) for each in flat(record.args) if is_record(each))
        call = record.func, record.code, record.last, *read
        if record.path is not None and call in self._made:  # another result of the same call
            return self._made[call][record.path]  # type: ignore[no-any-return]
        positions = iter(range(MOST_OPERATIONS))
        given = self._given_to(record)

        def filled(value: Any) -> Any:
            if type(value) is dict:
                return {name: filled(each) for name, each in value.items()}
            if type(value) in (tuple, list):
                return type(value)([filled(each) for each in value])
            found = given.get(next(positions))
            if found is not None:
                return self._input(*found)
            if value is UNKNOWN:
                raise NotRepeated
            return self._made[id(value)] if is_record(value) else value

        args, kwargs = filled((record.args, record.kwargs))
        called = read_call(record.func, args, kwargs)
        writes = bool(called.written)
        if self._sample.is_mapped and called.random:
            raise NotRepeated  # its numbers are only known by the range of all samples
        if writes and args and id(args[0]) in self._read:
            raise NotRepeated  # it would write to a tensor of the script
        with as_if_called_at(place_of(record)), torch.enable_grad():
            result = self._observe(record.func, args, kwargs)
        if record.path is not None:
            self._made[call] = result
            result = result[record.path]
        elif result is None:
            result = args[0]
        if not self._is_same(waited_for(abs_min_max(result)), record.pair):
            raise NotRepeated  # such as random numbers
        return result  # type: ignore[no-any-return]

    def _input(self, tensor: Tensor, version: int) -> Tensor:
        if tensor._version != version:
            raise NotRepeated
        if id(tensor) in self._instead:
            return self._instead[id(tensor)]
        plain = self._sample.of(tensor)
        if tensor.requires_grad:  # nobody has seen how it was made: its backward is another one
            return self._instead.setdefault(id(tensor), plain.detach().requires_grad_())
        return self._read.setdefault(id(tensor), plain)

    def _is_same(self, made: tuple[float, float], noted: tuple[float, float]) -> bool:
        """Whether there are the same numbers as before, or those of one of their samples."""
        if not self._sample.is_mapped:
            return _are_same(made, noted)
        return math.isnan(noted[1]) or noted[0] <= made[0] <= made[1] <= noted[1]


def _are_same(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether two pairs of magnitudes are equal; if the largest is NaN, the smallest may be."""
    if math.isnan(one[1]):
        return math.isnan(other[1])
    return one == other


def _noted_behind(nodes: Sequence[Any]) -> list[Noted]:
    """What was noted of the operations behind some nodes of autograd."""
    todo, seen, found = list(nodes), set[Any](), list[Noted]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (noted := noted_at(node)) is not None:
            found.append(noted)
        todo += [before for before, _ in node.next_functions]
    return found
