"""The outputs of several ranks, put together as one process would return them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch

from fxguard.recording.recorded import Numbers, Operation, Recording, Ref, Value
from fxguard.recording.replay import reads_of, wide

__all__ = ["with_whole_outputs"]

SAME = 1e-2  # relative: replicas of one output differ by roundings
UNKNOWN = Numbers(math.nan, math.nan, math.nan, math.nan, 0)


def with_whole_outputs(b: Recording, a: Recording) -> Recording:
    """A recording of ranks whose outputs have the sizes of another one's.

    Parts that the ranks return stand one behind the other. Where each returns a number of its own,
    of its part of the batch, the output is their mean.

    Args:
        b: of several ranks.
        a: of one process.
    """
    sizes = [a.values[value].shape for _, value in a.outputs]
    by_name: dict[str, list[int]] = defaultdict(list)
    for name, value in b.outputs:
        by_name[name.rpartition(" of rank ")[0]].append(value)
    found = replace(b, values=list(b.values), operations=list(b.operations), outputs=[])
    for name, values in by_name.items():
        unlike = _unlike(b, values)
        shape = b.values[values[0]].shape
        if len(unlike) == 1 or any(b.values[x].shape != shape for x in unlike):
            found.outputs += [each for each in b.outputs if each[1] in values]
        elif shape in sizes and not shape:
            found.outputs.append((name, _mean(found, unlike)))
        else:
            whole = next((x for size in sizes if (x := _joined(found, unlike, size))), None)
            known = [each for each in b.outputs if each[1] in values]
            found.outputs += known if whole is None else [(name, whole)]
    return found


def _unlike(b: Recording, values: Sequence[int]) -> list[int]:
    """Those that are no replica of one before."""
    kept: list[int] = []
    for value in values:
        x = b.data.get(value)
        if x is None or not any(_is_near(x, b.data[other]) for other in kept if other in b.data):
            kept.append(value)
    return kept


def _is_near(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.shape != y.shape:
        return False
    x, y = wide(x), wide(y)
    if not x.is_floating_point():
        return torch.equal(x, y)
    return float((x - y).nan_to_num().norm()) <= SAME * float(y.nan_to_num().norm())


def _mean(found: Recording, values: Sequence[int]) -> int:
    shape = found.values[values[0]].shape
    stack = _made(found, "aten.stack.default", ([Ref(x) for x in values],), (len(values), *shape))
    return _made(found, "aten.mean.dim", (Ref(stack), [0]), shape)


def _joined(found: Recording, values: Sequence[int], size: tuple[int, ...]) -> int | None:
    """The parts as one value of a size: in rows of a grid, the last dimension first."""
    shape = found.values[values[0]].shape
    if len(shape) != len(size) or shape == size:
        return None
    counts = [
        math.ceil(whole / part) if part else 0 for whole, part in zip(size, shape, strict=True)
    ]
    if math.prod(counts) != len(values):
        return None
    parts = list(values)
    for dim in reversed(range(len(size))):
        count = counts[dim]
        if count > 1:
            parts = [_cat(found, parts[at : at + count], dim) for at in range(0, len(parts), count)]
    (whole,) = parts
    for dim, count in enumerate(size):
        known = list(found.values[whole].shape)
        if known[dim] > count:  # what was added to make it divisible
            known[dim] = count
            whole = _made(found, "aten.slice.Tensor", (Ref(whole), dim, 0, count), tuple(known))
    return whole


def _cat(found: Recording, values: Sequence[int], dim: int) -> int:
    shape = list(found.values[values[0]].shape)
    shape[dim] *= len(values)
    return _made(found, "aten.cat.default", ([Ref(x) for x in values], dim), tuple(shape))


def _made(found: Recording, name: str, args: tuple[object, ...], shape: tuple[int, ...]) -> int:
    first = reads_of(Operation(name, args, {}, (), (), "", None))[0].value
    found.values.append(Value(shape, found.values[first].dtype, UNKNOWN))
    value = len(found.values) - 1
    label = "outputs of all ranks"
    found.operations.append(Operation(name, args, {}, (value,), (), "", None, None, label))
    return value
