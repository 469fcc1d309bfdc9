"""What the name of an operation says of its series."""

from __future__ import annotations

from fxguard.graph.exchanges import KINDS
from fxguard.graph.tables import MOVES, SELECTS
from fxguard.history._series import Series

__all__ = ["is_of_ranks", "selects"]

HANDS_ON = SELECTS | MOVES


def selects(series: Series) -> bool:
    """Whether it is of an operation that hands on elements of what it reads, and makes none.

    Which one runs may depend on the form in which a graph was captured.
    """
    return series.kind == "operation" and _name(series) in HANDS_ON


def is_of_ranks(series: Series) -> bool:
    """Whether it is of an operation that brings what other ranks have made."""
    return series.kind == "operation" and _name(series) in KINDS


def _name(operation: Series) -> str:
    return operation.what.rpartition(" ")[2]
