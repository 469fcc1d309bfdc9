"""Whether outputs of real positions depend on padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxguard.dependence._asked import Asked
from fxguard.dependence._change import changed, size_of_change
from fxguard.dependence._contents import drawn
from fxguard.dependence._inputs import Inputs
from fxguard.dependence._places import OfPadding
from fxguard.dependence._told import Told
from fxguard.report.dependencies import Dependence
from fxguard.report.in_words import percent
from fxguard.report.late_progress import LateProgress

__all__ = ["padding"]


@dataclass(frozen=True)
class _Ended:
    """A sample with padding at one end."""

    sample: int
    length: int  # with padding
    start: int  # the first real position
    kept: int  # how many there are

    def cut(self, x: Tensor, y: Tensor) -> Tensor | None:
        """The part of a tensor with padding that corresponds to one without; None if none does."""
        if x.dim() != y.dim():
            return None
        for dim in range(x.dim()):
            size, other = x.shape[dim], y.shape[dim]
            if size != other:
                if size - other != self.length - self.kept:
                    return None
                x = x.narrow(dim, self.start, other)
        return x


def padding(asked: Asked, told: Told | None, progress: LateProgress) -> Dependence:
    """Whether outputs of real positions depend on padding.

    Each sample runs with its padding and without it. Where the model takes no other length, the
    contents of the padding are replaced.

    Args:
        asked: the model.
        told: what is padding; None if nothing tells.
        progress: shows how far the runs are.
    """
    if told is None:
        why = "none of these inputs tells what is padding (padding=)"
        return Dependence("padding", None, f"not asked: {why}")
    if not bool(told.padding.any()):
        return Dependence("padding", None, f"not asked: nothing is padding, by {told.by}")
    ended, ran = list(_ended(told.padding)), 0
    if ended and asked.draws(_alone(asked.inputs, ended[0].sample)):
        asked.why_not = "it draws random numbers, other ones for each length: eval() ends that"
        ended = []
    for at, each in enumerate(ended):
        progress.advance((2 + at / len(ended)) / 3)
        long = _alone(asked.inputs, each.sample)
        short = [_shortened(asked.inputs, i, x, each, told) for i, x in enumerate(long)]
        one, two = asked.output_for(long), asked.output_for(short)
        if one is None or two is None:
            continue
        ran += 1
        size = _largest(one, two, each, asked.limit_of_length)
        if size is not None:
            count = each.length - each.kept
            evidence = (
                f"the output of sample {each.sample} changes by {percent(size)} without its "
                f"{count} position{'s' if count > 1 else ''} of padding (by {told.by})"
            )
            return asked.found_by_length(evidence, long, short, each.cut)
    by_contents = None if told.in_data else _by_contents(asked, told)
    if ran and not (by_contents and by_contents.depends):
        samples = "1 sample" if ran == 1 else f"{ran} samples"
        evidence = (
            f"no real position depends on padding ({samples} ran with and without theirs, by "
            f"{told.by})"
        )
        return Dependence("padding", False, evidence)
    return by_contents or Dependence("padding", None, f"not answered: {asked.why_not}")


def _ended(is_padding: Tensor) -> Iterator[_Ended]:
    """Samples whose padding is all at one end."""
    length = is_padding.shape[1]
    for sample, row in enumerate(is_padding.tolist()):
        real = [i for i, each in enumerate(row) if not each]
        if not real or len(real) == length or real[-1] - real[0] + 1 != len(real):
            continue
        if real[0] == 0 or real[-1] == length - 1:
            yield _Ended(sample, length, real[0], len(real))


def _alone(inputs: Inputs, sample: int) -> list[Tensor]:
    """The inputs of one sample: twice, for a norm over the batch needs two."""
    return [
        x
        if (dim := inputs.sample_dim(x)) is None
        else x.index_select(dim, torch.tensor([sample] * 2, device=x.device))
        for x in inputs.tensors
    ]


def _shortened(inputs: Inputs, at: int, x: Tensor, each: _Ended, told: Told) -> Tensor:
    """An input without padding: cut in its dimension of positions, a mask in all of that length."""
    if at not in told.inputs:
        return x
    samples = inputs.sample_dim(inputs.tensors[at])
    dims = [d for d in range(x.dim()) if d != samples and x.shape[d] == each.length]
    for dim in dims if inputs.is_mask(at) else dims[:1]:
        x = x.narrow(dim, each.start, each.kept)
    return x


def _largest(
    one: Sequence[Tensor], two: Sequence[Tensor], each: _Ended, limit: float
) -> float | None:
    """The largest change of an output at a real position; None if nothing changed."""
    sizes = list[float]()
    for x, y in zip(one, two, strict=True):
        part = each.cut(x, y) if x.dim() else None
        found = None if part is None else changed(part, y, limit)
        if part is not None and found is not None and bool(found.any()):
            sizes.append(size_of_change(part, y))
    return max(sizes, default=None)


def _by_contents(asked: Asked, told: Told) -> Dependence | None:
    """The answer by other contents of the padding; None if there is none."""
    inputs, is_padding = asked.inputs, told.padding.cpu()
    batch, length = is_padding.shape
    tensors = list(inputs.tensors)
    for i, x in enumerate(tensors):
        samples = inputs.sample_dim(x)
        dims = [d for d in range(x.dim()) if d != samples and x.shape[d] == length]
        if samples is None or not dims or not inputs.is_data(i) or i not in told.inputs:
            continue
        shape = [1] * x.dim()
        shape[samples], shape[dims[0]] = batch, length
        where = is_padding if samples < dims[0] else is_padding.T
        tensors[i] = drawn(x, where.reshape(shape).expand(x.shape), 1)
    output = asked.output_for(tensors)
    if output is None:
        return None
    sizes = list[float]()
    for x, y in zip(asked.output, output, strict=True):
        found = changed(x, y) if x.dim() and len(x) == batch else None
        if found is None:
            continue
        if x.dim() > 1 and x.shape[1] == length:
            found &= ~told.padding.reshape([batch, length, *[1] * (x.dim() - 2)])
        if bool(found.any()):
            sizes.append(size_of_change(x[found], y[found]))
    if not sizes:
        evidence = f"no real position depends on what padding holds (by {told.by})"
        return Dependence("padding", False, evidence)
    evidence = f"outputs change by {percent(max(sizes))} with other padding (by {told.by})"
    return asked.found("padding", evidence, tensors, OfPadding(is_padding))
