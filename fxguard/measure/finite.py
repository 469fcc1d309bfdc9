"""Whether many tensors are finite: one number per tensor, and one wait per device."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fxguard.forgiving import where_theirs_may_raise
from fxguard.measure import eager, gpu, native, waiting
from fxguard.measure.at_hand import own_arithmetic, range_of
from fxguard.records import Range, Severity
from fxguard.torch_names import DisableTorchFunction

__all__ = ["Finite", "always", "is_plain"]

T = TypeVar("T")


def never() -> bool:
    """A tensor may be written at any time."""
    return False


def always() -> bool:
    """A tensor is not written in between."""
    return True


class Finite(Generic[T]):
    """Looks at tensors one by one, and tells at the end which of them are not finite.

    Attributes:
        largest: the largest magnitude of an element, or of a tensor's sum; known after :meth:`bad`.
        zero: keys of tensors that were 0 throughout; likewise.

    Example:
        >>> finite = Finite()
        >>> finite.look_at("weight", torch.tensor([1.0, math.nan]))
        >>> list(finite.bad())
        [("weight", <Severity.NAN: 2>)]
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self.zero: list[T] = []
        self._found: list[tuple[T, Severity]] = []
        # For each device, the tensors' keys, each with its range.
        self._waiting: dict[torch.device, list[tuple[T, eager.Pair]]] = {}
        # What is measured together at the end, for each thread: autograd has one for each device.
        self._together: dict[int, waiting.Waiting] = {}

    def look_at(self, what: T, tensor: Tensor, stays: Callable[[], bool] = never) -> None:
        """Look at one tensor.

        Args:
            what: its key in :meth:`bad`.
            tensor: a tensor of any kind; one that supports few operations counts as finite.
            stays: whether nobody writes it before :meth:`bad`, so that it may wait for others.
        """
        found = native.abs_min_max(tensor)
        if found is None:
            self._look_otherwise(what, tensor, stays)
        else:
            self.note(what, found[1])

    def note(self, what: T, high: float) -> None:
        """Note the largest magnitude of a tensor that somebody else has looked at."""
        if 0 < high < self.largest:  # most gradients are like this one
            return
        self.largest = max(self.largest, high)
        if not math.isfinite(high):
            self._found.append((what, Severity.of(high)))
        elif not high:
            self.zero.append(what)

    def _look_otherwise(self, what: T, tensor: Tensor, stays: Callable[[], bool]) -> None:
        """Look at a tensor with torch's operations."""
        with DisableTorchFunction():
            bare = tensor.detach() if tensor.requires_grad else tensor
            if not is_plain(bare):
                self._look_closely(what, bare)
            elif (row := self._row_of(bare, stays)) is not None:
                self._waiting.setdefault(bare.device, []).append((what, row))
            elif bare.is_cpu:
                total = bare.sum().item()
                self.largest = max(self.largest, abs(total))
                if not math.isfinite(total):
                    self._look_closely(what, bare)
                elif not total and bare.numel() and not bare.any():
                    self.zero.append(what)
            elif bare.numel() and not bare.is_meta:
                # Nothing waits for the device before the end.
                self._waiting.setdefault(bare.device, []).append((what, eager.abs_min_max(bare)))

    def _row_of(self, tensor: Tensor, stays: Callable[[], bool]) -> gpu.Row | None:
        """The row of a tensor on a GPU, which waits from now on; None if it cannot."""
        if not gpu.is_readable(tensor) or native.is_observed() or not stays():
            return None
        together = self._together.setdefault(threading.get_ident(), waiting.Waiting())
        # The memory is kept, not the tensor: autograd takes over a gradient that nobody else has.
        return waiting.row_of(together, tensor.detach())

    def _look_closely(self, what: T, tensor: Tensor) -> None:
        """Look at a tensor whose sum does not show that it is finite."""
        with where_theirs_may_raise():  # a subclass with few operations counts as finite
            found = range_of(tensor)
            if isinstance(found, Range) and found.severity:
                self._found.append((what, found.severity))

    @property
    def is_fine(self) -> bool:
        """Whether no tensor is known to be bad, and none waits to be measured."""
        return not self._found and not self._waiting and not self._together

    def measure(self) -> None:
        """Measure what waits."""
        if not self._together:
            return
        with own_arithmetic():
            for together in [*self._together.values()]:
                waiting.measure(together)

    def bad(self) -> Iterator[tuple[T, Severity]]:
        """The keys of tensors that were not finite, and how bad they were."""
        yield from self._found
        self.measure()
        for found in self._waiting.values():
            with own_arithmetic():
                pairs = eager.collect([pair for _, pair in found]).tolist()
            for (what, _), (_, high) in zip(found, pairs, strict=True):
                self.largest = max(self.largest, high)
                if not high:
                    self.zero.append(what)
                if severity := Severity.of(high):
                    yield what, severity


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor can be summed: the sum of a DTensor would be a collective."""
    is_dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided
    is_ours = type(tensor) in (Tensor, torch.nn.Parameter)
    return is_ours and is_dense and tensor.is_floating_point()
