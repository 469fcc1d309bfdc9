"""What a program computes in float64, findable by what it holds, and where it reads weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxguard.forgiving import theirs
from fxguard.matching._index import Index
from fxguard.matching._parts import parts_of
from fxguard.matching._shards import Shards
from fxguard.matching._weights import Twin, twins_of
from fxguard.matching._window import Window
from fxguard.recording.recorded import Leaf, Operation, Recording
from fxguard.recording.replay import Replay, is_view, operation_named, reads_of, wide

__all__ = [
    "Exact",
    "exact_of",
    "inside",
    "is_kept",
    "is_relabeling",
    "made_by",
    "note_weights",
    "operands",
    "parts_of_next",
    "roundoff",
    "twins_between",
    "weights_read",
]


@dataclass(slots=True)
class Exact:
    """What a program computes in float64."""

    recording: Recording
    window: Window | None = None
    shards: Shards = field(default_factory=Shards)
    values: dict[int, Tensor] = field(default_factory=dict)  # when they were made
    index: Index = field(default_factory=Index)
    made_by: dict[int, int] = field(default_factory=dict)  # the operation of each value
    # The weights that a value is, or is a view or a cast of.
    weights_in: dict[int, frozenset[int]] = field(default_factory=dict)
    readers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    parts: dict[int, list[Tensor]] = field(default_factory=dict)  # inside fused operations
    not_run: dict[str, str] = field(default_factory=dict)
    noise: dict[int, float] = field(default_factory=dict)  # of what was rounded before it was read
    reads: list[list[int]] = field(default_factory=list)  # of each operation
    noise_behind: dict[int, float] = field(default_factory=dict)  # the most of all that leads to it

    def note(self, value: int, x: Tensor) -> None:
        """Keep what a value holds, and make it findable: also in parts."""
        self.values[value] = x
        self.index.add(value, x)
        for _, part in self.shards.of(x):
            self.index.add_part(value, part)

    def kept(self, value: int | None, x: Tensor) -> Tensor:
        """What is kept of a tensor: all of a weight, else the part that the other program has."""
        return x if self.window is None or value in self.weights_in else self.window.of(x)


def exact_of(recording: Recording, window: Window | None, shards: Shards) -> Exact:
    """Run a recording in float64, and make its values findable.

    Args:
        recording: what ran.
        window: the part of its batch that is kept; None for all of it.
        shards: the parts of a value that may be looked for.
    """
    found = Exact(recording, window, shards)
    replay = Replay(recording)
    for leaf in recording.leaves:
        if leaf.value in replay.now:
            if is_kept(recording, leaf):
                found.weights_in[leaf.value] = frozenset([leaf.value])
            found.note(leaf.value, found.kept(leaf.value, replay.now[leaf.value]).clone())
        elif is_kept(recording, leaf):
            found.weights_in[leaf.value] = frozenset([leaf.value])
        if leaf.kind in ("buffer", "other"):
            found.noise[leaf.value] = roundoff(recording, leaf.value)
    found.noise_behind = dict(found.noise)
    for number, operation in enumerate(recording.operations):
        found.reads.append([ref.value for ref in reads_of(operation)])
        note_weights(found.weights_in, operation)
        for weight in weights_read(found.weights_in, operation):
            found.readers[weight].append(number)
        parts = [found.kept(None, x) for x in parts_of_next(replay, operation)]
        found.parts[number] = parts
        replay.run(operation)
        for value in made_by(operation):
            found.made_by[value] = number
            if value in replay.now:
                found.note(value, found.kept(value, replay.now[value]).clone())
            if value in replay.told:
                found.noise[value] = roundoff(recording, value)
        _note_noise(found, operation, number)
        for part in parts:
            found.index.add(inside(number), part)
    found.not_run = replay.not_run
    return found


def _note_noise(found: Exact, operation: Operation, number: int) -> None:
    known = found.noise_behind
    behind = max((known.get(value, 0.0) for value in found.reads[number]), default=0.0)
    known[inside(number)] = behind
    for value in made_by(operation):
        known[value] = max(behind, found.noise.get(value, 0.0))


def parts_of_next(replay: Replay, operation: Operation) -> list[Tensor]:
    if any(ref.value not in replay.now for ref in reads_of(operation)):
        return []
    try:
        return parts_of(operation, *replay.arguments(operation))
    except theirs():  # a fused operation of another form
        return []


def roundoff(recording: Recording, value: int) -> float:
    """The unit of roundoff of a value's dtype; 0 for integers."""
    dtype = recording.values[value].dtype
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def inside(operation: int) -> int:
    """What stands for the values inside an operation, where values are numbers."""
    return -1 - operation


def made_by(operation: Operation) -> Iterator[int]:
    """The values that an operation made or wrote."""
    yield from (x for x in operation.made if x is not None)
    yield from (now for _, now in operation.written if now not in operation.made)


def is_relabeling(operation: Operation) -> bool:
    overload = operation_named(operation.name)
    return operation.kind in ("_to_copy", "clone", "cat", "detach", "t", "lift_fresh") or (
        overload is not None and is_view(overload)
    )


def note_weights(known: dict[int, frozenset[int]], operation: Operation) -> None:
    if not is_relabeling(operation):
        return
    reads = [ref.value for ref in reads_of(operation)]
    if reads and all(x in known for x in reads):
        for value in made_by(operation):
            known[value] = frozenset().union(*(known[x] for x in reads))


def weights_read(known: dict[int, frozenset[int]], operation: Operation) -> frozenset[int]:
    """The weights that an operation computes with."""
    if is_relabeling(operation):
        return frozenset()
    return frozenset().union(*(known.get(ref.value, frozenset()) for ref in reads_of(operation)))


def operands(known: dict[int, frozenset[int]], operation: Operation) -> list[int]:
    """The values that an operation reads and that are no weights."""
    return [ref.value for ref in reads_of(operation) if ref.value not in known]


def is_kept(recording: Recording, leaf: Leaf) -> bool:
    """Whether a model keeps a value from batch to batch: weights, also those that it hides."""
    value = recording.values[leaf.value]
    is_hidden = leaf.kind == "other" and value.count > 1 and value.dtype.is_floating_point
    return is_hidden or leaf.kind in ("weight", "buffer")


def twins_between(mine: Recording, other: Exact, tolerance: float) -> dict[int, Twin]:
    """The weights and buffers of a program that are those of another one."""
    of_mine = {
        leaf.value: wide(mine.data[leaf.value])
        for leaf in mine.leaves
        if is_kept(mine, leaf) and leaf.value in mine.data
    }
    theirs = {
        leaf.value: other.values[leaf.value]
        for leaf in other.recording.leaves
        if is_kept(other.recording, leaf) and leaf.value in other.values
    }
    return twins_of(of_mine, theirs, tolerance)
