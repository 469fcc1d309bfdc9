"""Which value of the batch a live tensor holds.

A tensor is known by its identity and its version, or by the memory that it shares with another.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fxguard.batch.keys import Key
from fxguard.graph.nodes import memory_of, storage_of
from fxguard.measure import traceable
from fxguard.measure.at_hand import version_of
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
            self.remember_alone(tensor, key)
            for part in _parts(tensor):
                storage = storage_of(part)
                if storage is not None:
                    self._memories[int(storage._cdata)] = (StorageWeakRef(storage), key)

    def remember_alone(self, tensor: Tensor, key: Key) -> None:
        """The same where nobody asks for the origin of what stands in its memory."""
        self._known[id(tensor)] = _Known(weakref.ref(tensor), version_of(tensor), key)

    def key_of(self, tensor: Any) -> Key | None:
        """The value that a tensor holds; None where nobody has measured what it holds now."""
        return self.key_at(tensor, version_of(tensor)) if isinstance(tensor, Tensor) else None

    def key_at(self, tensor: Tensor, version: int | None) -> Key | None:
        """The value that a tensor held when it had been written so often."""
        known = self._known.get(id(tensor))
        holder = None if known is None else known.tensor()
        if known is None or holder is None or holder is not tensor:
            return None
        return known.key if known.version == version else None

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

    def written(self, tensor: Tensor, before: int | None) -> Iterator[Key]:
        """A tensor was written; it keeps its key, and so do those that share its memory.

        Args:
            tensor: what was written.
            before: its version before that.

        Yields:
            The key of each of them.
        """
        memory, now = memory_of(tensor), version_of(tensor)
        for known in self._known.values():
            holder = known.tensor()
            if holder is None or known.version != before or version_of(holder) != now:
                continue
            if holder is tensor or (memory is not None and memory_of(holder) == memory):
                known.version = now
                yield known.key

    @property
    def ids(self) -> Collection[int]:
        """The identities of those that it has ever known: no other tensor is one of them."""
        return self._known.keys()

    def alive(self) -> set[int]:
        """The values of tensors that are alive, by their place among all that were measured."""
        known = self._known.values()
        return {each.key.value for each in known if each.tensor() is not None}

    def clear(self) -> None:
        """Forget all of them."""
        self._known.clear()
        self._memories.clear()


def _parts(tensor: Tensor) -> list[Tensor]:
    """What holds the memory of a tensor: itself, or what a subclass or a level is made of."""
    bare = without_levels(tensor)
    return [bare, *traceable.inside(bare)]
