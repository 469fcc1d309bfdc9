"""Writes operations that no rank called: what a collective is, on the values of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fxguard.recording.recorded import NO_NUMBERS, Operation, Recording, Ref, Value
from fxguard.recording.replay import reads_of

__all__ = ["REDUCTIONS", "Written"]

REDUCTIONS: dict[str, tuple[str, Any, Callable[[Tensor], Tensor]]] = {
    "sum": ("aten.sum.dim_IntList", [0], lambda x: x.sum(0)),
    "avg": ("aten.mean.dim", [0], lambda x: x.mean(0)),
    "max": ("aten.amax.default", [0], lambda x: x.amax(0)),
    "min": ("aten.amin.default", [0], lambda x: x.amin(0)),
    "product": ("aten.prod.dim_int", 0, lambda x: x.prod(0)),
}


class Written:
    """Writes operations in the place of a rank's call of a collective.

    Args:
        recording: of all ranks.
        operation: the call, with the numbers of values in this recording.
    """

    def __init__(self, recording: Recording, operation: Operation) -> None:
        self.recording, self.operation = recording, operation
        self.told = operation.kwargs

    def shape_of(self, value: int) -> tuple[int, ...]:
        """The sizes of a value."""
        return self.recording.values[value].shape

    def copy_of(self, value: int) -> int:
        """A value as it is now."""
        return self.made("aten.clone.default", (Ref(value),), self.shape_of(value))

    def rows(self, value: int, start: int, count: int, dim: int = 0) -> int:
        """Some rows of a value."""
        shape = list(self.shape_of(value))
        shape[dim] = count
        return self.made("aten.slice.Tensor", (Ref(value), dim, start, start + count), shape)

    def viewed(self, value: int, shape: Sequence[int]) -> int:
        """A value with other sizes."""
        if self.shape_of(value) == tuple(shape):
            return value
        return self.made("aten.view.default", (Ref(value), list(shape)), shape)

    def joined(self, values: Sequence[int], dim: int = 0) -> int:
        """Values one behind the other."""
        values = [self.viewed(x, self.shape_of(x) or (1,)) for x in values]
        shape = list(self.shape_of(values[0]))
        shape[dim] = sum(self.shape_of(x)[dim] for x in values)
        return self.made("aten.cat.default", ([Ref(x) for x in values], dim), shape)

    def reduced(self, values: Sequence[int], how: str) -> int:
        """Values of all ranks, reduced to one."""
        shape = self.shape_of(values[0])
        name, dims, _ = REDUCTIONS[how]
        stacked = [len(values), *shape]
        stack = self.made("aten.stack.default", ([Ref(x) for x in values],), stacked)
        return self.made(name, (Ref(stack), dims), shape, f" ({how})")

    def made(self, name: str, args: tuple[Any, ...], shape: Sequence[int], detail: str = "") -> int:
        """What one more operation makes."""
        (first, *_) = reads_of(Operation(name, args, {}, (), (), "", None))
        known = self.recording.values[first.value]
        numbers = known.numbers if name == "aten.clone.default" else NO_NUMBERS
        self.recording.values.append(Value(tuple(shape), known.dtype, numbers))
        value = len(self.recording.values) - 1
        self._append(name, args, value, (), detail)
        return value

    def put(self, values: Sequence[int]) -> None:
        """Let values be what the call writes or returns."""
        targets: list[tuple[int | None, int]] = list(self.operation.written)
        targets += [(None, value) for value in self.operation.made if value is not None]
        for (before, after), value in zip(targets, values, strict=False):
            shaped = self.viewed(value, self.shape_of(after))
            if before is None:
                self._append("aten.clone.default", (Ref(shaped),), after, ())
            else:
                both = ((before, after),)
                self._append("aten.copy_.default", (Ref(before), Ref(shaped)), after, both)

    def _append(
        self,
        name: str,
        args: tuple[Any, ...],
        made: int,
        written: tuple[tuple[int, int], ...],
        detail: str = "",
    ) -> None:
        of, call = f"{self.told['kind']}{detail} of {len(self.told['ranks'])} ranks", self.operation
        self.recording.operations.append(
            Operation(name, args, {}, (made,), written, call.module, call.source, call.rank, of)
        )
