"""What the names of weights tell: layers that take turns, twins, parts beside others."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping

import torch

__all__ = ["is_beside", "kind_of", "pattern_of", "top_of", "twins_of"]


def twins_of(shapes: Mapping[str, torch.Size], moved: Collection[str]) -> set[str]:
    """The parts of a model, by name, that are built as another one whose weights have moved."""
    parts = defaultdict[str, set[tuple[str, torch.Size]]](set)
    for name, shape in shapes.items():
        if "." in name:
            parts[top_of(name)].add((name.partition(".")[2], shape))
    trained = {top_of(name) for name in moved}
    return {
        top
        for top, part in parts.items()
        if top not in trained and any(parts.get(other) == part for other in trained)
    }


def kind_of(name: str) -> str:
    """``norm.weight`` of ``blocks.3.norm.weight``, ``gamma`` of ``blocks.3.gamma``."""
    parts = name.split(".")[-2:]
    return ".".join(part for part in parts if not part.isdigit())


def is_beside(name: str, held: Collection[str]) -> bool:
    """Whether a weight stands in a part of the model that has others, which are held."""
    module = name.rpartition(".")[0]
    for _ in range(2):  # its own module, or the one around that
        if module and any(other.startswith(f"{module}.") for other in held):
            return True
        module = module.rpartition(".")[0]
    return False


def top_of(name: str) -> str:
    """``target`` of ``target.0.weight``."""
    return name.partition(".")[0]


def pattern_of(name: str) -> str:
    """``experts.*.weight`` of ``experts.3.weight``; the name itself if it has no number."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name) if re.search(r"\.\d+\.", name) else f"={name}"
