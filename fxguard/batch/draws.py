"""What a compiled graph drew in one run: another compiled run tells, when somebody asks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fxguard.measure.at_hand import version_of
from fxguard.plan.plan import Place

__all__ = ["RANDOM", "Again", "Draws", "Found", "Repeated", "Result"]

RANDOM = "its graph draws random numbers under a compiler"

# What a random operation returned; of a dropout, which elements it keeps.
Result = Tensor | tuple[Tensor | None, ...]

# The results of the random operations of a graph, by place; or why they are unknown.
Found = Mapping[Place, Result] | str


class Repeated(NamedTuple):
    """A second run of a graph as it was compiled."""

    outputs: Sequence[Any]  # what the graph of the model returns
    drawn: Found
    statistics: Tensor  # the numbers of its checks


# Runs a graph again, given its arguments.
Again = Callable[[Sequence[Any]], Repeated]


@dataclass(slots=True, eq=False)
class Draws:
    """What a compiled graph drew in one run.

    A compiler has random numbers of its own: a second run in Python draws others.
    """

    # The graph for arguments like these, and whether the numbers of its checks are needed.
    compiled: Callable[[Sequence[Any], bool], Again]
    found: Found | None = None  # once a second run has told
    # What the first run returned, while it lives, with versions. Nothing is kept alive.
    _returned: Sequence[tuple[weakref.ref[Tensor], int | None] | None] = ()

    def has_returned(self, outputs: Sequence[Any]) -> None:
        """Note what the first run has returned."""
        self._returned = [
            (weakref.ref(x), version_of(x)) if isinstance(x, Tensor) else None for x in outputs
        ]

    def returned(self) -> Iterator[tuple[int, Tensor]]:
        """The outputs of the first run that still live and were not written, with positions."""
        for position, known in enumerate(self._returned):
            tensor = None if known is None else known[0]()
            if known is not None and tensor is not None and version_of(tensor) == known[1]:
                yield position, tensor

    def let_go(self) -> None:
        """Keep nothing of the run."""
        self.found = None
