"""An input of a batch that lies far from the others in the sample that overflowed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fxguard.findings import Fix
from fxguard.measure.at_hand import own_arithmetic
from fxguard.plan.plan import Step, Value
from fxguard.records import Role

__all__ = ["fix_of_outlier"]

MOST_STEPS = 64  # in one walk
LEAST_SAMPLES = 8  # of which a median tells something
FAR = 20.0  # times the median distance from the median, from which a number is far


def fix_of_outlier(
    steps: Sequence[Step],
    values: Sequence[Value],
    read: Sequence[int],
    sample: int,
    tensor_of: Callable[[int], Tensor | None],
    name_of: Callable[[int], str],
) -> tuple[Fix, ...]:
    """Which input to look at; () if none of those that led to the overflow is far from the others.

    Args:
        steps: of a graph.
        values: what they read and made.
        read: what the operation that overflowed has read.
        sample: the sample in which it overflowed.
        tensor_of: gives the tensor of an input, if it is still there.
        name_of: gives its name: ``kelvin``, or ``argument `kelvin` of Rate.forward``.
    """
    found: list[tuple[float, str, float, float]] = []
    for value in _inputs(steps, values, read):
        tensor = tensor_of(value)
        seen = None if tensor is None else _outlier(tensor, sample)
        if seen is not None:
            found.append((seen[0], name_of(value), *seen[1:]))
    if not found:
        return ()
    _, name, number, median = max(found)
    if in_words := re.match(r"argument `(\w+)` of ", name):
        name = in_words[1]
    text = f"look at `{name}`, {number:.4g} in sample {sample}, where the batch's median is "
    unit = f"{median:.4g}: what overflowed is computed from it, perhaps of another unit"
    return (Fix("advice", text + unit),) if name.isidentifier() else ()


def _inputs(steps: Sequence[Step], values: Sequence[Value], read: Sequence[int]) -> list[int]:
    makers = {value: step for step in steps for value in step.outputs}
    todo, seen, found = list(read), set(read), list[int]()
    while todo and len(seen) <= MOST_STEPS:
        value = todo.pop(0)
        step = makers.get(value)
        if step is None:
            found += [value] if values[value].role is Role.INPUT else []
            continue
        todo += [each for each in step.inputs if each not in seen]
        seen.update(step.inputs)
    return found


def _outlier(tensor: Tensor, sample: int) -> tuple[float, float, float] | None:
    """How far one of a batch's numbers is from their median, that number, and the median."""
    is_one_each = tensor.is_floating_point() and tensor.dim() > 0
    is_one_each = is_one_each and LEAST_SAMPLES <= tensor.shape[0] == tensor.numel()
    if not is_one_each or not sample < tensor.shape[0]:
        return None
    with own_arithmetic(), torch.no_grad():
        numbers = tensor.detach().reshape(-1).double()
        median = numbers.median()
        spread = (numbers - median).abs().median().item()
        number, middle = numbers[sample].item(), median.item()
    distance = abs(number - middle)
    is_far = spread > 0 and distance > FAR * spread
    return (distance / spread, number, middle) if is_far else None
