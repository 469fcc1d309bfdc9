"""Numbers that a device tells later: nothing waits for it while a script runs.

An operation on a GPU has only begun when it returns. Asking for its numbers at once would make the
program wait for the device after each one. So the range of what an operation made is read on the
device, and asked for when the script waits for the device anyway, or when it matters.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fxguard.graph import nodes
from fxguard.measure import eager, gpu, native
from fxguard.measure.at_hand import own_arithmetic, version_of
from fxguard.script.noted import flat
from fxguard.script.operations import NESTED, Record, is_record
from fxguard.torch_names import cuda_is_capturing, cuda_stream

__all__ = ["Late", "LateOperations", "LatePair", "later"]

RecordOf = Callable[[Tensor], Record | None]

MOST = 1024  # operations, before their numbers are asked for
LARGE = 2**24  # bytes of what an operation read and made, from which on they are not kept
MOST_BYTES = 2**27  # of what is kept, before the numbers are asked for


class LatePair:
    """The smallest and the largest magnitude of a tensor, once its device has told them."""

    __slots__ = ("_found", "waits")

    def __init__(self, waits: Any) -> None:
        self.waits = waits  # a row, or two tensors; None once the numbers are known
        self._found = (0.0, 0.0)

    @property
    def pair(self) -> tuple[float, float]:
        """The numbers. They are waited for."""
        if self.waits is not None:
            with own_arithmetic():
                low, high = self.waits
                self.tell(float(low), float(high))
        return self._found

    def tell(self, low: float, high: float) -> None:
        """The device has told them."""
        self._found, self.waits = (0.0, 0.0) if high < 0 else (low, high), None


def is_late(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor are on a device."""
    return not tensor.is_cpu and not tensor.is_meta


def later(tensor: Tensor) -> LatePair | None:
    """The range of a tensor on a device, which is read there now; None if it cannot be read."""
    if not is_late(tensor) or not tensor.numel() or native.is_observed():
        return None
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    if tensor.is_cuda and cuda_is_capturing():
        return None
    row = gpu.abs_min_max(tensor)
    if row is not None:
        return LatePair(row)
    with own_arithmetic():
        return LatePair(eager.otherwise(tensor.abs() if tensor.is_complex() else tensor))


class Late:
    """An operation whose numbers are on a device, with what it read and made while that is small.

    A tensor of autograd is kept without it: else all that led to it would stay.

    Attributes:
        record: of the operation.
        args: its arguments; a tensor that was not kept is one without memory.
        kwargs: likewise.
        version: of what it made.
        size: bytes of what is kept.
    """

    __slots__ = ("_made", "_read", "_reference", "args", "kwargs", "record", "size", "version")

    def __init__(
        self,
        record: Record,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Tensor,
        record_of: RecordOf,
    ) -> None:
        self.record = record
        self._reference = weakref.ref(result)
        self.version = version_of(result)
        noted = flat((record.args, record.kwargs))
        read = [
            (each, known)
            for each, known in zip(flat((args, kwargs)), noted, strict=True)
            if isinstance(each, Tensor)
        ]
        size = _bytes_behind(result) + sum(_bytes_behind(each) for each, _ in read)
        self.size = size if size <= LARGE else 0
        self._made = _without_autograd(result) if self.size else None
        kept: dict[int, Tensor] = {}
        # By id: its version, if it was kept and somebody counts its writes, and its record.
        self._read: dict[int, tuple[int | None, Record | None]] = {}
        for each, known in read:
            alone = kept[id(each)] = _without_autograd(each) if self.size else _blank(each)
            version = version_of(each) if self.size and each is not result else None
            if not is_record(known):  # also where a record begins a new chain
                known = None if each is result else record_of(each)
            self._read[id(alone)] = version, known
        self.args = _with(kept, args)
        self.kwargs = _with(kept, kwargs)

    @property
    def tensor(self) -> Tensor | None:
        """What it made, if that is still there."""
        return self._reference()

    def record_of(self, read: Tensor) -> Record | None:
        """The record of a tensor in :attr:`args`."""
        return self._read[id(read)][1]

    def is_as_it_was(self, read: Tensor) -> bool:
        """Whether a tensor in :attr:`args` holds what it did then."""
        version = self._read[id(read)][0]
        return version is not None and version_of(read) == version

    @property
    def made(self) -> Tensor | None:
        """What it made, without autograd; None where it was not kept, or has been written."""
        if self._made is None or self.version is None or version_of(self._made) != self.version:
            return None
        return self._made

    def as_it_was(self) -> Tensor | None:
        """The same; None where something that it read was not kept or has been written, too."""
        tensors = (each for each in flat((self.args, self.kwargs)) if isinstance(each, Tensor))
        return self.made if all(map(self.is_as_it_was, tensors)) else None


def _without_autograd(tensor: Tensor) -> Tensor:
    return tensor if tensor.grad_fn is None else tensor.detach()


def _bytes_behind(tensor: Tensor) -> int:
    """Of the memory that would stay: a view keeps all of that which it looks into."""
    return tensor.untyped_storage().nbytes()


def _blank(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype, device="meta")


def _with(kept: Mapping[int, Tensor], value: Any) -> Any:
    """Nested arguments with other tensors in the place of theirs."""
    if isinstance(value, Tensor):
        return kept[id(value)]
    if type(value) in NESTED:
        return type(value)([_with(kept, each) for each in value])
    if type(value) is dict:
        return {name: _with(kept, each) for name, each in value.items()}
    return value


class LateOperations:
    """The operations of a thread whose numbers are on a device, in the order in which they ran.

    Args:
        record_of: gives the record of what a tensor holds.
    """

    def __init__(self, record_of: RecordOf) -> None:
        self._record_of = record_of
        self._all: list[Late] = []
        self._places: set[tuple[torch.device, int]] = set()  # devices and streams
        self._size = 0

    def add(
        self, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> bool:
        """Add one; whether there are so many now that their numbers are to be asked for."""
        late = Late(record, args, kwargs, result, self._record_of)
        self._all.append(late)
        self._size += late.size
        if result.is_cuda:
            self._places.add((result.device, cuda_stream(result.device.index)))
        return len(self._all) >= MOST or self._size >= MOST_BYTES

    def among(self, values: Any) -> list[Record]:
        """The records of tensors, while numbers are on a device."""
        if not self._all:
            return []
        found = (self._record_of(each) for each in nodes.leaves(values) if isinstance(each, Tensor))
        return [each for each in found if each is not None]

    def settle(self) -> list[Late]:
        """Wait for the numbers of all of them; those that are bad, in order."""
        if not self._all or (self._places and cuda_is_capturing()):
            return []
        told, self._all, self._size = self._all, [], 0
        places, self._places = self._places, set()
        for device, stream in places:
            if stream != cuda_stream(device.index):
                torch.cuda.synchronize(device)
        pairs: list[LatePair] = [late.record.later for late in told]
        rows = [(pair, pair.waits) for pair in pairs if isinstance(pair.waits, gpu.Row)]
        with own_arithmetic():
            found = [
                each for part in gpu.joined([row for _, row in rows]) for each in part.tolist()
            ]
        for (pair, _), numbers in zip(rows, found, strict=True):
            pair.tell(*numbers)
        return [late for late in told if not late.record.pair[1] < math.inf]
