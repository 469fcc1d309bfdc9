"""What a collective brings to a rank, as operations of ATen on what the ranks gave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxguard.recording.recorded import Operation
from fxguard.recording.replay import reads_of, wide
from fxguard.recording.written import REDUCTIONS, Written

__all__ = ["Given", "brought"]


@dataclass(slots=True)
class Given:
    """What a rank gives to a collective."""

    rank: int
    operation: Operation  # its call
    values: list[int]  # copies of what it read


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
