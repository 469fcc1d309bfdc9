"""Forgets the part of a batch that nothing leads to any more, while the batch goes on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeVar

from fxguard.batch.batch import Batch
from fxguard.batch.events import Event, GraphRun, ModuleReturn, UncapturedOperation
from fxguard.batch.keys import BETWEEN_GRAPHS, Key

__all__ = ["keep_only", "leading_to"]

T = TypeVar("T")


def keep_only(batch: Batch, wanted: Collection[Key]) -> Mapping[Key, Key]:
    """Forget all of an open batch but some values and what led to them.

    Events and values are numbered anew.

    Args:
        batch: the batch, whose numbers were not read, or may be read again.
        wanted: the keys of these values.

    Returns:
        The new key of each value between graphs, and of each wanted one, that is kept.
    """
    needed, events = leading_to(batch, wanted)
    places = {before: now for now, before in enumerate(events)}
    values = sorted(key.value for key in needed if key.is_between_graphs)
    numbers = {before: now for now, before in enumerate(values)}

    def renamed(key: Key) -> Key:
        if key.is_between_graphs:
            return Key(BETWEEN_GRAPHS, numbers[key.value])
        return Key(places[key.event], key.value)

    def by_number(known: Mapping[int, T]) -> dict[int, T]:
        return {numbers[each]: found for each, found in known.items() if each in numbers}

    keys = {key: renamed(key) for key in needed}
    batch.events[:] = [_renamed(batch.events[index], keys) for index in events]
    batch.parts = [(sum(each < before for each in events), part) for before, part in batch.parts]
    batch.runs[:] = [event for event in batch.events if isinstance(event, GraphRun)]
    slots = [(batch.values[number], number) for number in values]
    batch.values[:] = [
        value if value.slot is None else replace(value, slot=numbers[number])
        for value, number in slots
    ]
    batch.pairs[:] = [batch.pairs[number] for number in values]
    batch.between = None
    batch.details = by_number(batch.details)
    batch.evidence = by_number(batch.evidence)
    batch.no_evidence = by_number(batch.no_evidence)
    batch.tensors = by_number(batch.tensors)
    batch.labels = _by_key(batch.labels, keys)
    batch.copied = _by_key(batch.copied, keys)
    for watcher in batch.watchers:
        watcher.renamed(keys)
    batch.judged_before = {keys[key] for key in batch.judged_before if key in keys}
    batch.live.keep(keys)
    batch.arrivals = None  # what they read has other keys now
    return keys


def leading_to(batch: Batch, wanted: Collection[Key]) -> tuple[set[Key], list[int]]:
    """The values that lead to some values, these included, and the events that made them."""
    needed, events = set(wanted), list[int]()
    graphs = {key.event for key in wanted if not key.is_between_graphs}
    for index in reversed(range(len(batch.events))):
        event, read = batch.events[index], list[Key]()
        if isinstance(event, UncapturedOperation):
            made = [key for _, key in event.outputs]
            if needed.isdisjoint(made):
                continue
            read = [*made, *(key for _, key in event.inputs)]
        elif isinstance(event, GraphRun):
            if index not in graphs:
                continue
            read = [*event.inputs.values(), *event.derived.values()]
            read += [key for keys in event.besides.values() for key in keys]
        else:
            continue  # a loss has no modules
        events.append(index)
        needed.update(read)
        graphs.update(key.event for key in read if not key.is_between_graphs)
    return needed, events[::-1]


def _renamed(event: Event, keys: Mapping[Key, Key]) -> Event:
    assert not isinstance(event, ModuleReturn)
    if isinstance(event, UncapturedOperation):
        inputs = [(label, keys[key]) for label, key in event.inputs]
        return replace(event, inputs=inputs, outputs=[(x, keys[key]) for x, key in event.outputs])
    if isinstance(event, GraphRun):  # others refer to it, so it stays the same object
        event.inputs = {local: keys[key] for local, key in event.inputs.items()}
        event.derived = {local: keys[key] for local, key in event.derived.items()}
        besides = event.besides.items()
        event.besides = {local: tuple(keys[key] for key in each) for local, each in besides}
    return event


def _by_key(known: Mapping[Key, T], keys: Mapping[Key, Key]) -> dict[Key, T]:
    return {keys[key]: found for key, found in known.items() if key in keys}
