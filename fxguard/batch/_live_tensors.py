"""Which value of the batch a live tensor holds.

A tensor is known by its identity and its version, or by the memory that it shares with another.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from fxguard.batch.keys import Key
from fxguard.graph.nodes import memory_of, storage_of
from fxguard.measure import traceable
from fxguard.measure.at_hand import version_of
from fxguard.measure.func_levels import without_levels

__all__ = ["LiveTensors"]


# A tensor that is alive, how often it had been written, and the value that it holds until then.
_Known = tuple[weakref.ref[Tensor], int | None, Key]

_PLAIN = (Tensor, Parameter)

# Bound here: it is asked of each tensor that enters or leaves a graph.
_has_levels = torch._C._functorch.is_functorch_wrapped_tensor


class LiveTensors:
    """The tensors of one batch that are alive, and the values that they hold. Keeps none alive.

    Example:
        >>> live = LiveTensors()
        >>> live.remember(x, Key(0, 3))
        >>> live.key_of(x), live.origin_of(x[0])
        (Key(event=0, value=3), Key(event=0, value=3))
        >>> x.add_(1); live.key_of(x)  # None: nobody has measured what it holds now
    """

    # torch.multiprocessing.reductions.StorageWeakRef does it, too, with a frame of Python or two.
    _free = staticmethod(UntypedStorage._free_weak_ref)  # here: modules end before objects do

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}  # by id of the tensor
        # By address of the storage. Each has a weak reference, so that no other storage is given
        # the address; it is given back at the end.
        self._memories: dict[int, Key] = {}

    def remember(self, tensor: Any, key: Key) -> None:
        """Note which value a tensor holds from now on; anything but a tensor is left out."""
        if isinstance(tensor, Tensor):
            version = None if tensor.is_inference() else tensor._version
            self._known[id(tensor)] = weakref.ref(tensor), version, key
            self._enter_memory(tensor, key)

    def enter(self, tensor: Any, key: Key) -> tuple[Key | None, Key | None]:
        """The value that a tensor holds and its origin, before it is remembered by a key.

        Args:
            tensor: what enters a graph.
            key: what it is to the graph. A tensor that is known keeps the key that it has.

        Returns:
            What :meth:`key_of` and :meth:`origin_of` give, the latter where the former is None.
        """
        if not isinstance(tensor, Tensor):
            return None, None
        version = None if tensor.is_inference() else tensor._version
        known = self._known.get(id(tensor))
        if known is not None and known[1] == version and known[0]() is tensor:
            return known[2], None
        self._known[id(tensor)] = weakref.ref(tensor), version, key
        return None, self._enter_memory(tensor, key)

    def _enter_memory(self, tensor: Tensor, key: Key) -> Key | None:
        """Note the memory in which a tensor stands, and by what value it was known before."""
        origin, memories = None, self._memories
        for storage in _storages_of(tensor):
            memory: int = storage._cdata
            before = memories.get(memory)
            if before is None:
                storage._weak_ref()
            elif origin is None and before is not key:
                origin = before
            memories[memory] = key
        return origin

    def remember_alone(self, tensor: Tensor, key: Key) -> None:
        """The same where nobody asks for the origin of what stands in its memory."""
        self._known[id(tensor)] = weakref.ref(tensor), version_of(tensor), key

    def key_of(self, tensor: Any) -> Key | None:
        """The value that a tensor holds; None where nobody has measured what it holds now."""
        known = self._known.get(id(tensor))
        if known is None or (holder := known[0]()) is None or holder is not tensor:
            return None
        version = None if holder.is_inference() else holder._version
        return known[2] if known[1] == version else None

    def key_at(self, tensor: Tensor, version: int | None) -> Key | None:
        """The value that a tensor held when it had been written so often."""
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor:
            return None
        return known[2] if known[1] == version else None

    def origin_of(self, tensor: Any) -> Key | None:
        """The value in whose memory a tensor stands: it is a view of it, or was it before a write.

        None where no value that was remembered stands there.
        """
        if self._memories and isinstance(tensor, Tensor):
            for storage in _storages_of(tensor):
                key = self._memories.get(storage._cdata)
                if key is not None:
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
        for identity, (reference, version, key) in list(self._known.items()):
            holder = reference()
            if holder is None or version != before or version_of(holder) != now:
                continue
            if holder is tensor or (memory is not None and memory_of(holder) == memory):
                self._known[identity] = reference, now, key
                yield key

    @property
    def ids(self) -> Collection[int]:
        """The identities of those that it has ever known: no other tensor is one of them."""
        return self._known.keys()

    def alive(self) -> set[int]:
        """The values of tensors that are alive, by their place among all that were measured."""
        return {key.value for reference, _, key in self._known.values() if reference() is not None}

    def clear(self) -> None:
        """Forget all of them."""
        self._known.clear()
        memories = self._memories
        while memories:
            self._free(memories.popitem()[0])

    __del__ = clear


def _storages_of(tensor: Tensor) -> Iterable[UntypedStorage]:
    """Where the elements of a tensor are stored: its own, or of what it is made of."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and not _has_levels(tensor):
        try:
            return (tensor.untyped_storage(),)
        except (RuntimeError, NotImplementedError):
            return ()
    bare = without_levels(tensor)
    storages = map(storage_of, (bare, *traceable.inside(bare)))
    return [storage for storage in storages if storage is not None]
