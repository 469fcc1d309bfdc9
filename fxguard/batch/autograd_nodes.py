"""Nodes of autograd: their metadata, and the user's functions that they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["function_of", "functions_behind", "metadata_of"]


def metadata_of(node: Any) -> dict[Any, Any]:
    """The metadata of a node, where anything may be kept with it."""
    kept: dict[Any, Any] = node.metadata
    return kept


def function_of(node: Any) -> type[torch.autograd.Function] | None:
    """The function that a node belongs to; None for operations and for torch's own functions."""
    kind = getattr(node, "_forward_cls", None)
    is_torchs = kind is None or kind.__module__.partition(".")[0] == torch.__name__
    return None if is_torchs else kind


def functions_behind(node: Any) -> Iterator[Any]:
    """The node of a function, and the nodes of functions that made its inputs."""
    if function_of(node) is not None:
        yield node
        for before, _ in node.next_functions:
            yield from functions_behind(before)
