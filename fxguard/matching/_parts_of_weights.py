"""Weights of a rank that are parts of A's, and what of A's values they are multiplied with."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fxguard.matching._exact import Exact, is_relabeling, made_by
from fxguard.matching._weights import Twin
from fxguard.recording.recorded import Operation
from fxguard.recording.replay import reads_of

__all__ = ["PartsOfWeights"]


class PartsOfWeights:
    """The weights of B's ranks that have fewer elements than A's, and views of them.

    Args:
        twins: of B's weights.
        other: A.
    """

    def __init__(self, twins: Mapping[int, Twin], other: Exact) -> None:
        self._other = other
        self._twins = {
            value: twin
            for value, twin in twins.items()
            if twin.content.numel() < other.values[twin.of[0]].numel()
        }

    def note(self, operation: Operation) -> None:
        """Follow a part through views and casts."""
        reads = reads_of(operation)
        if len(reads) == 1 and is_relabeling(operation) and reads[0].value in self._twins:
            twin = self._twins[reads[0].value]
            self._twins.update((value, twin) for value in made_by(operation))

    def reads_rows(self, operation: Operation) -> bool:
        """Whether a rank's operation reads a part: rows of a table have other numbers there."""
        is_of_rank = operation.rank is not None
        return is_of_rank and any(ref.value in self._twins for ref in reads_of(operation))

    def columns(
        self, weights: frozenset[int], operation: Operation, theirs: Tensor, like: Tensor
    ) -> Tensor | None:
        """The columns of a value of A that a rank's part of a weight is multiplied with.

        Args:
            weights: of A, that the operation reads.
            operation: of B.
            theirs: what A's operation reads.
            like: what B's reads.

        Returns:
            A view of ``theirs``; None if they are not known.
        """
        for ref in reads_of(operation) if operation.rank is not None else ():
            twin = self._twins.get(ref.value)
            if twin is None or twin.part is None or not weights.issuperset(twin.of):
                continue
            dim, start = twin.part
            size, whole = twin.content.shape[dim], self._other.values[twin.of[0]].shape[dim]
            if theirs.shape[-1:] == (whole,) and theirs.numel() // whole * size == like.numel():
                return theirs.narrow(-1, start, size)
        return None
