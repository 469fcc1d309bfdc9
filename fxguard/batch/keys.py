"""Keys of the values of a batch: the event of a value, and its index there."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BETWEEN_GRAPHS", "Key"]

BETWEEN_GRAPHS = -1


class Key(NamedTuple):
    """One value of a batch."""

    event: int  # index into Batch.events of its graph run, or BETWEEN_GRAPHS
    value: int  # index into the values of that run's plan; between graphs into Batch.values

    @property
    def is_between_graphs(self) -> bool:
        """Whether the value was measured outside every graph."""
        return self.event == BETWEEN_GRAPHS
