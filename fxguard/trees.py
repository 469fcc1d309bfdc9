"""Nested containers of tensors, flattened and mapped: all that is used of torch's own trees.

``torch.utils._pytree`` is private, and what TorchDynamo, AOTAutograd and ``torch.export`` use
themselves: with another implementation, a container that a user has registered with it would be a
leaf here and a container there.
"""

from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
    treespec_leaf,
    treespec_tuple,
)

__all__ = [
    "keystr",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "treespec_leaf",
    "treespec_tuple",
]
