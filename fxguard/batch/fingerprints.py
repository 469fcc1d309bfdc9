"""The fingerprints of a batch: noted while its tensors are there, shown in the rows of frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from fxguard.batch.dataflow import DataFlow
from fxguard.batch.keys import Key
from fxguard.batch.watchers import BatchWatcher
from fxguard.measure.fingerprints import fingerprint_of
from fxguard.records import Fingerprint, Row

__all__ = ["Fingerprints"]


class FingerprintNotes(BatchWatcher):
    """The fingerprints of the values of one batch."""

    reads_inputs = True

    def __init__(self) -> None:
        self.of: dict[Key, Fingerprint] = {}

    def of_loss(self) -> FingerprintNotes:
        """The same for a loss."""
        return FingerprintNotes()

    def measured(self, key: Key, tensor: Tensor) -> None:
        """Note the fingerprint of a value that no graph has measured."""
        self.of[key] = fingerprint_of(tensor)

    def renamed(self, keys: Mapping[Key, Key]) -> None:
        """Rename the keys."""
        self.of = {keys[key]: found for key, found in self.of.items() if key in keys}


@dataclass(slots=True)
class Fingerprints:
    """The fingerprints of one batch while its frames are assembled.

    Weights and buffers are available then, and each is read once.
    """

    of_values: Mapping[int, Fingerprint]  # by index into the values of the data flow
    of_tensors: dict[int, tuple[Tensor, Fingerprint]] = field(default_factory=dict)  # by id

    @classmethod
    def in_flow(cls, flow: DataFlow, notes: FingerprintNotes | None) -> Fingerprints | None:
        """The noted fingerprints, by value of the data flow; None if none were asked for.

        A value that one graph made and another one read was noted twice: the first one with numbers
        is taken.
        """
        if notes is None:
            return None
        found: dict[int, Fingerprint] = {}
        for key, each in notes.of.items():
            value = flow.place.get(key)
            if value is not None and (value not in found or found[value].note):
                found[value] = each
        return cls(found)

    def of_value(self, row: Row, value: int) -> Row:
        """A row of a value, with its fingerprint if it has a range."""
        return row if row.abs_max is None else replace(row, fingerprint=self.of_values.get(value))

    def of_tensor(self, row: Row, tensor: Tensor) -> Row:
        """The same for a tensor in memory."""
        if row.abs_max is None:
            return row
        if id(tensor) not in self.of_tensors:
            self.of_tensors[id(tensor)] = tensor, fingerprint_of(tensor)
        return replace(row, fingerprint=self.of_tensors[id(tensor)][1])
