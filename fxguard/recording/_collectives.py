"""What a collective of ``torch.distributed`` reads, writes and exchanges, in one form for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxguard import trees
from fxguard.graph.exchanges import AFTERWARDS
from fxguard.recording.recorded import Ref
from fxguard.torch_names import resolve_process_group

__all__ = ["Collective", "collective_of", "waits"]

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
# The operands of those that write; all others return what they bring.
READS_AND_WRITES = {
    "allreduce_": ("tensors", "tensors"),
    "allreduce_coalesced_": ("tensors", "tensors"),
    "reduce_": ("tensors", "tensors"),
    "broadcast_": ("tensors", "tensors"),
    "allgather_": ("input_tensors", "output_tensors"),
    "allgather_coalesced_": ("input_list", "output_lists"),
    "_allgather_base_": ("input_tensor", "output_tensor"),
    "allgather_into_tensor_coalesced_": ("inputs", "outputs"),
    "gather_": ("input_tensors", "output_tensors"),
    "scatter_": ("input_tensors", "output_tensors"),
    "reduce_scatter_": ("input_tensors", "output_tensors"),
    "_reduce_scatter_base_": ("input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": ("inputs", "outputs"),
    "alltoall_": ("input_tensors", "output_tensors"),
    "alltoall_base_": ("input", "output"),
    "send": ("tensors", ""),
    "recv_": ("", "tensors"),
    "recv_any_source_": ("", "tensors"),
}
KINDS = {
    "all_reduce": ("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_"),
    "reduce": ("reduce_",),
    "broadcast": ("broadcast_", "broadcast"),
    "all_gather": (
        *("allgather_", "_allgather_base_", "allgather_coalesced_"),
        *("allgather_into_tensor_coalesced_", "all_gather_into_tensor"),
        *("all_gather_into_tensor_coalesced", "all_gather_into_tensor_out"),
    ),
    "gather": ("gather_",),
    "scatter": ("scatter_",),
    "reduce_scatter": (
        *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
        *("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
        "reduce_scatter_tensor_out",
    ),
    "all_to_all": ("alltoall_", "alltoall_base_", "all_to_all_single", "shard_dim_alltoall"),
    "send": ("send",),
    "recv": ("recv_", "recv_any_source_"),
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
FLAT = ("alltoall_base_", "all_to_all_single")  # rows of one tensor, some to each rank


@dataclass(slots=True)
class Collective:
    """One call, as a rank makes it."""

    kind: str  # "all_reduce"
    ranks: list[int]  # of its group
    reads: list[Tensor] = field(default_factory=list)
    writes: list[Tensor] = field(default_factory=list)  # what it is written into; [] if it returns
    peer: int | None = None  # root, source or destination: a rank among `ranks`, by its place
    told: dict[str, Any] = field(default_factory=dict)  # what else matters

    def as_arguments(self, held: Callable[[Tensor], int]) -> dict[str, Any]:
        """The arguments as they are recorded."""
        return {
            "kind": self.kind,
            "ranks": list(self.ranks),
            "reads": [Ref(held(x)) for x in self.reads],
            "peer": self.peer,
            **self.told,
        }


def waits(func: Any) -> bool:
    """Whether an operation returns its operand, when a collective has ended."""
    return _namespace(func) in NAMESPACES and _name(func) in AFTERWARDS


def collective_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Collective | None:
    """What a call exchanges; None if it is no collective, or one that is not known.

    Args:
        func: an operation, as a dispatch mode is given it.
        args: its arguments.
        kwargs: likewise.

    Raises:
        Exception: whatever a group of somebody else's does that has no ranks.
    """
    name = _name(func)
    if _namespace(func) not in NAMESPACES or name not in KIND_OF:
        return None
    given = dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | dict(kwargs)
    found = Collective(KIND_OF[name], _ranks_of(given))
    read, written = READS_AND_WRITES[name] if _namespace(func) == "c10d" else _functional(name)
    found.reads, found.writes = list(_tensors(given.get(read))), list(_tensors(given.get(written)))
    if not read and found.kind != "recv":
        found.reads = list(_tensors(args))
    found.told = dict(_told(name, given))
    if found.kind in ("broadcast", "reduce", "gather", "scatter"):
        found.peer = int(given["root_rank"] if "root_rank" in given else given["src"])
        rank = torch.distributed.get_rank()
        if found.kind == "broadcast" and found.ranks[found.peer] != rank:
            found.reads = []
        if found.kind == "reduce" and found.ranks[found.peer] != rank:
            found.writes = []
    if found.kind in ("send", "recv"):
        peer = given.get("dst", given.get("src"))
        found.peer = None if peer is None else int(peer)
        found.told["tag"] = int(given.get("tag", 0))
    return found


def _functional(name: str) -> tuple[str, str]:
    """What an operation of the functional collectives reads and writes; they return, else."""
    if name.endswith("_"):
        return "input", "input"
    return ("input", "out") if name.endswith("_out") else ("", "")


def _told(name: str, given: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    reduce = given.get("reduce_op")
    if isinstance(reduce, str):
        yield "reduce", reduce
    if name in FLAT:
        yield "rows_sent", [int(x) for x in given.get("input_split_sizes") or ()]
    if name == "shard_dim_alltoall":
        yield "gather_dim", int(given["gather_dim"])
        yield "shard_dim", int(given["shard_dim"])
    if name in ("allgather_", "reduce_scatter_", "alltoall_", "gather_", "scatter_"):
        yield "lists", True


def _ranks_of(given: Mapping[str, Any]) -> list[int]:
    group = given.get("process_group", given.get("group_name"))
    distributed = torch.distributed
    if isinstance(group, str):
        group = resolve_process_group(group)
    elif isinstance(group, torch.ScriptObject):
        group = distributed.ProcessGroup.unbox(group)
    return [int(rank) for rank in distributed.get_process_group_ranks(group)]


def _tensors(nest: Any) -> Iterable[Tensor]:
    return (x for x in trees.tree_leaves(nest) if isinstance(x, Tensor))


def _namespace(func: Any) -> str:
    return str(getattr(func, "namespace", ""))


def _name(func: Any) -> str:
    packet = getattr(func, "overloadpacket", None)
    return "" if packet is None else str(packet.__name__)
