"""Whether the output of a sample depends on other samples of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxguard.dependence._asked import Asked
from fxguard.dependence._change import changed, size_of_change
from fxguard.dependence._contents import WAYS, drawn, spread
from fxguard.dependence._inputs import Inputs
from fxguard.dependence._places import OfOneSample
from fxguard.graph.wide_form import is_float
from fxguard.report.dependencies import Dependence
from fxguard.report.in_words import percent
from fxguard.report.late_progress import LateProgress

__all__ = ["samples"]

MOST = 16  # samples that are replaced
PRIMES = (7, 11, 13, 17, 19, 23)


@dataclass(frozen=True)
class _Batch:
    """The samples of inputs and outputs."""

    count: int
    dim: int
    outputs: tuple[int, ...]  # that hold them, by index
    groups: Tensor | None = None  # the sample of each row of inputs, as for a batch of graphs


def samples(asked: Asked, progress: LateProgress) -> Dependence:
    """Whether the output of a sample depends on another one.

    Args:
        asked: the model.
        progress: shows how far the runs are.
    """
    batch = _batch_of(asked)
    if isinstance(batch, str):
        return Dependence("samples", None, f"not asked: {batch}")
    chosen = spread(batch.count, MOST)
    pairs, ran = set[tuple[int, int]](), False
    first: tuple[int, int, Sequence[Tensor], float] | None = None
    for at, sample in enumerate(chosen):
        progress.advance(at / len(chosen) / 3)
        for way in range(WAYS):
            tensors = _with_another(asked.inputs, batch, sample, way)
            output = None if tensors is None else asked.output_for(tensors)
            if tensors is None or output is None:
                continue
            ran = True
            for other, size in _changed(batch, asked.output, output, sample):
                first = first or (other, sample, tensors, size)
                pairs.add((other, sample))
    if not ran:
        return Dependence("samples", None, f"not answered: {asked.why_not}")
    if first is None:
        count = f"{len(chosen)} of {batch.count}"
        count = f"all {batch.count}" if len(chosen) == batch.count else count
        evidence = f"no output depends on another sample ({count} were replaced)"
        return Dependence("samples", False, evidence)
    other, sample, replaced, change = first
    evidence = (
        f"the output of sample {other} depends on sample {sample}: it changes by {percent(change)} "
        f"when that is replaced ({len(pairs)} of {len(chosen) * (batch.count - 1)} pairs)"
    )
    if batch.groups is not None:
        owners = tuple(_owners(asked.inputs, batch.groups))
        places = OfOneSample(batch.count, sample, owners)
        return asked.found("samples", evidence, replaced, places)
    more = _more_samples(asked, batch, sample, replaced)
    if more is None:
        places = OfOneSample(batch.count, sample)
        return asked.found("samples", evidence, replaced, places)
    size, own, others = more
    return asked.found("samples", evidence, others, OfOneSample(size, sample), own)


def _more_samples(
    asked: Asked, batch: _Batch, sample: int, replaced: Sequence[Tensor]
) -> tuple[int, list[Tensor], list[Tensor]] | None:
    """The same leak among so many samples that no other dimension can be taken for theirs.

    Returns:
        How many they are, the inputs, and those with the sample replaced; None if these do not run,
        or do not leak, as where the largest of all samples is there twice.
    """
    inputs = asked.inputs
    sizes = {n for x in (*inputs.tensors, *asked.output) for n in x.shape} - {batch.count}
    fitting = (n for n in PRIMES if n >= batch.count and all(size % n for size in sizes))
    size = next(fitting, None)
    if size is None:
        return None
    own, others = list[Tensor](), list[Tensor]()
    for x, other in zip(inputs.tensors, replaced, strict=True):
        dim = inputs.sample_dim(x)
        index = torch.arange(size, device=x.device) % inputs.batch
        own.append(x if dim is None else x.index_select(dim, index))
        others.append(own[-1])
        if dim is not None:
            others[-1] = own[-1].clone()
            others[-1].select(dim, sample).copy_(other.select(dim, sample))
    one, two = asked.output_for(own), asked.output_for(others)
    if one is None or two is None:
        return None
    leaks = any(True for _ in _changed(replace(batch, count=size), one, two, sample))
    return (size, own, others) if leaks else None


def _batch_of(asked: Asked) -> _Batch | str:
    """The samples, or why there is nothing to ask."""
    count, dim = asked.inputs.batch, asked.inputs.samples
    if count < 2:
        return "it takes a batch of at least 2 samples"
    held = [i for i, x in enumerate(asked.output) if x.dim() > dim and x.shape[dim] == count]
    if held:
        return _Batch(count, dim, tuple(held))
    first = next((x for x in asked.output if x.dim()), None)
    groups = None if first is None or len(first) < 2 else asked.inputs.groups(len(first))
    if first is None or groups is None:
        return f"no output holds {count} samples in dimension {dim}"
    held = [i for i, x in enumerate(asked.output) if x.dim() and len(x) == len(first)]
    return _Batch(len(first), 0, tuple(held), groups)


def _with_another(inputs: Inputs, batch: _Batch, sample: int, way: int) -> list[Tensor] | None:
    """The inputs with other contents of a sample; None if there are none."""
    if batch.groups is not None:
        return [_of_group(x, batch.groups == sample, way) for x in inputs.tensors]
    return _swapped(inputs, sample) if way == 0 else _drawn(inputs, sample, way)


def _of_group(x: Tensor, rows: Tensor, way: int) -> Tensor:
    if not is_float(x) or not x.dim() or len(x) != len(rows):
        return x
    return drawn(x, rows.reshape(-1, *[1] * (x.dim() - 1)).expand(x.shape), way)


def _swapped(inputs: Inputs, sample: int) -> list[Tensor] | None:
    """The contents of another sample, in all inputs: lengths, masks and data fit each other."""
    for step in range(1, inputs.batch):
        index = torch.arange(inputs.batch)
        index[sample] = (sample + step) % inputs.batch
        tensors = [
            x if (dim := inputs.sample_dim(x)) is None else x.index_select(dim, index.to(x.device))
            for x in inputs.tensors
        ]
        if any(not torch.equal(x, y) for x, y in zip(tensors, inputs.tensors, strict=True)):
            return tensors
    return None


def _drawn(inputs: Inputs, sample: int, way: int) -> list[Tensor]:
    """Contents that no sample has; what counts or masks is left as it is."""
    tensors = list(inputs.tensors)
    for i, x in enumerate(tensors):
        dim = inputs.sample_dim(x)
        if dim is None or not inputs.is_data(i):
            continue
        where = torch.zeros(x.shape, dtype=torch.bool)
        where.select(dim, sample).fill_(True)
        tensors[i] = drawn(x, where, way)
    return tensors


def _changed(
    batch: _Batch, own: Sequence[Tensor], others: Sequence[Tensor], sample: int
) -> Iterator[tuple[int, float]]:
    """Samples besides one whose output changed, and by how much."""
    for i in batch.outputs:
        one, two = own[i], others[i]
        found = changed(one, two)
        if found is None or one.shape[batch.dim] != batch.count:
            continue
        along = found.movedim(batch.dim, 0).reshape(batch.count, -1).any(1)
        for other in along.nonzero().flatten().tolist():
            if other != sample:
                pair = (x.select(batch.dim, other) for x in (one, two))
                yield other, size_of_change(*pair)


def _owners(inputs: Inputs, groups: Tensor) -> Iterator[Tensor]:
    """The sample of each node, and of each edge, of a batch of graphs."""
    yield groups
    for x in inputs.tensors:
        if x.dim() == 2 and len(x) == 2 and not is_float(x) and x.numel() and x.max() < len(groups):
            of_edges = groups[x[0].cpu()]
            yield of_edges
            yield torch.cat([of_edges, groups])  # with an edge from each node to itself
