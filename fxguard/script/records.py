"""Short records of what a script computes, from which a batch is made once something is bad.

Making a record has to take less time than a small operation. A record keeps those that led to it,
up to a depth, and no tensor.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from types import CodeType, EllipsisType, FrameType, NoneType
from typing import Any

import torch
from torch import Tensor

from fxguard.batch.autograd_nodes import metadata_of
from fxguard.measure.at_hand import name_of_dtype
from fxguard.measure.native import abs_min_max
from fxguard.source.lines import Place, is_internal

__all__ = ["MOST_DEPTH", "UNKNOWN", "Noted", "Record", "Records", "noted_at"]

MOST_KNOWN = 4096  # tensors, before those that are gone are forgotten
MOST_DEPTH = 64  # operations that led to one another and are kept

UNKNOWN = object()  # in the place of a tensor without a record, and of anything that holds memory
PLAIN = frozenset(
    {
        *(bool, int, float, complex, str, NoneType, slice, EllipsisType, torch.Size),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
NESTED = (tuple, list)
GRAPH = "<eval_with_key>"  # how the files of captured graphs are called
NOTED = "fxguard.noted"  # key in the metadata of autograd nodes


class Record(tuple[Any, ...]):
    """One operation that has run. It is a tuple, which is made in no time."""

    __slots__ = ()

    @property
    def func(self) -> Callable[..., Any]:
        """What ran."""
        return self[0]  # type: ignore[no-any-return]

    @property
    def args(self) -> tuple[Any, ...]:
        """Its arguments, with a record or ``UNKNOWN`` in the place of each tensor."""
        return self[3]  # type: ignore[no-any-return]

    @property
    def kwargs(self) -> dict[str, Any]:
        """Likewise."""
        return self[4] or {}

    @property
    def pair(self) -> tuple[float, float]:
        """The smallest and the largest magnitude of what it made."""
        return self[5]  # type: ignore[no-any-return]

    @property
    def depth(self) -> int:
        """How many operations led to it, one after the other, of those that are kept."""
        return self[6]  # type: ignore[no-any-return]

    @property
    def path(self) -> int | None:
        """Which of several results this one is; None if it is the only one."""
        return self[7]  # type: ignore[no-any-return]

    @property
    def dtype(self) -> str:
        """Of what it made."""
        return name_of_dtype(self[8])

    @property
    def place(self) -> Place:
        """The line of the script."""
        code: CodeType = self[1]
        lines = (line for start, end, line in code.co_lines() if start <= self[2] < end and line)
        return code.co_filename, next(lines, code.co_firstlineno)


# What is kept with a node of autograd: the record, and the tensors in its arguments that have
# none or need no gradient or are leaves, with their versions.
Noted = tuple[Record, dict[int, tuple[Tensor, int]]]


def noted_at(node: Any) -> Noted | None:
    """What was noted of the operation that a node of autograd belongs to."""
    return metadata_of(node).get(NOTED)


class Records:
    """The records of live tensors. Keeps no tensor alive.

    Attributes:
        count: of the operations that were noted.
    """

    def __init__(self) -> None:
        self.count = 0
        self._found: dict[int, tuple[weakref.ref[Tensor], int, Record]] = {}
        self._most = MOST_KNOWN
        self._leaves: dict[int, weakref.ref[Tensor]] = {}  # of autograd, that were read
        self._inner: dict[CodeType, bool] = {}  # whether code is a library's

    def of(self, tensor: Tensor) -> Record | None:
        """The record of what a tensor holds now; None if nobody has seen it being made."""
        known = self._found.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != tensor._version:
            return None
        return known[2]

    def add(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        result: Tensor,
        path: int | None,
        pair: tuple[float, float],
        frame: FrameType | None,
    ) -> None:
        """Note an operation that has run.

        Args:
            func: what ran.
            args: its arguments.
            kwargs: likewise.
            result: what it made, or has written to.
            path: which of several results that is; None if it is the only one.
            pair: the smallest and the largest magnitude in it.
            frame: the one that called it.
        """
        while frame is not None and self._is_inner(frame.f_code):
            if frame.f_code.co_filename.startswith(GRAPH):
                return  # its lines are not those of the operations
            frame = frame.f_back
        if frame is None:
            return
        get, depth = self._found.get, 0
        read: list[Any] = []
        for argument in args:
            known = get(id(argument))
            if (
                known is not None
                and known[0]() is argument
                and (argument is result or known[1] == argument._version)  # type: ignore[union-attr]
            ):
                record = known[2]
                read.append(record)
                if record[6] >= depth:
                    depth = record[6] + 1
            elif type(argument) in PLAIN:
                read.append(argument)
            else:
                read.append(self._read(argument))
        if read and type(read[0]) in NESTED:  # as of torch.cat
            depth = max((x.depth + 1 for x in read[0] if type(x) is Record), default=depth)
        named = {name: self._read(x) for name, x in kwargs.items()} if kwargs else None
        # Asking for the node of a view that was written without gradients raises.
        node = result.grad_fn if result.requires_grad and torch.is_grad_enabled() else None
        if depth > MOST_DEPTH and node is None:  # a node keeps what led to it anyway
            read, depth = _without_records(read), 0
        made = Record(
            (func, frame.f_code, frame.f_lasti, tuple(read), named, pair, depth, path, result.dtype)
        )
        self.count += 1
        self._found[id(result)] = weakref.ref(result), result._version, made
        if node is not None:
            metadata_of(node)[NOTED] = made, self._given(made, args, kwargs)
        if len(self._found) > self._most:
            self._forget()

    def _is_inner(self, code: CodeType) -> bool:
        """Whether code is a library's, or that of a graph."""
        known = self._inner.get(code)
        if known is None:
            known = self._inner[code] = is_internal(code.co_filename)
        return known

    def _read(self, value: Any) -> Any:
        """What a record keeps of an argument."""
        if isinstance(value, Tensor):
            return self.of(value) or UNKNOWN
        if type(value) in NESTED:
            return type(value)([self._read(each) for each in value])
        return value if type(value) in PLAIN else UNKNOWN

    def _given(
        self, made: Record, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> dict[int, tuple[Tensor, int]]:
        """The tensors among some arguments that cannot be made again, by their position.

        What is in nested arguments and keywords counts on from the last position.
        """
        given = {}
        for position, (value, kept) in enumerate(
            zip(flat((args, kwargs or {})), flat((made.args, made.kwargs)), strict=True)
        ):
            if not isinstance(value, Tensor):
                continue
            if value.is_leaf:
                given[position] = value, value._version
                if value.requires_grad:
                    self._leaves[id(value)] = weakref.ref(value)
            elif type(kept) is not Record:
                given[position] = value, value._version
        return given

    def leaves(self) -> list[Tensor]:
        """The leaves of autograd that were read."""
        return [leaf for each in self._leaves.values() if (leaf := each()) is not None]

    def has_bad_gradient(self) -> bool:
        """Whether a leaf has a gradient that is not finite."""
        for key, reference in list(self._leaves.items()):
            leaf = reference()
            if leaf is None:
                del self._leaves[key]
            elif leaf.grad is not None:
                pair = abs_min_max(leaf.grad)
                if pair is not None and not math.isfinite(pair[1]):
                    return True
        return False

    def _forget(self) -> None:
        """Forget tensors that are gone."""
        gone = [key for key, (reference, _, _) in self._found.items() if reference() is None]
        for key in gone:
            del self._found[key]
        self._most = 2 * len(self._found) + MOST_KNOWN


def _without_records(value: Any) -> Any:
    if type(value) in NESTED:
        return type(value)([_without_records(each) for each in value])
    return UNKNOWN if type(value) is Record else value


def flat(value: Any) -> list[Any]:
    """The items of nested arguments, in order; a record is one item."""
    if type(value) is dict:
        value = list(value.values())
    elif type(value) not in NESTED:
        return [value]
    found: list[Any] = []
    for each in value:
        found += flat(each)
    return found
