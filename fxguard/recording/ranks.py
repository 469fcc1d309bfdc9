"""Several ranks' recordings as one: collectives become operations on the values of all ranks.

Nothing is sent. The ranks' operations stand in an order in which they could have run, each behind
what it reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fxguard.errors import UsageError
from fxguard.ranks.agreement import rank_and_count
from fxguard.recording._brought import Given, brought
from fxguard.recording.folder import read_folder
from fxguard.recording.recorded import RANKS, Leaf, Operation, Recording, Ref
from fxguard.recording.replay import reads_of
from fxguard.recording.written import Written

__all__ = ["folder_of_rank", "read_record", "together"]

RANK = "rank-"
# What folders may raise that others have written: sizes or kinds that do not fit together.
DAMAGED = (LookupError, TypeError, ValueError, RuntimeError)
Group = tuple[int, ...]


def folder_of_rank(folder: Path) -> Path:
    """Where this process writes its record: ``rank-N`` in a folder, if it is one of several."""
    rank, ranks = rank_and_count()
    return folder / f"{RANK}{rank}" if ranks > 1 else folder


def read_record(folder: Path) -> Recording:
    """Read a record, or those of several ranks, which are put together.

    Args:
        folder: a record, or a folder that holds ``rank-0``, ``rank-1`` and so on.

    Raises:
        UsageError: if one is missing or damaged, or if they do not fit together.
    """
    if not (folder / f"{RANK}0").is_dir():
        return read_folder(folder)
    names = {each.name for each in folder.glob(f"{RANK}*")}
    expected = [f"{RANK}{number}" for number in range(len(names))]
    missing = [name for name in expected if name not in names]
    if missing:
        raise UsageError(f"{folder} has no {missing[0]}: a record of all ranks is needed")
    return together([read_folder(folder / name) for name in expected])


def together(recordings: Sequence[Recording]) -> Recording:
    """One recording of what all ranks did.

    Args:
        recordings: of rank 0, 1 and so on.

    Raises:
        UsageError: if a collective of one rank has no counterpart on the others.
    """
    try:
        return _Together(recordings).run()
    except UsageError:
        raise
    except DAMAGED as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise UsageError(f"the records of these ranks do not fit together: {what}") from error


@dataclass(slots=True)
class _Rank:
    number: int
    recording: Recording
    offset: int  # of its values among those of all
    at: int = 0  # the operation that is next
    # Collectives that it has gone past and that have not brought anything yet.
    open: list[tuple[Operation, int]] = field(default_factory=list)
    calls: dict[Group, int] = field(default_factory=lambda: defaultdict(int))  # of each group

    @property
    def next(self) -> Operation | None:
        operations = self.recording.operations
        return operations[self.at] if self.at < len(operations) else None

    def waits_before(self, operation: Operation) -> bool:
        """Whether an operation reads what a collective has not brought yet."""
        read = {ref.value for ref in reads_of(operation)}
        return any(
            not read.isdisjoint([*each.made, *(after for _, after in each.written)])
            for each, _ in self.open
        )

    def moved(self, operation: Operation) -> Operation:
        """An operation with the numbers that its values have among those of all ranks."""

        def move(x: Any) -> Any:
            if isinstance(x, Ref):
                return Ref(x.value + self.offset)
            if isinstance(x, (list, tuple)):
                return type(x)(move(item) for item in x)
            return x

        by = self.offset
        return replace(
            operation,
            args=move(operation.args),
            kwargs={name: move(x) for name, x in operation.kwargs.items()},
            made=tuple(None if value is None else value + by for value in operation.made),
            written=tuple((before + by, after + by) for before, after in operation.written),
            rank=self.number,
        )


class _Together:
    def __init__(self, recordings: Sequence[Recording]) -> None:
        first = recordings[0]
        self.found = Recording(
            f"{first.name}, {len(recordings)} ranks",
            about={**first.about, RANKS: len(recordings)},
            is_foreign=any(each.is_foreign for each in recordings),
        )
        self.ranks: list[_Rank] = []
        # What each rank gives to the n-th collective of a group.
        self.given: dict[tuple[Group, int], dict[int, Given]] = defaultdict(dict)
        self.made: dict[tuple[Group, int], list[int]] = {}  # what is the same for all of them
        self.sent: dict[Group, list[Given]] = defaultdict(list)
        for number, recording in enumerate(recordings):
            offset = len(self.found.values)
            self.ranks.append(_Rank(number, recording, offset))
            self.found.values += recording.values
            self.found.data |= {value + offset: x for value, x in recording.data.items()}
            self.found.leaves += [
                Leaf(leaf.value + offset, leaf.kind, f"{leaf.name} of rank {number}")
                for leaf in recording.leaves
            ]

    def run(self) -> Recording:
        """Put all operations in order."""
        while any(rank.next is not None or rank.open for rank in self.ranks):
            ran = [self._go_on(rank) for rank in self.ranks]
            if not any(ran) and not any(map(self._go_past, self.ranks)):
                raise UsageError("\n".join(self._stuck()))
        self.found.outputs = [
            (f"{name} of rank {rank.number}", value + rank.offset)
            for rank in self.ranks
            for name, value in rank.recording.outputs
        ]
        return self.found

    def _go_on(self, rank: _Rank) -> bool:
        """Let a rank run until it waits for another one; whether anything happened."""
        before = rank.at, len(rank.open)
        self._bring(rank)
        while not rank.open and rank.next is not None:
            self._step(rank, rank.next)
            self._bring(rank)
        return before != (rank.at, len(rank.open))

    def _go_past(self, rank: _Rank) -> bool:
        """Let a rank go past a collective whose result nobody has read yet."""
        if rank.next is None or rank.waits_before(rank.next):
            return False
        self._step(rank, rank.next)
        return True

    def _step(self, rank: _Rank, operation: Operation) -> None:
        rank.at += 1
        moved = rank.moved(operation)
        if "kind" not in operation.kwargs or "ranks" not in operation.kwargs:
            self.found.operations.append(moved)
            return
        group, written = tuple(operation.kwargs["ranks"]), Written(self.found, moved)
        given = Given(rank.number, moved, [written.copy_of(ref.value) for ref in reads_of(moved)])
        call = 0
        if operation.kwargs["kind"] == "send":
            self.sent[group].append(given)
            return
        if operation.kwargs["kind"] != "recv":
            call = rank.calls[group]
            rank.calls[group] += 1
            self.given[group, call][rank.number] = given
        rank.open.append((operation, call))

    def _bring(self, rank: _Rank) -> None:
        """Let those of a rank's collectives end that can."""
        rank.open = [each for each in rank.open if not self._ends(rank, *each)]

    def _ends(self, rank: _Rank, operation: Operation, call: int) -> bool:
        group = tuple(operation.kwargs["ranks"])
        written = Written(self.found, rank.moved(operation))
        if operation.kwargs["kind"] == "recv":
            sent = next((x for x in self.sent[group] if _is_for(x, rank, operation)), None)
            if sent is None:
                return False
            self.sent[group].remove(sent)
            written.put(sent.values)
            return True
        given = self.given[group, call]
        if not given.keys() >= set(group):
            return False
        shared = self.made.setdefault((group, call), [])
        written.put(brought(written, [given[number] for number in group], shared))
        return True

    def _stuck(self) -> Iterator[str]:
        yield "the collectives of these ranks do not fit together:"
        for rank in self.ranks:
            for operation, _ in rank.open[:1]:
                yield f"rank {rank.number} waits in {operation.title} ({operation.source})"


def _is_for(sent: Given, rank: _Rank, operation: Operation) -> bool:
    """Whether something was sent to a rank, and is what it receives."""
    mine, theirs = operation.kwargs, sent.operation.kwargs
    ranks = mine["ranks"]
    return (
        ranks[theirs["peer"]] == rank.number
        and mine["peer"] in (None, ranks.index(sent.rank))
        and mine["tag"] == theirs["tag"]
    )
