"""Which value of the batch a live tensor holds.

A tensor is known by its identity and its version, or by the memory that it shares with another.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fxguard.batch.keys import Key
from fxguard.graph.nodes import memory_of
from fxguard.measure import traceable
from fxguard.measure.func_levels import without_levels

__all__ = ["LiveTensors"]


@dataclass(slots=True)
class _Known:
    """A tensor that is alive, and the value that it holds as long as nobody writes it."""

    tensor: weakref.ref[Tensor]
    version: int | None
    key: Key


class LiveTensors:
    """The tensors of one batch that are alive, and the values that they hold. Keeps none alive.

    Example:
        >>> live = LiveTensors()
        >>> live.remember(x, Key(0, 3))
        >>> live.key_of(x), live.origin_of(x[0])
        (Key(event=0, value=3), Key(event=0, value=3))
        >>> x.add_(1); live.key_of(x)  # None: nobody has measured what it holds now
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}  # by id of the tensor
        self._memories: dict[int | None, tuple[StorageWeakRef, Key]] = {}

    def remember(self, tensor: Any, key: Key) -> None:
        """Note which value a tensor holds from now on; anything but a tensor is left out."""
        if isinstance(tensor, Tensor):
            self._known[id(tensor)] = _Known(weakref.ref(tensor), _version(tensor), key)
            for part in _parts(tensor):
                memory = memory_of(part)
                if memory is not None:
                    self._memories[memory] = (StorageWeakRef(part.untyped_storage()), key)

    def key_of(self, tensor: Any) -> Key | None:
        """The value that a tensor holds; None where nobody has measured what it holds now."""
        known = self._known.get(id(tensor))
        if known is None or known.tensor() is not tensor:
            return None
        return known.key if known.version == _version(tensor) else None

    def origin_of(self, tensor: Any) -> Key | None:
        """The value in whose memory a tensor stands: it is a view of it, or was it before a write.

        None where no value that was remembered stands there.
        """
        for part in _parts(tensor) if isinstance(tensor, Tensor) else ():
            memory, key = self._memories.get(memory_of(part), (None, None))
            if memory is not None and not memory.expired():
                return key
        return None

    def forget(self, tensor: Any) -> None:
        """A tensor was given other memory: nobody knows what it holds now."""
        self._known.pop(id(tensor), None)

    def clear(self) -> None:
        """Forget all of them."""
        self._known.clear()
        self._memories.clear()


def _parts(tensor: Tensor) -> list[Tensor]:
    """What holds the memory of a tensor: itself, or what a subclass or a level is made of."""
    bare = without_levels(tensor)
    return [bare, *traceable.inside(bare)]


def _version(tensor: Any) -> int | None:
    return None if tensor.is_inference() else tensor._version
