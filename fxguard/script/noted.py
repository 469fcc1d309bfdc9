"""What is noted at the nodes of autograd: the record of an operation, and what it was given."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from fxguard.batch.autograd_nodes import metadata_of

__all__ = ["NOTED", "Leaves", "Noted", "flat", "leaves_before", "note", "noted_at"]

NOTED = "fxguard.noted"  # key in the metadata of autograd nodes

# The leaves of autograd that a script has read, by id.
Leaves = dict[int, weakref.ref[Tensor]]

# What is kept with a node of autograd: the record, and the tensors in its arguments that have
# none or need no gradient or are leaves, with their versions.
Noted = tuple[Any, dict[int, tuple[Tensor, int]]]


def noted_at(node: Any) -> Noted | None:
    """What was noted of the operation that a node of autograd belongs to."""
    return metadata_of(node).get(NOTED)


def leaves_before(node: Any) -> Leaves:
    """The leaves of autograd that a node reads."""
    read = (getattr(before, "variable", None) for before, _ in node.next_functions)
    return {id(leaf): weakref.ref(leaf) for leaf in read if isinstance(leaf, Tensor)}


def note(made: Any, args: tuple[Any, ...], kwargs: Any, result: Tensor, leaves: Leaves) -> None:
    """Note an operation at its node, and the leaves that it reads."""
    # Asking for the node of a view that was written without gradients raises.
    node = result.grad_fn if torch.is_grad_enabled() else None
    if node is None:
        return
    given: dict[int, tuple[Tensor, int]] = {}
    pairs = zip(flat((args, kwargs or {})), flat((made.args, made.kwargs)), strict=True)
    for position, (value, kept) in enumerate(pairs):
        if isinstance(value, Tensor) and (value.is_leaf or type(kept) is not type(made)):
            given[position] = value, value._version
            if value.is_leaf and value.requires_grad:
                leaves[id(value)] = weakref.ref(value)
    metadata_of(node)[NOTED] = made, given


def flat(value: Any) -> list[Any]:
    """The items of nested arguments, in order; a record is one item.

    What is nested counts on from the last position, and so do keywords.
    """
    if type(value) is dict:
        value = list(value.values())
    elif type(value) not in (tuple, list):
        return [value]
    found: list[Any] = []
    for each in value:
        found += flat(each)
    return found
