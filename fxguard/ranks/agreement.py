"""Several processes that run one model: one report, and one verdict where it is asked for."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import distributed

from fxguard.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["agree", "current_rank", "is_first_to_tell"]


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


Finding = TypeVar("Finding")  # anything that can be pickled


def agree(finding: Finding | None) -> tuple[Finding | None, bool]:
    """Let all ranks know what any of them found. All of them have to call this.

    Args:
        finding: what this rank found, None for nothing.

    Returns:
        This rank's finding, else that of the first rank that has one, and whether this rank is
        the first one, which prints it.

    Raises:
        FxguardError: when torch was built without the gloo backend.
    """
    rank = current_rank()
    if rank is None or (count := distributed.get_world_size()) == 1:
        return finding, True
    group = _own_group()
    # Numbers are on the host already, and gloo's collectives do not touch the device.
    lowest = torch.tensor([count if finding is None else rank])
    distributed.all_reduce(lowest, distributed.ReduceOp.MIN, group=group)
    first = int(lowest)
    if first == count:
        return None, True
    box = [finding]
    distributed.broadcast_object_list(box, src=first, group=group)
    return (box[0] if finding is None else finding), first == rank


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
