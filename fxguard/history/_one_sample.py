"""The one sample that makes the loss of a batch, found by second runs with others in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Sample", "sample_that_matters"]

LAYOUTS = 3  # ways to tell what in the data belongs to one sample
SAME = 0.1  # of the jump: how much a loss that is a mean may change with the order of samples
MOST_OF_IT = 0.6  # of the jump: what a single sample makes

LossOf = Callable[[Sequence[Tensor]], float]  # given data in the place of those of the batch


class Sample(NamedTuple):
    """A sample, and the loss that the batch has with another one in its place."""

    place: int
    loss: float


@dataclass(frozen=True, slots=True)
class _Layout:
    """How many samples there are, and how many rows of a tensor belong to each."""

    samples: int
    rows: dict[int, int]  # by the position among the data; the others belong to no sample

    def picked(self, data: Sequence[Tensor], samples: Sequence[int]) -> list[Tensor]:
        """The data, with these samples in the place of all."""
        found = list(data)
        for place, rows in self.rows.items():
            chosen = torch.tensor(samples, device=found[place].device)
            by_sample = found[place].unflatten(0, (self.samples, rows))
            found[place] = by_sample.index_select(0, chosen).flatten(0, 1)
        return found


def sample_that_matters(
    loss_of: LossOf, data: Sequence[Tensor], loss: float, usual: float
) -> Sample | None:
    """The sample without which a loss would be nearly the usual one; None if there is none.

    It is looked for by halves. That takes the logarithm of the number of samples, in second runs.

    Args:
        loss_of: makes a second run.
        data: of the batch.
        loss: of the batch.
        usual: what it would be.

    Raises:
        NotJudged: as ``loss_of`` does.
        Exception: likewise.
    """
    layout = next(
        (
            each
            for each in _layouts(data)
            if abs(loss_of(each.picked(data, _turned(each.samples))) - loss) < SAME * (loss - usual)
        ),
        None,
    )
    if layout is None:  # no mean over samples
        return None
    first, end = 0, layout.samples

    def loss_without(samples: range) -> float:
        others = [i for i in range(first, end) if i not in samples]
        others = others if len(others) > 0 else [i for i in range(layout.samples) if i != first]
        chosen = [others[i % len(others)] if i in samples else i for i in range(layout.samples)]
        return loss_of(layout.picked(data, chosen))

    while end - first > 1:
        middle = (first + end) // 2
        if loss - loss_without(range(first, middle)) > (loss - usual) / 2:
            end = middle
        else:
            first = middle
    found = loss_without(range(first, end))
    return Sample(first, found) if loss - found > MOST_OF_IT * (loss - usual) else None


def _turned(count: int) -> list[int]:
    return [*range(1, count), 0]


def _layouts(data: Iterable[Tensor]) -> Iterator[_Layout]:
    """What may belong to one sample: the rows of most tensors, and of those that join two sizes."""
    tensors = [(place, x) for place, x in enumerate(data) if x.dim() and x.shape[0] > 1]
    counts = Counter(x.shape[0] for _, x in tensors)
    for samples, _ in counts.most_common(LAYOUTS):
        sizes = {x.shape[1] for _, x in tensors if x.dim() > 1 and x.shape[0] == samples}
        rows = {
            place: x.shape[0] // samples
            for place, x in tensors
            if x.shape[0] in (samples, *(samples * size for size in sizes))
        }
        yield _Layout(samples, rows)
