"""What a collective brings to a rank, as operations of ATen on what the ranks gave."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxguard.recording.recorded import Numbers, Operation, Recording, Ref, Value
from fxguard.recording.replay import reads_of, wide

__all__ = ["Given", "Written", "brought"]

UNKNOWN = Numbers(math.nan, math.nan, math.nan, math.nan, 0)  # of what no rank held
REDUCTIONS: dict[str, tuple[str, Any, Callable[[Tensor], Tensor]]] = {
    "sum": ("aten.sum.dim_IntList", [0], lambda x: x.sum(0)),
    "avg": ("aten.mean.dim", [0], lambda x: x.mean(0)),
    "max": ("aten.amax.default", [0], lambda x: x.amax(0)),
    "min": ("aten.amin.default", [0], lambda x: x.amin(0)),
    "product": ("aten.prod.dim_int", 0, lambda x: x.prod(0)),
}


@dataclass(slots=True)
class Given:
    """What a rank gives to a collective."""

    rank: int
    operation: Operation  # its call
    values: list[int]  # copies of what it read


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
        like = next(ref.value for ref in _refs(args))
        known = self.recording.values[like]
        numbers = known.numbers if name == "aten.clone.default" else UNKNOWN
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


def brought(written: Written, given: Sequence[Given], shared: list[int]) -> list[int]:
    """One value for each tensor that a rank is brought.

    Args:
        written: the rank's call.
        given: what each rank of the group gave, in the order of the group.
        shared: what was made already and is the same for all ranks; is filled.
    """
    told = written.told
    kind, root = told["kind"], told["peer"]
    place = [each.rank for each in given].index(written.operation.rank or 0)
    each_gave = [each.values for each in given]
    is_list = bool(told.get("lists"))
    if kind == "broadcast":
        return each_gave[root]
    if kind == "scatter":
        return [each_gave[root][place]]
    if kind == "gather" and place != root:
        return []
    if kind == "gather" or (kind == "all_gather" and is_list):
        return [values[0] for values in each_gave]
    if kind == "all_to_all" and is_list:
        return [values[place] for values in each_gave]
    if kind == "all_to_all":
        return [_exchanged(written, given, place)]
    if kind == "reduce_scatter" and is_list:
        parts = [values[place] for values in each_gave]
        return [written.reduced(parts, _reduction(written, given, place))]
    if not shared:
        how = "" if kind == "all_gather" else _reduction(written, given, place)
        for values in zip(*each_gave, strict=True):
            shared.append(written.reduced(values, how) if how else written.joined(values))
    if kind != "reduce_scatter":
        return shared
    found = []
    for value in shared:
        count = math.prod(written.shape_of(value))
        flat, part = written.viewed(value, [count]), count // len(given)
        found.append(written.rows(flat, place * part, part))
    return found


def _exchanged(written: Written, given: Sequence[Given], place: int) -> int:
    """What a rank has after each has sent some rows of one tensor to each."""
    told, parts = written.told, []
    dim = told.get("shard_dim", 0)
    for each in given:
        size = written.shape_of(each.values[0])[dim]
        sent = each.operation.kwargs.get("rows_sent") or [size // len(given)] * len(given)
        parts.append(written.rows(each.values[0], sum(sent[:place]), sent[place], dim))
    return written.joined(parts, told.get("gather_dim", 0))


def _reduction(written: Written, given: Sequence[Given], place: int) -> str:
    """By which reduction: what torch does not tell is that which gives what was recorded."""
    told = str(written.told.get("reduce", "")).lower()
    if told:
        return told if told in REDUCTIONS else "sum"
    data, operation = written.recording.data, written.operation
    after = [*(x for _, x in operation.written), *(x for x in operation.made if x is not None)]
    read = [[ref.value for ref in reads_of(each.operation)] for each in given]
    if not after or after[0] not in data or any(x[0] not in data for x in read if x):
        return "sum"
    at = place if written.told.get("lists") else 0
    gave = torch.stack([wide(data[x[at]]).to(torch.float64).flatten() for x in read])
    result = wide(data[after[0]]).to(torch.float64).flatten()
    if gave.shape[1] != len(result):
        gave = gave.chunk(len(read), 1)[place]
    far = {
        how: float((reduced(gave) - result).nan_to_num().abs().sum())
        for how, (_, _, reduced) in REDUCTIONS.items()
    }
    return min(far, key=lambda how: far[how])


def _refs(args: tuple[Any, ...]) -> list[Ref]:
    return reads_of(Operation("", args, {}, (), (), "", None))
