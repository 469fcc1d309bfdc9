"""Follows a value back from batch to batch of one step: models, and what a script computed."""

from __future__ import annotations

from fxguard.batch.assemble import assemble
from fxguard.batch.batch import Batch
from fxguard.batch.dataflow import DataFlow
from fxguard.batch.events import ModuleReturn
from fxguard.batch.keys import Key
from fxguard.batch.loss import Loss

__all__ = ["Step"]


class Step:
    """The data flows of the batches that led to one of them.

    Args:
        batch: the batch, whose numbers have been read.
        flow: its data flow.
    """

    def __init__(self, batch: Batch, flow: DataFlow) -> None:
        self._flows: list[tuple[Batch, DataFlow]] = [(batch, flow)]

    def before(self, flow: DataFlow, value: int) -> tuple[DataFlow, int] | None:
        """The value of another batch that was given to this one as one of its values.

        Args:
            flow: a data flow of this step.
            value: index of the value there.
        """
        batch = next(batch for batch, known in self._flows if known is flow)
        made = batch.given.get(flow.keys[value])
        if made is not None:
            model, label = made
            return self._place(model, None, _key_of(model, label))
        loss: Loss | None = None if batch.received is None else batch.received[0]()
        if loss is None or batch.received is None:
            return None
        for label, key in batch.received[1]:
            given = _key_of(batch, label)
            if given is not None and flow.place.get(given) == value:
                return self._place(loss.batch, loss, key)
        return None

    def _place(
        self, batch: Batch, loss: Loss | None, key: Key | None
    ) -> tuple[DataFlow, int] | None:
        flow = next((flow for known, flow in self._flows if known is batch), None)
        if flow is None:
            flow = _flow_of(batch, loss)
            self._flows.append((batch, flow))
        return None if key is None or key not in flow.place else (flow, flow.place[key])


def _flow_of(batch: Batch, loss: Loss | None) -> DataFlow:
    if loss is None:
        return assemble(batch)
    with loss.read(given=True):
        return assemble(batch)


def _key_of(batch: Batch, label: str) -> Key | None:
    """The value that a model received or returned under a label."""
    returned = (e for e in batch.events if isinstance(e, ModuleReturn) and not e.name)
    return next((row.key for event in returned for row in event.rows if row.label == label), None)
