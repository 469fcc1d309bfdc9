"""Who else looks at the values of a batch while they are there: a tool's own notes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from fxguard.batch.keys import Key
from fxguard.graph.operations import Call

__all__ = ["BatchWatcher"]

Self = TypeVar("Self", bound="BatchWatcher")


class BatchWatcher:
    """The notes of one tool on one batch. Each method does nothing here.

    They are called in the thread of the batch, with fxguard's own arithmetic hidden.
    """

    # Whether tensors that a graph reads are measured before it runs, because it may write them.
    reads_inputs = False

    def of_loss(self: Self) -> Self | None:
        """New notes for a loss that is computed from outputs of the batch; None for none."""
        return None

    def measured(self, key: Key, tensor: Tensor) -> None:
        """Called with each value that no graph has measured."""

    def ran(self, call: Call, function: Callable[..., Any], result: Any, made: Key) -> None:
        """Called with each operation between graphs, and the key of its first result."""

    def turned_bad(
        self, call: Call, function: Callable[..., Any], path: tuple[int, ...], key: Key
    ) -> None:
        """Called with an operation between graphs that made something bad, where it was looked at.

        Args:
            call: the operation with its operands.
            function: what was called.
            path: where the bad tensor is in its result.
            key: the key of the bad tensor.
        """

    def renamed(self, keys: Mapping[Key, Key]) -> None:
        """Called when a batch forgets all values but these, which get other keys."""
