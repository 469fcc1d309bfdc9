"""Finds the smallest operands with which an operation still fails: a slice, simple numbers."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxguard.forgiving import theirs
from fxguard.graph.evidence import Evidence
from fxguard.graph.one_operation import OneOperation

__all__ = ["Shrinker", "size_of"]

MOST_SECONDS = 20.0
MOST_TOGETHER = 6  # dimensions of one size for which every combination is tried
MOST_ELEMENTS = 64  # of a tensor whose elements are simplified one by one

# The identity of a failure: equal results mean the same failure.
Sameness = Callable[[Evidence], Hashable]

Dimension = tuple[int, int]  # index of the tensor, and of its dimension


def size_of(operation: OneOperation) -> int:
    """The size of its operands in bytes."""
    return sum(x.numel() * x.element_size() for x in operation.tensors)


@dataclass
class Shrinker:
    """Makes the operands of a failing operation smaller, then simpler.

    Nothing is assumed about the operation. A change is tried and kept if the operation fails in the
    same way as before: the same problem, with the same cause. So the result fails, whatever the
    operation does with its operands.

    1. *Slices.* Dimensions of one size may belong together, like the inner ones of a matrix
       product. Every combination of them is cut, larger ones first: by half, by a quarter, down to
       one element, from either end. A cut is a view, so nothing is copied.
    2. *Numbers.* Elements become 0, 1, or a number with fewer digits; first many at a time.

    Args:
        operation: the failing operation.
        sameness: the identity of its failure, which has to stay the same.
        seconds: when to stop with what was found.

    Attributes:
        operation: the smallest one that was found.
    """

    operation: OneOperation
    sameness: Sameness
    seconds: float = MOST_SECONDS

    def __post_init__(self) -> None:
        self.until = time.monotonic() + self.seconds
        self.failure = self._failure_of(self.operation)

    @property
    def fails(self) -> bool:
        """Whether the operation fails at all by itself."""
        return self.failure is not None

    def shrink(self) -> None:
        """Make the operands as small and their numbers as simple as possible."""
        self.cut()
        self.simplify()
        self.cut()  # elements that are now 0 may not be needed

    def cut(self, most_bytes: int = 0) -> None:
        """Cut the operands until they have at most so many bytes, or cannot be cut further."""
        progress = True
        while progress and size_of(self.operation) > most_bytes:
            progress = False
            for size in sorted(self._sizes(), reverse=True):
                for dimensions in self._choices(size):
                    progress |= self._cut_along(dimensions, most_bytes)
                    if size_of(self.operation) <= most_bytes:
                        return

    def simplify(self) -> None:
        """Make the numbers of the operands simpler."""
        for position, tensor in enumerate(self.operation.tensors):
            if tensor.numel() and type(tensor) in (Tensor, torch.nn.Parameter):
                self._simplify_parts(position)
                if tensor.numel() <= MOST_ELEMENTS:
                    self._simplify_each(position)

    # Cutting.

    def _sizes(self) -> set[int]:
        return {size for x in self.operation.tensors for size in x.shape if size > 1}

    def _choices(self, size: int) -> Iterator[Sequence[Dimension]]:
        """Combinations of the dimensions of one size, beginning with all of them."""
        tensors = self.operation.tensors
        found = [(i, d) for i, x in enumerate(tensors) for d, n in enumerate(x.shape) if n == size]
        if len(found) > MOST_TOGETHER:
            yield found
            yield from ([each] for each in found)
            return
        for count in range(len(found), 0, -1):
            yield from itertools.combinations(found, count)

    def _cut_along(self, dimensions: Sequence[Dimension], most_bytes: int) -> bool:
        """Cut from either end, first by half; returns whether anything could be cut."""
        tensor, dimension = dimensions[0]
        if dimensions[0][1] >= self.operation.tensors[tensor].dim():
            return False
        progress = False
        step = self.operation.tensors[tensor].shape[dimension] // 2
        while step >= 1:
            size = self.operation.tensors[tensor].shape[dimension]
            kept = [(0, size - step), (step, size)] if step < size else []
            if any(self._takes(self._sliced(dimensions, size, *each)) for each in kept):
                progress = True
                if size_of(self.operation) <= most_bytes:
                    return True
            else:
                step //= 2
        return progress

    def _sliced(
        self, dimensions: Sequence[Dimension], size: int, start: int, stop: int
    ) -> Iterator[OneOperation]:
        """The operation with a part of some dimensions; also with numbers that tell their size."""
        tensors = list(self.operation.tensors)
        for tensor, dimension in dimensions:
            if tensors[tensor].shape[dimension] != size:
                return  # it has been cut since
            tensors[tensor] = tensors[tensor].narrow(dimension, start, stop - start)
        cut = self.operation.with_tensors(tensors)
        yield cut
        yield cut.with_numbers(lambda x: stop - start if x == size and type(x) is int else x)

    # Numbers.

    def _simplify_parts(self, position: int) -> None:
        """Set many elements at a time to 0, then to 1: all of a tensor, halves, quarters."""
        for simple in (0, 1):
            count = self.operation.tensors[position].numel()
            length = count
            while length >= 1 and (length > 1 or count <= MOST_ELEMENTS):
                for start in range(0, count, length):
                    self._takes(self._with_part(position, start, length, simple))
                if length < count / MOST_ELEMENTS:
                    break
                length //= 2

    def _with_part(
        self, position: int, start: int, length: int, simple: float
    ) -> Iterator[OneOperation]:
        tensors = list(self.operation.tensors)
        changed = tensors[position].clone(memory_format=torch.contiguous_format)
        part = changed.view(-1)[start : start + length]
        if bool((part == simple).all()) or (simple and not bool((part != 0).any())):
            return
        part.fill_(simple)
        tensors[position] = changed
        yield self.operation.with_tensors(tensors)

    def _simplify_each(self, position: int) -> None:
        for index in range(self.operation.tensors[position].numel()):
            while any(
                self._takes(self._with_part(position, index, 1, simple))
                for simple in simpler(self.operation.tensors[position].reshape(-1)[index].item())
            ):
                pass  # a positive number, for example, can then be made simpler

    # Trying.

    def _takes(self, candidates: Iterator[OneOperation]) -> bool:
        """Continue with the first candidate that fails as before; returns whether there is one."""
        for candidate in candidates:
            if time.monotonic() > self.until:
                return False
            if self._failure_of(candidate) == self.failure is not None:
                self.operation = candidate
                return True
        return False

    def _failure_of(self, operation: OneOperation) -> Hashable | None:
        """The identity of its failure; None if it does not fail or does not run."""
        try:
            evidence = operation.evidence()
            return None if evidence is None else self.sameness(evidence)
        except theirs():  # any complaint about operands that nobody intended
            return None


def simpler(number: float) -> Iterator[float]:
    """Simpler numbers in place of one, the simplest first: 0, 1, then with fewer digits."""
    if not isinstance(number, (int, float)) or isinstance(number, bool) or number in (0, 1):
        return
    yield 0
    yield 1
    if isinstance(number, int) or not math.isfinite(number):
        return
    if number < 0:
        yield -number
    for digits in range(1, 5):
        rounded = float(f"{number:.{digits}g}")
        if rounded == number:
            return
        yield rounded
