"""The outputs of several ranks, put together as one process would return them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch

from fxguard.recording.recorded import Operation, Recording
from fxguard.recording.replay import wide
from fxguard.recording.written import Written

__all__ = ["with_whole_outputs"]

SAME = 16.0  # units of roundoff: replicas of one output differ by no more


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
            mean = _written(found, unlike).reduced(unlike, "avg")
            found.outputs.append((name, mean))
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
    if not x.is_floating_point():
        return torch.equal(x, y)
    allowed = SAME * torch.finfo(x.dtype).eps / 2
    x, y = wide(x), wide(y)
    return float((x - y).nan_to_num().norm()) <= allowed * float(y.nan_to_num().norm())


def _written(found: Recording, values: Sequence[int]) -> Written:
    told = {"kind": "outputs", "ranks": list(values)}
    return Written(found, Operation("", (), told, (), (), "", None))


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
    parts, written = list(values), _written(found, values)
    for dim in reversed(range(len(size))):
        count = counts[dim]
        if count > 1:
            starts = range(0, len(parts), count)
            parts = [written.joined(parts[at : at + count], dim) for at in starts]
    (whole,) = parts
    for dim, count in enumerate(size):
        if written.shape_of(whole)[dim] > count:  # what was added to make it divisible
            whole = written.rows(whole, 0, count, dim)
    return whole
