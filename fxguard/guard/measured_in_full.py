"""What was measured in full, where that is not so in each batch."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch.fx import GraphModule

from fxguard.batch.batch import Batch
from fxguard.options import Options
from fxguard.plan.plan import WHOLE_GRAPH

__all__ = ["MeasuredInFull"]

POSTPONED = ", when what leaves them has turned bad; what they absorb is not judged"
SAMPLED = (
    ", in {} of {} batches (full_every={}); in the others when what leaves them has turned bad, "
    "and what they absorb there is not judged"
)


class MeasuredInFull:
    """Counts the batches and the graphs of one model that were measured in full.

    Threads share it: each change is a single operation, and a count may miss one.

    Args:
        options: what the user asked for.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.batches = 0
        self._last: int | None = None
        self._graphs = weakref.WeakSet[GraphModule]()

    def add(self, batch: Batch) -> None:
        """Add a batch in which nothing is postponed any more.

        One number may come several times: each graph of a backend ends a part of a batch.
        """
        runs = batch.runs
        if any(step.kind == WHOLE_GRAPH for run in runs for step in run.plan.steps[:1]):
            return  # a second run did not repeat its numbers
        if batch.number != self._last:
            self._last = batch.number
            self.batches += 1
        for run in runs:
            self._graphs.add(run.graph_module)

    def in_words(self, batches: int, graphs: Iterable[GraphModule]) -> str:
        """Text, to follow the counts, on when operations are checked; "" if in each batch.

        Args:
            batches: how many there were.
            graphs: all that were captured.
        """
        if not self.options.postpones:
            return ""
        if self.options.full_every is None:
            return POSTPONED
        text = SAMPLED.format(self.batches, batches, self.options.full_every)
        left = sum(graph not in self._graphs for graph in graphs)
        if left:
            were = "1 graph was" if left == 1 else f"{left} graphs were"
            text += f"; {were} in no full batch yet"
        return text
