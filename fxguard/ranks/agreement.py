"""Several processes that run one model: one report and, if asked for, one verdict."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import distributed

from fxguard.errors import UsageError
from fxguard.forgiving import where_theirs_may_raise

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "agree",
    "current_rank",
    "first_of",
    "is_first_to_tell",
    "leave",
    "left_by_others",
    "rank_and_count",
    "told_by",
]


def current_rank() -> int | None:
    """The rank of this process in the default process group, None without one."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return None


def rank_and_count() -> tuple[int, int]:
    """The rank of this process and how many there are, also if it was started as one of several."""
    rank = current_rank()
    if rank is not None:
        return rank, distributed.get_world_size()
    try:
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, count) if 0 <= rank < count else (0, 1)


def is_first_to_tell(what: str) -> bool:
    """Whether no other rank has reported something yet; later ranks need not print it in full.

    No rank waits here: the ranks use the store in which they found each other. If it does not
    answer, each rank counts as the first.
    """
    if current_rank() is None or distributed.get_world_size() == 1:
        return True
    with where_theirs_may_raise():  # the rank that keeps the store may have ended
        # There is no public access to the store; without it, each rank prints its own report.
        store = distributed.distributed_c10d._get_default_store()
        return bool(store.add(f"fxguard/{what}", 1) == 1)
    return True


Told = TypeVar("Told")  # anything that can be pickled


def first_of(asks: bool) -> int | None:
    """The first of the ranks that ask for something; None if no rank does.

    All ranks have to call this, as with the two functions below.

    Raises:
        FxguardError: when torch was built without the gloo backend.
    """
    rank = current_rank()
    if rank is None or (count := distributed.get_world_size()) == 1:
        return (rank or 0) if asks else None
    # The numbers are on the host already, and gloo's collectives do not touch the device.
    lowest = torch.tensor([rank if asks else count])
    distributed.all_reduce(lowest, distributed.ReduceOp.MIN, group=_own_group())
    return None if int(lowest) == count else int(lowest)


def told_by(first: int, what: Told | None = None) -> Told | None:
    """Send something from one rank to the others.

    Args:
        first: the rank that sends.
        what: a picklable object; other ranks pass nothing.
    """
    box = [what]
    if current_rank() is not None and distributed.get_world_size() > 1:
        distributed.broadcast_object_list(box, src=first, group=_own_group())
    return box[0]


def agree(finding: Told | None) -> tuple[Told | None, bool]:
    """Share with all ranks what any of them found.

    Args:
        finding: what this rank found, None for nothing.

    Returns:
        This rank's finding, or else that of the first rank with one; and whether this rank is the
        first one, which prints it.
    """
    first = first_of(finding is not None)
    if first is None:
        return None, True
    told = told_by(first, finding)
    return (told if finding is None else finding), first == (current_rank() or 0)


# fxguard uses its own group: collectives of two users of one group could be ordered differently on
# each rank, above all those of DistributedDataParallel, which run during the backward.
_groups: dict[ProcessGroup, ProcessGroup] = {}


def _own_group() -> ProcessGroup:
    """A group of all ranks for fxguard alone; all ranks create it on first use."""
    world = distributed.group.WORLD
    assert world is not None
    if world not in _groups:
        if not distributed.is_gloo_available():
            raise UsageError("sync_ranks needs torch with the gloo backend")
        _groups.clear()  # these belong to a destroyed default group
        _groups[world] = distributed.new_group(backend="gloo")
    return _groups[world]


def leave(what: str, text: str) -> None:
    """Leave a text where other ranks can read it. No rank waits for another."""
    with where_theirs_may_raise():  # as in `is_first_to_tell`
        store = distributed.distributed_c10d._get_default_store()
        store.set(f"fxguard/{what}/{current_rank()}", text)


def left_by_others(what: str) -> dict[int, str]:
    """The texts that other ranks have left so far, by rank. No rank waits for another."""
    found: dict[int, str] = {}
    with where_theirs_may_raise():  # as in `is_first_to_tell`
        own, count = current_rank(), distributed.get_world_size()
        store = distributed.distributed_c10d._get_default_store()
        for rank in range(count):
            key = f"fxguard/{what}/{rank}"
            if rank != own and store.check([key]):
                found[rank] = store.get(key).decode()
    return found
