"""What several ranks saw, as one list of events: each is told once, and says which ranks saw it.

Ranks average their gradients. What one rank alone was given jumps in the gradients of all, and the
others see no more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fxguard.report.event import Cause, Event

__all__ = ["Seen", "seen_by_ranks"]

# A jump on one rank shows like this on others, in the same step or the next one. Of operations,
# these are collectives, and what reads what they have brought.
CONSEQUENCES: tuple[Cause, ...] = ("gradient", "operation", "step", "unknown")
OF_ONE_RANK: tuple[Cause, ...] = ("data", "weights", "operation", "machine")
APART = 64  # steps between the steps in which ranks see that one series grows


@dataclass(frozen=True, slots=True)
class Seen:
    """One event, as it was written by the first of the ranks that saw it."""

    event: Event
    ranks: tuple[int, ...]

    def is_same(self, other: Event) -> bool:
        """Whether an event of another rank is this one."""
        event = self.event
        if event.cause != other.cause:
            return False
        if event.cause == "growth":
            return event.what == other.what and abs(event.step - other.step) <= APART
        # Where weights are shared, each rank has gradients of its own.
        is_shared = event.cause in ("gradient", "step")
        return event.step == other.step and (is_shared or event.what == other.what)

    def follows(self, other: Seen) -> bool:
        """Whether this is how an event of another rank showed here."""
        begin, end = other.event.step, other.event.step + max(other.event.lead, 0) + 1
        return (
            self.event.cause in CONSEQUENCES
            and other.event.cause in OF_ONE_RANK
            and self.event.cause != other.event.cause
            and begin <= self.event.step <= end
            and not set(self.ranks) & set(other.ranks)
        )


def seen_by_ranks(
    by_rank: Mapping[int, Sequence[Event]], ranks_at: Callable[[int], Collection[int]]
) -> list[Seen]:
    """The events of all ranks, in order of their steps, each once.

    Args:
        by_rank: the events that each rank saw.
        ranks_at: all ranks that had a step; an event that all of them saw names none.
    """
    found: list[Seen] = []
    for rank in sorted(by_rank):
        for event in by_rank[rank]:
            for place, seen in enumerate(found):
                if rank not in seen.ranks and seen.is_same(event):
                    found[place] = replace(seen, ranks=(*seen.ranks, rank))
                    break
            else:
                found.append(Seen(event, (rank,)))
    causes = [one for one in found if not any(one.follows(other) for other in found)]
    named = [_named(one, ranks_at(one.event.step)) for one in causes]
    return sorted(named, key=lambda one: one.event.step)


def _named(seen: Seen, ranks: Collection[int]) -> Seen:
    by = () if set(seen.ranks) >= set(ranks) else seen.ranks
    return replace(seen, event=replace(seen.event, ranks=by))
