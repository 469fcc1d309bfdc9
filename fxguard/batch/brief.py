"""A batch that was one run of a graph and found healthy, until somebody asks for more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun, ModuleReturn
from fxguard.batch.weights import Snapshot
from fxguard.source.lines import Place

__all__ = ["BriefBatch"]

_lock = threading.Lock()


@dataclass(slots=True, eq=False)
class BriefBatch:
    """What a closed batch is made of. Making the batch takes longer than a small forward."""

    number: int
    run: GraphRun
    returned: ModuleReturn
    caller: Place | None
    ended: Snapshot | None
    prepare: Callable[[Batch], None]  # gives the batch what all batches of its model have
    made: Batch | None = None

    @property
    def batch(self) -> Batch:
        """The batch, always the same."""
        with _lock:
            if self.made is None:
                batch = Batch(self.number)
                self.prepare(batch)
                batch.events, batch.runs = [self.run, self.returned], [self.run]
                batch.caller, batch.ended = self.caller, self.ended
                self.made = batch
            return self.made
