"""What other ranks send while the script goes on: measured when somebody reads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

from fxguard.batch.events import UncapturedOperation
from fxguard.batch.keys import Key
from fxguard.graph.nodes import storage_of
from fxguard.torch_names import DisableTorchFunction

__all__ = ["Arrivals", "with_outputs"]


class Measures(Protocol):
    """Adds an exchange that has ended, and measures what it has brought."""

    def __call__(self, operation: UncapturedOperation, tensors: Sequence[Tensor], /) -> None: ...


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of some memory that an exchange writes. The tensor may be gone by then."""

    memory: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor, storage: UntypedStorage) -> _Part:
        """The part that a tensor is."""
        offset = int(tensor.storage_offset())
        return _Part(storage._cdata, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def within(self, storage: UntypedStorage) -> Tensor:
        """A tensor of this part."""
        new = torch.empty(0, dtype=self.dtype, device=storage.device)
        return new.set_(storage, self.offset, self.shape, self.stride)


class Arrivals:
    """The exchanges of a batch that had not ended when their calls returned. Keeps no tensor."""

    # See LiveTensors: no other storage gets the address while this holds a weak reference.
    _free = staticmethod(UntypedStorage._free_weak_ref)

    def __init__(self) -> None:
        self._coming: list[tuple[UncapturedOperation, _Part]] = []

    def expect(self, operation: UncapturedOperation, tensors: Iterable[Tensor]) -> None:
        """Note an exchange that has begun, without outputs, and the tensors that it writes."""
        for tensor in tensors:
            if (storage := storage_of(tensor)) is not None:
                storage._weak_ref()
                self._coming.append((operation, _Part.of(tensor, storage)))

    def read(self, values: Iterable[Any], measure: Measures) -> None:
        """Called when somebody reads some values, and has waited for what comes into them."""
        storages = {x._cdata: x for value in values if (x := storage_of(value)) is not None}
        here = [each for each in self._coming if each[1].memory in storages]
        if not here:
            return
        self._coming = [each for each in self._coming if each[1].memory not in storages]
        for operation, part in here:
            self._free(part.memory)
            with DisableTorchFunction(), torch.no_grad():
                tensor = part.within(storages[part.memory])
            measure(operation, [tensor])

    def __del__(self) -> None:
        while self._coming:
            self._free(self._coming.pop()[1].memory)


def with_outputs(operation: UncapturedOperation, outputs: list[Key]) -> UncapturedOperation:
    """An exchange that has ended, with what it has brought."""
    return replace(operation, outputs=[("output", key) for key in outputs], counts=True)
