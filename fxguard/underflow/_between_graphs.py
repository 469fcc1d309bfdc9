"""What operations between graphs lost, noted while their operands are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fxguard.batch.keys import Key
from fxguard.batch.watchers import BatchWatcher
from fxguard.graph.collectives import waits
from fxguard.graph.nodes import leaves
from fxguard.graph.operations import Call
from fxguard.graph.tables import RUN_FUNCTIONS
from fxguard.underflow.lost import Lost, lost_alone

__all__ = ["LostBetween"]


class LostBetween(BatchWatcher):
    """The losses between the graphs of one batch.

    Args:
        share: the share of lost elements from which on an operation is listed.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        # By the first result of an operation: its loss, None for none, or why that is unknown.
        self.lost: dict[Key, Lost | str | None] = {}

    def ran(self, call: Call, function: Callable[..., Any], result: Any, made: Key) -> None:
        """Note the elements that an operation made 0 and that are not 0 in float64."""
        if call.written or call.kind in RUN_FUNCTIONS:
            return  # its operands are gone, or it is not a single operation
        reason = waits(function, leaves([*call.args, *call.kwargs.values(), result]))
        self.lost[made] = reason or lost_alone(call, function, result, self.share)

    def renamed(self, keys: Mapping[Key, Key]) -> None:
        """Rename the keys."""
        self.lost = {keys[key]: found for key, found in self.lost.items() if key in keys}
