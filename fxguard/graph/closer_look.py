"""A closer look at one operation that made something bad: its numbers at the first bad element."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxguard import trees
from fxguard.forgiving import or_else, theirs
from fxguard.graph import tables
from fxguard.graph.alignment import no_alignment
from fxguard.graph.attention_masks import hide_a_row
from fxguard.graph.evidence import Evidence, Operand
from fxguard.graph.nodes import leaves
from fxguard.graph.operations import Call
from fxguard.graph.poles import ATTENTION, PRODUCTS, plain
from fxguard.graph.wide_form import NotJudged, Ran, is_float, wide_result, widened
from fxguard.measure import traceable
from fxguard.measure.at_hand import dtype_of
from fxguard.measure.details import are_counts, least_above_zero

__all__ = ["evidence_alone", "evidence_at", "evidence_of"]


def evidence_of(
    call: Call,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    made: Tensor,
    *,
    same: Tensor | None = None,
    wide_args: Sequence[Any] | None = None,
    wide_kwargs: Mapping[str, Any] | None = None,
    wide: Tensor | None = None,
    samples: int | None = None,
    not_judged: str = "",
) -> Evidence | None:
    """What an operation read and made at the first bad element, or at the first NaN if it made one.

    Args:
        call: the operation.
        args: its arguments as the model had them before it ran.
        kwargs: likewise.
        made: what it made, in the model's form.
        same: the same result in float64 on the same operands.
        wide_args: its arguments in the wide form.
        wide_kwargs: likewise.
        wide: its result on those.
        samples: the number of samples in the batch of the model's inputs.
        not_judged: why ``same`` or ``wide`` is not known.

    Returns:
        None if no element is bad. If there is a NaN, infinite elements are not counted.
    """
    bad = torch.isnan(made)
    if not bool(bad.any()):
        bad = torch.isinf(made)
    found = bad.nonzero()
    if not len(found):
        return None
    index = tuple(int(i) for i in found[0])
    evidence = evidence_at(
        index,
        call,
        args,
        kwargs,
        made,
        same=same,
        wide_args=wide_args,
        wide_kwargs=wide_kwargs,
        samples=samples,
    )
    return replace(
        evidence,
        wide=_at(wide, made, index),
        needed=None if same is None or not is_float(same) else _needed(same),
        share=len(found),
        alike=_alike(bad, same, index),
        shared=_shared(found, made),
        masked_row=_reads_masked_row(call, args, kwargs),
        alignment=_alignment(call, args, kwargs),
        not_judged=not_judged,
    )


def _alike(bad: Tensor, same: Tensor | None, index: tuple[int, ...]) -> int | None:
    """How many bad elements are finite in float64 if the first is, or are not if it is not."""
    if same is None or same.shape != bad.shape:
        return None
    finite = same.isfinite()
    return int((bad & (finite == finite[index])).sum())


def evidence_at(
    index: tuple[int, ...],
    call: Call,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    made: Tensor,
    *,
    same: Tensor | None = None,
    wide_args: Sequence[Any] | None = None,
    wide_kwargs: Mapping[str, Any] | None = None,
    samples: int | None = None,
) -> Evidence:
    """What an operation read and made at one element; the arguments are those of evidence_of."""
    others: Iterator[Any] = iter(())
    if wide_args is not None:
        others = (other for _, other in _given(wide_args, wide_kwargs or {}))
    part = _Part(call, args, kwargs, made, index)
    operands = tuple(
        part.operand(name, value, next(others, None)) for name, value in _given(args, kwargs)
    )
    first_is_sample = made.dim() > 1 and samples is not None and made.shape[0] == samples > 1
    return Evidence(
        kind=call.kind,
        dtype=dtype_of(made),
        index=index,
        number=_number(made[index]),
        operands=operands,
        same=_at(same, made, index),
        numel=made.numel(),
        dims=made.dim(),
        sample=index[0] if first_is_sample else None,
    )


def evidence_alone(
    call: Call, function: Callable[..., Any], result: Any, path: tuple[int, ...] = ()
) -> Evidence | None:
    """The same for one operation that ran by itself, without a wide form.

    Args:
        call: the operation, with the tensors that it read and has not written since.
        function: the called function.
        result: what it returned.
        path: indices of the requested item of the result.
    """
    args, kwargs = call.args, call.kwargs
    same: Any = None
    reason = f"{call.kind} draws random numbers" if call.random else ""
    if not call.random:
        ran = Ran(call, function, function, args, kwargs, result)
        try:
            # The function may write its arguments.
            wide_args, wide_kwargs = trees.tree_map_only(
                Tensor, torch.clone, widened((args, dict(kwargs)), torch.float64)
            )
            same = wide_result(ran, wide_args, wide_kwargs, torch.float64)
        except NotJudged as error:
            reason = str(error)
    for index in path:
        result, same = result[index], None if same is None else same[index]
    same = same if is_float(same) else None
    return evidence_of(call, args, kwargs, result, same=same, not_judged=reason)


def _given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers of a call, with the names of those given by keyword."""
    for name, value in (*(("", arg) for arg in args), *kwargs.items()):
        for leaf in leaves(value):
            is_number = isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
            if is_number or (isinstance(leaf, Tensor) and leaf.dtype is not torch.bool):
                yield name, leaf


class _Part:
    """Finds the elements of an operand from which the first bad element of a result is made."""

    def __init__(
        self,
        call: Call,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        made: Tensor,
        index: tuple[int, ...],
    ) -> None:
        self.kind = call.kind
        self.made = made
        self.index = index
        tensors = [x for _, x in _given(args, kwargs) if isinstance(x, Tensor)]
        self.first = tensors[0] if tensors else None
        self.second = tensors[1] if len(tensors) > 1 else None
        self.dims = _dims(args, kwargs, self.first, self.kind)
        shapes = [x.shape for x in tensors]
        self.is_product = call.kind in tables.MATRIX_PRODUCTS
        is_by_row = call.kind in tables.BY_ROW or plain(call.kind) in PRODUCTS
        self.by_element = not is_by_row and _broadcast(shapes) == made.shape

    def operand(self, name: str, value: Any, other: Any) -> Operand:
        """The part of one operand from which the first bad element is made.

        Args:
            name: name of the parameter, if it was given by keyword.
            value: the operand as the model had it.
            other: the operand in the wide form; None if not known.
        """
        if not isinstance(value, Tensor):
            number = float(value)
            return Operand(number, number, number, number, name=name)
        part = self.of(value, value)
        low, high = _range(part)
        wide_low, wide_high = (None, None)
        if isinstance(other, Tensor) and other.shape == value.shape:
            wide_low, wide_high = _range(self.of(other, value))
        is_whole = or_else(False, are_counts, value, -1 if low == -1 else 0)
        dtype, count = dtype_of(value), part.numel()
        is_all = count == value.numel() and sum(size > 1 for size in value.shape) > 1
        unknown: float | None = None
        is_given = low == 0 and not value.requires_grad
        least = or_else(unknown, least_above_zero, value) if is_given else None
        return Operand(
            low,
            high,
            wide_low,
            wide_high,
            count,
            dtype,
            name,
            is_whole,
            is_all,
            least,
            value.requires_grad,
        )

    def of(self, value: Tensor, given: Tensor) -> Tensor:
        """The elements of an operand, in either form, given its original shape."""
        if self.by_element:
            return value.expand(self.made.shape)[self.index]
        if self.is_product and self.second is not None and self.first is not None:
            return self.of_product(value, given)
        if self.first is None or value.shape != self.first.shape or self.dims is None:
            return value
        place: list[Any] = list(self.index)
        if self.made.dim() == value.dim():  # softmax, and reductions that keep their dimensions
            for dim in self.dims:
                place[dim] = slice(None)
        elif self.made.dim() + len(self.dims) == value.dim():
            for dim in sorted(self.dims):
                place.insert(dim, slice(None))
        else:
            return value
        return value[tuple(place)]

    def of_product(self, value: Tensor, given: Tensor) -> Tensor:
        """The row of the first operand, and the column of the second."""
        first, second = self.first, self.second
        assert first is not None
        assert second is not None
        if self.kind == "linear":
            if self.made.shape not in ((*first.shape[:-1], *second.shape[:1]), first.shape):
                return value  # the gradient of a weight, which is made from all of them
            if given is not first and given is not second:  # the bias, of any shape that fits
                return value.expand(self.made.shape)[self.index]
            last = self.index[-1] if self.made.dim() == first.dim() else None
            if value.shape == first.shape and given is not second and last is not None:
                return value[self.index[:-1]]
            return value if last is None else value[last]
        if value.dim() < 2 or self.made.dim() < 2:
            return value
        whole = value.expand(self.made.shape[:-2] + value.shape[-2:])
        row: Any = self.index[:-1]
        column: Any = (*self.index[:-2], slice(None), self.index[-1])
        is_first = given is not second and value.shape == first.shape
        return whole[row if is_first else column]


def _dims(
    args: Sequence[Any], kwargs: Mapping[str, Any], first: Tensor | None, kind: str
) -> tuple[int, ...] | None:
    """The dimensions along which an operation reduces or normalizes; None if not known."""
    if first is None:
        return None
    if kind in tables.LAST_DIMS:  # these are given a shape
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        count = len(shape) if isinstance(shape, (tuple, list, torch.Size)) else 1
        return tuple(range(first.dim() - count, first.dim()))
    position = 2 if kind in tables.DIM_IS_THIRD else 1
    given = kwargs.get("dim", args[position] if len(args) > position else None)
    if kind == "_weight_norm":  # its `dim` is the one that is not summed over
        return tuple(dim for dim in range(first.dim()) if dim != given)
    if isinstance(given, int) and not isinstance(given, bool):
        given = (given,)
    if isinstance(given, (tuple, list)) and all(isinstance(dim, int) for dim in given) and given:
        return tuple(dim % max(first.dim(), 1) for dim in given)
    return tuple(range(first.dim()))


def _broadcast(shapes: Sequence[torch.Size]) -> torch.Size | None:
    try:
        shape: torch.Size = torch.broadcast_shapes(*shapes)
        return shape
    except RuntimeError:
        return None


def _range(part: Tensor) -> tuple[float, float]:
    """The smallest and the largest of some elements; NaN if one is NaN."""
    if part.numel() == 0:
        return math.nan, math.nan
    if part.numel() == 1:
        return (_number(part.reshape(())),) * 2
    real = part.real if part.is_complex() else part
    low, high = torch.aminmax(real.to(torch.float64))
    return float(low), float(high)


def _shared(found: Tensor, made: Tensor) -> tuple[tuple[int, int, int], ...]:
    """The dimensions along which all bad elements have one index, of several."""
    if len(found) < 2:
        return ()
    pairs = zip(found.amin(0).tolist(), found.amax(0).tolist(), strict=True)
    same = ((dim, low) for dim, (low, high) in enumerate(pairs) if low == high)
    return tuple((dim, index, made.shape[dim]) for dim, index in same if made.shape[dim] > 1)


def _at(result: Tensor | None, made: Tensor, index: tuple[int, ...]) -> float | None:
    if result is None or result.shape != made.shape:
        return None
    return _number(result[index])


def _alignment(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    if plain(call.kind) != "ctc_loss":
        return ""
    return or_else("", no_alignment, args, kwargs)


def _needed(same: Tensor) -> float:
    largest = float(same.detach().abs().max()) if same.numel() else 0.0
    return largest if math.isfinite(largest) else math.inf


def _number(element: Tensor) -> float:
    return float(element.detach().abs() if element.is_complex() else element.detach())


def _reads_masked_row(call: Call, args: Any, kwargs: Any) -> bool:
    """Whether a floating-point operand holds a row of nothing but -inf, or masks make one of it.

    The row is along ``dim`` if the operation was given one, else along the last dimension.
    """
    given = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dim = given if isinstance(given, int) and not isinstance(given, bool) else -1
    try:
        if plain(call.kind) == ATTENTION and hide_a_row(args, kwargs):
            return True
        return any(_has_masked_row(value, dim) for value in trees.tree_leaves((args, kwargs)))
    except theirs():  # a subclass or a layout that supports few operations
        return False


def _has_masked_row(value: Any, dim: int) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype in traceable.FLOATS
        and value.layout is torch.strided
        and -value.dim() <= dim < value.dim()
        and bool((value == -math.inf).all(dim=dim).any())
    )
