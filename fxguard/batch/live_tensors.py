"""Finds which value of the batch a live tensor holds.

A tensor is known by its identity and version, or by memory that it shares with another tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from fxguard.batch.keys import Key
from fxguard.graph.nodes import memory_of, storage_of
from fxguard.measure import traceable
from fxguard.measure.at_hand import version_of
from fxguard.measure.func_levels import without_levels
from fxguard.torch_names import is_of_func_level

__all__ = ["LiveTensors"]


# A live tensor, its version, and the value that it holds up to that version.
_Known = tuple[weakref.ref[Tensor], int | None, Key]

_PLAIN = (Tensor, Parameter)

# Bound here because it is called for each tensor that enters or leaves a graph.
_has_levels = is_of_func_level


class LiveTensors:
    """The live tensors of one batch, and the values that they hold. Keeps no tensor alive.

    Example:
        >>> live = LiveTensors()
        >>> live.remember(x, Key(0, 3))
        >>> live.key_of(x), live.origin_of(x[0])
        (Key(event=0, value=3), Key(event=0, value=3))
        >>> x.add_(1); live.key_of(x)  # None: nobody has measured what it holds now
    """

    # torch.multiprocessing.reductions.StorageWeakRef does the same, with extra Python frames.
    _free = staticmethod(UntypedStorage._free_weak_ref)  # bound: modules end before objects

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}  # by id of the tensor
        # By address of the storage. Each entry holds a weak reference, so that no other storage
        # gets the address; it is released at the end.
        self._memories: dict[int, Key] = {}
        # What memories hold besides, where other ranks have written a part of them.
        self.beside: dict[int, tuple[Key, ...]] = {}

    def remember(self, tensor: Any, key: Key) -> None:
        """Note which value a tensor holds from now on; anything other than a tensor is ignored."""
        if isinstance(tensor, Tensor):
            version = None if tensor.is_inference() else tensor._version
            self._known[id(tensor)] = weakref.ref(tensor), version, key
            self._enter_memory(tensor, key)

    def enter(self, tensor: Any, key: Key) -> tuple[Key | None, Key | None]:
        """The value that a tensor holds and its origin, before the tensor is noted under a key.

        Args:
            tensor: an object that enters a graph.
            key: its key in the graph. A known tensor keeps its key.

        Returns:
            The results of :meth:`key_of` and of :meth:`origin_of`, the latter if the former is
            None.
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
        """Note the memory of a tensor; returns the value by which that was known before."""
        origin, memories = None, self._memories
        for storage in _storages_of(tensor):
            memory: int = storage._cdata
            before = memories.get(memory)
            if before is None:
                storage._weak_ref()
            elif origin is None and before is not key:
                origin = before
            memories[memory] = key
            if self.beside:
                self.beside.pop(memory, None)
        return origin

    def key_of(self, tensor: Any) -> Key | None:
        """The value that a tensor holds; None if its current contents were not measured."""
        known = self._known.get(id(tensor))
        if known is None or (holder := known[0]()) is None or holder is not tensor:
            return None
        version = None if holder.is_inference() else holder._version
        return known[2] if known[1] == version else None

    def origin_of(self, tensor: Any) -> Key | None:
        """The value whose memory a tensor shares: the tensor is or was (before a write) its view.

        None if no noted value is in that memory.
        """
        if self._memories and isinstance(tensor, Tensor):
            for storage in _storages_of(tensor):
                key = self._memories.get(storage._cdata)
                if key is not None:
                    return key
        return None

    def forget(self, tensor: Any) -> None:
        """Forget a tensor that was given other memory, so that its contents are unknown."""
        self._known.pop(id(tensor), None)

    def rest_of(self, tensor: Tensor) -> tuple[Key, ...]:
        """The values that the memory of a tensor holds besides, if the tensor is a part of it."""
        found: list[Key] = []
        for storage in _storages_of(tensor) if self._memories and _is_part(tensor) else ():
            if (key := self._memories.get(storage._cdata)) is not None:
                found += [key, *self.beside.get(storage._cdata, ())]
        return tuple(dict.fromkeys(found))

    def besides(self, tensor: Tensor) -> tuple[Key, ...]:
        """What the memory of a tensor holds besides its origin: see :meth:`came_in`."""
        memories = [storage._cdata for storage in _storages_of(tensor)]
        return tuple(key for memory in memories for key in self.beside.get(memory, ()))

    def exchanged(self, tensor: Tensor) -> None:
        """Forget a tensor, and all in its memory, because another rank's numbers come into it."""
        memories, is_part = {x._cdata for x in _storages_of(tensor)}, _is_part(tensor)
        for identity, (reference, _, key) in list(self._known.items()):
            holder = reference()
            found = () if holder is None else [x._cdata for x in _storages_of(holder)]
            if holder is not None and memories.isdisjoint(found):
                continue
            del self._known[identity]
            for memory in found if is_part else ():
                self.beside[memory] = tuple({*self.beside.get(memory, ()), key})
        for memory in () if is_part else memories & self._memories.keys():
            del self._memories[memory]
            self.beside.pop(memory, None)
            self._free(memory)

    def came_in(self, tensor: Tensor, key: Key, rest: tuple[Key, ...]) -> None:
        """Note what other ranks have written into a part of some memory.

        Args:
            tensor: the part.
            key: what it holds now.
            rest: what the rest of the memory holds.
        """
        self.remember(tensor, key)
        if rest:
            self.beside |= {storage._cdata: rest for storage in _storages_of(tensor)}

    def written(self, tensor: Tensor, before: int | None) -> Iterator[Key]:
        """Note that a tensor was written; it keeps its key, as do tensors that share its memory.

        Args:
            tensor: the written tensor.
            before: its version before the write.

        Yields:
            The key of each of these tensors.
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
        """The identities of all tensors known so far; any other tensor is unknown."""
        return self._known.keys()

    @property
    def by_id(self) -> dict[int, Any]:
        """The same with what is known of each, which grows as they do."""
        return self._known

    def alive(self) -> Iterator[tuple[Tensor, Key]]:
        """Each tensor that is alive, and the value that it holds or held."""
        for reference, _, key in list(self._known.values()):
            tensor = reference()
            if tensor is not None:
                yield tensor, key

    def keep(self, renamed: Mapping[Key, Key]) -> None:
        """Keep only live tensors with some values, under new keys."""
        known: dict[int, _Known] = {}
        memories: dict[int, Key] = {}
        for reference, version, key in self._known.values():
            tensor = reference()
            if tensor is None or key not in renamed:
                continue
            known[id(tensor)] = reference, version, renamed[key]
            for storage in _storages_of(tensor):
                memory: int = storage._cdata
                if memory not in memories and memory in self._memories:
                    storage._weak_ref()
                    memories[memory] = renamed.get(self._memories[memory], renamed[key])
        self.clear()
        self._known.update(known)
        self._memories.update(memories)

    def forget_before(self, first: int) -> None:
        """Forget what holds values with smaller numbers, and count the other values from there.

        All are values between graphs.
        """
        for identity, (reference, version, key) in list(self._known.items()):
            if key.value < first:
                del self._known[identity]
            else:
                self._known[identity] = reference, version, key._replace(value=key.value - first)
        for memory, key in list(self._memories.items()):
            if key.value < first:
                del self._memories[memory]
                self._free(memory)
            else:
                self._memories[memory] = key._replace(value=key.value - first)
        self.beside.clear()

    def clear(self) -> None:
        """Forget all tensors."""
        self._known.clear()
        self.beside.clear()
        memories = self._memories
        while memories:
            self._free(memories.popitem()[0])

    __del__ = clear


def _is_part(tensor: Tensor) -> bool:
    """Whether a tensor does not fill its memory."""
    size = tensor.numel() * tensor.element_size()
    return any(storage.nbytes() > size for storage in _storages_of(tensor))


def _storages_of(tensor: Tensor) -> Iterable[UntypedStorage]:
    """The storages of a tensor's elements: its own, or those of its parts."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and not _has_levels(tensor):
        try:
            return (tensor.untyped_storage(),)
        except (RuntimeError, NotImplementedError):
            return ()
    bare = without_levels(tensor)
    storages = map(storage_of, (bare, *traceable.inside(bare)))
    return [storage for storage in storages if storage is not None]
