"""Copies of the weights of the last steps, to run a batch whose loss jumps with each of them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Module

from fxguard.graph.collectives import is_of_ranks
from fxguard.history._kept_batches import form_of
from fxguard.measure.at_hand import own_arithmetic

__all__ = ["KeptWeights"]

MOST = 4  # steps


@dataclass(frozen=True, slots=True)
class _Copy:
    numbers: Tensor
    original: weakref.ref[Tensor]


class KeptWeights:
    """The weights of the last steps, as the loss of each was computed.

    They take the memory of as many copies as there are steps. Shards that ranks hold are left out:
    a run with them would wait for other ranks.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, list[_Copy]]] = deque(maxlen=MOST)  # the last at the end

    def keep(self, step: int, model: Module) -> None:
        """Copy the weights of a step, in the place of the oldest copies.

        Args:
            step: the step that runs; its first call counts.
            model: whose weights.
        """
        if self._steps and self._steps[-1][0] == step:
            return
        oldest = self._steps.popleft()[1] if len(self._steps) == MOST else []
        room = _by_identity(oldest)
        weights = [weight for weight in model.parameters() if not is_of_ranks(weight)]
        with own_arithmetic():
            copies = [_Copy(_copied(x, room.get(id(x))), weakref.ref(x)) for x in weights]
        self._steps.append((step, copies))

    def before(self, step: int) -> Iterator[tuple[int, dict[int, Tensor]]]:
        """The weights of earlier steps, the last first, by the identity of the weights of now."""
        for at, copies in reversed(self._steps):
            if at < step:
                yield at, _by_identity(copies)


def _by_identity(copies: Iterable[_Copy]) -> dict[int, Tensor]:
    """The copies of the weights that are still there."""
    held = ((copy.original(), copy.numbers) for copy in copies)
    return {id(weight): numbers for weight, numbers in held if weight is not None}


def _copied(weight: Tensor, room: Tensor | None) -> Tensor:
    fits = room is not None and form_of(room) == form_of(weight)
    return room.copy_(weight) if room is not None and fits else weight.detach().clone()
