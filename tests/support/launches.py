"""How many kernels a step would launch on a GPU, counted on a CPU.

Each operation of torch that has no other operation in it, and no mere view, is taken for one
launch; so is an operation on a list of tensors. A reading of fxguard's kernel is one, whatever it
reads (:mod:`support.pretended_gpu`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from fxguard.measure import gpu, gpu_table
from support.pretended_gpu import pretended

__all__ = ["kernels_of", "launched_by_checks"]

READING = "a reading of fxguard"

# What makes no kernel: views, memory, what asks for a property, copies to the host that follow one.
NO_KERNEL = frozenset(
    """
    _local_scalar_dense _reshape_alias _unsafe_view alias as_strided as_strided_ broadcast_tensors
    chunk detach detach_ diagonal empty empty_like empty_strided expand flatten is_nonzero item
    lift_fresh movedim narrow new_empty new_empty_strided output_nr permute reshape resize_
    resolve_conj resolve_neg result_type select set_ set_data slice split split_with_sizes squeeze
    swapaxes t to transpose unbind unflatten unfold unsqueeze view view_as view_as_real
    """.split()
)


def kernels_of(step: Callable[[], Any]) -> Counter[str]:
    """What one call of a step would launch, by the name of the operation."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    found: Counter[str] = Counter()
    for event in seen.events():
        name, children = event.name, event.cpu_children
        if name == READING:
            found[name] += 1
        elif name.startswith("aten::") and not _is_inside(event):
            bare = name.removeprefix("aten::")
            is_leaf = not any(child.name.startswith("aten::") for child in children)
            if bare.startswith("_foreach") or (is_leaf and bare not in NO_KERNEL):
                found[bare] += 1
    return found


def _is_inside(event: Any) -> bool:
    """Whether it belongs to something that is counted as one."""
    around = event.cpu_parent
    while around is not None:
        if around.name == READING or around.name.startswith("aten::_foreach"):
            return True
        around = around.cpu_parent
    return False


@contextlib.contextmanager
def launched_by_checks(*, together: bool = True) -> Iterator[None]:
    """Checks measure as on a GPU, and each reading can be counted."""
    with pretended(together=together):
        one, many = gpu.read, gpu_table.read

        def read_one(value: Any) -> Any:
            with record_function(READING):
                return one(value)

        def read_many(*table: Any) -> Any:
            with record_function(READING):
                return many(*table)

        gpu.read, gpu_table.read = read_one, read_many
        try:
            yield
        finally:
            gpu.read, gpu_table.read = one, many
