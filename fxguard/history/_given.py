"""Inputs or targets that are to blame where an operation, or the loss, left its band first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torch import Tensor

from fxguard.history._bands import NO_DRIFT
from fxguard.history._series import BUFFER, Series

__all__ = ["compares", "given", "kept_beside"]

MOST = 3  # targets that are named
SUMS = ("amax", "max", "mean", "norm", "sum")  # their largest magnitude tells more than elements'
LOSSES = ("loss", "entropy", "nll")  # in names of operations that compare outputs with targets


def given(series: list[Series], table: Tensor, first: Series) -> list[Series]:
    """What is to blame where an operation left its band first: inputs, or targets and inputs.

    The numbers of an operation that reads what the model is given, before any weight or with
    weights that are as they were, change with it. So does a loss, if the outputs have not changed:
    then the targets are others, or belong to other inputs.

    Args:
        series: the columns.
        table: the numbers.
        first: what left its band.
    """
    inputs = next(([one] for one in series if one.kind == "input"), [])
    if first.kind == "loss" or (first.kind == "operation" and compares(series, first)):
        targets = [*islice(_targets(series, table, first), MOST)]
        return [*targets, *inputs] if targets else []
    if first.kind == "operation" and _reads_inputs_alone(series, first):
        return [] if kept_beside(series, table, first) else inputs
    return []


def kept_beside(series: list[Series], table: Tensor, operation: Series) -> list[Series]:
    """What the module of an operation keeps from step to step, and writes: it may read that."""
    module = operation.what.rpartition(" ")[0]
    if operation.kind != "operation" or not module:
        return []
    return [
        one
        for place, one in enumerate(series)
        if one.kind == "drift" and one.detail == BUFFER
        if one.what.rpartition(".")[0] == module
        if float(table[:-1, place].nanmedian().log2()) > NO_DRIFT
    ]


def _targets(series: list[Series], table: Tensor, first: Series) -> Iterator[Series]:
    """What torch's losses compare with, and what the line reads besides, unless it stays."""
    known = set[str]()
    for place, one in sorted(enumerate(series), key=lambda each: bool(each[1].source)):
        is_near = not one.source or first.kind == "loss" or one.source == first.source
        if one.kind == "target" and is_near and one.what not in known:
            column = table[:, place]
            column = column[column == column]
            if not one.source or bool((column != column[:1]).any()):
                known.add(one.what)
                yield one


def compares(series: list[Series], operation: Series) -> bool:
    """Whether an operation compares outputs with targets, or sums up what one has made."""
    name = operation.what.rpartition(" ")[2]
    if any(part in name for part in LOSSES):
        return True
    targets = min((one.order for one in series if one.kind == "target"), default=operation.order)
    if not targets < operation.order:
        return False
    between = any(
        one.kind == "operation" and targets < one.order < operation.order for one in series
    )
    return not between or name in SUMS


def _is_weight(series: Series) -> bool:
    return series.kind == "weight" and series.detail != BUFFER


def _reads_inputs_alone(series: list[Series], operation: Series) -> bool:
    """Whether no operation before this one belongs to a module that has weights."""
    weights = filter(_is_weight, series)
    owners = {one.what.rpartition(".")[0] for one in weights}
    weighted = (
        one.order
        for one in series
        if one.kind == "operation" and one.what.rpartition(" ")[0] in owners
    )
    return operation.order <= min(weighted, default=operation.order)
