"""Several processes that run one model: one report, and one verdict where it is asked for."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import distributed

from fxguard.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["agree", "current_rank", "first_of", "is_first_to_tell", "told_by"]


def current_rank() -> int | None:
    """The rank of this process in the default process group, None without one."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return None


def is_first_to_tell(what: str) -> bool:
    """Whether no other rank has told of something yet; the others need not print it whole.

    Nobody waits for anybody here: the ranks look into the store in which they found each other.
    Where it does not answer each of them is the first.
    """
    if current_rank() is None or distributed.get_world_size() == 1:
        return True
    with contextlib.suppress(Exception):
        # There is no public way to the store; without it each rank prints its own report.
        store = distributed.distributed_c10d._get_default_store()
        return bool(store.add(f"fxguard/{what}", 1) == 1)
    return True


Told = TypeVar("Told")  # anything that can be pickled


def first_of(asks: bool) -> int | None:
    """The first of the ranks that ask for something, None where none does.

    All of them have to call this, as the two below.

    Raises:
        FxguardError: when torch was built without the gloo backend.
    """
    rank = current_rank()
    if rank is None or (count := distributed.get_world_size()) == 1:
        return (rank or 0) if asks else None
    # Numbers are on the host already, and gloo's collectives do not touch the device.
    lowest = torch.tensor([rank if asks else count])
    distributed.all_reduce(lowest, distributed.ReduceOp.MIN, group=_own_group())
    return None if int(lowest) == count else int(lowest)


def told_by(first: int, what: Told | None = None) -> Told | None:
    """What one rank tells the others.

    Args:
        first: that rank.
        what: can be pickled. The others give nothing.
    """
    box = [what]
    if current_rank() is not None and distributed.get_world_size() > 1:
        distributed.broadcast_object_list(box, src=first, group=_own_group())
    return box[0]


def agree(finding: Told | None) -> tuple[Told | None, bool]:
    """Let all ranks know what any of them found.

    Args:
        finding: what this rank found, None for nothing.

    Returns:
        This rank's finding, else that of the first rank that has one, and whether this rank is
        the first one, which prints it.
    """
    first = first_of(finding is not None)
    if first is None:
        return None, True
    told = told_by(first, finding)
    return (told if finding is None else finding), first == (current_rank() or 0)


# A group of fxguard's own: collectives of two users of one group would meet in another order on
# each rank, those of DistributedDataParallel above all, which run while the backward does.
_groups: dict[ProcessGroup, ProcessGroup] = {}


def _own_group() -> ProcessGroup:
    """All ranks, for fxguard alone; made when it is first used, by all ranks."""
    world = distributed.group.WORLD
    assert world is not None
    if world not in _groups:
        if not distributed.is_gloo_available():
            raise UsageError("sync_ranks needs torch with the gloo backend")
        _groups.clear()  # of a default group that was destroyed
        _groups[world] = distributed.new_group(backend="gloo")
    return _groups[world]
