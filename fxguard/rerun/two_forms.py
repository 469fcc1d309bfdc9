"""Values in two forms: the results of a graph, and those that Python code passes between graphs.

A value that does not differ has no second form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fxguard import trees
from fxguard.graph.nodes import memory_of
from fxguard.graph.wide_form import NotJudged, is_float

__all__ = ["Two", "TwoForms", "joined", "parts", "same_leaves", "stacked"]

CopyOf = Callable[[Tensor], Tensor]  # copies memory for the second form, in one dimension


class TwoForms(Interpreter):
    """The results of a graph in two forms.

    Attributes:
        env: results of nodes that are still needed, in the model's form.
        others: those that differ, in the second form.
    """

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.others: dict[Node, Any] = {}

    def keep(self, node: Node, low: Any, other: Any) -> None:
        """Note the two forms of a node's result."""
        self.env[node] = low
        if other is low or same_leaves(low, other):
            self.others.pop(node, None)
        else:
            self.others[node] = other

    def other_of(self, argument: Any, node: Node) -> Any:
        """An argument of a node in the second form."""
        return torch.fx.node.map_arg(argument, lambda read: self.others.get(read, self.env[read]))

    def materialize(self, written: Sequence[Node], copy_of: CopyOf) -> None:
        """Give a second form to values about to be written, and to all that share their memory."""
        for operand in written:
            low = self.env[operand]
            if operand in self.others or not is_float(low):
                continue
            memory = memory_of(low)
            if memory is None:
                raise NotJudged(f"a tensor of type {type(low).__name__} is written")
            shift, copy = self.moved(low, memory, copy_of)
            for alias, value in self.env.items():
                if alias not in self.others:
                    self.keep(alias, value, _in_memory(value, low, memory, shift, copy))

    def moved_in(self, memory: int | None) -> Node | None:
        """A node whose second form is another piece of memory than this; None if there is none.

        A view whose own elements do not differ is still one of a memory that does.
        """
        for node in self.others if memory is not None else ():
            value = self.env[node]
            if isinstance(value, Tensor) and memory_of(value) == memory:
                return node
        return None

    def is_moved(self, low: Any) -> bool:
        """Whether the memory of a value has a second form."""
        return is_float(low) and self.moved_in(memory_of(low)) is not None

    def moved(self, low: Tensor, memory: int, copy_of: CopyOf) -> tuple[int, Tensor]:
        """The second form of a piece of memory: how far elements are moved there, and a tensor."""
        node = self.moved_in(memory)
        if node is not None:
            value, other = self.env[node], self.others[node]
            if not isinstance(other, Tensor) or other.stride() != value.stride():
                raise NotJudged("memory with a second form in another order is written")
            return other.storage_offset() - value.storage_offset(), other
        flat = torch.empty(0, dtype=low.dtype, device=low.device)
        return 0, copy_of(flat.set_(low.untyped_storage()))


def _in_memory(value: Any, low: Tensor, memory: int, shift: int, copy: Tensor) -> Any:
    """The counterpart of a value in the copy of its memory."""

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != low.dtype or memory_of(x) != memory:
            return x
        return copy.as_strided(x.size(), x.stride(), x.storage_offset() + shift)

    return trees.tree_map(moved, value)


class Two:
    """A value in both forms, for Python code of a higher-order operation."""

    def __init__(self, low: Any, other: Any) -> None:
        self.low = low
        self.other = other

    def __getitem__(self, index: Any) -> Two:
        return Two(self.low[index], self.other[index])

    @property
    def shape(self) -> torch.Size:
        shape: torch.Size = self.low.shape
        return shape

    def __len__(self) -> int:
        return len(self.low)


def stacked(rows: Sequence[Any]) -> Any:
    """The results of iterations, as one tensor in each form."""
    low, other = parts(tuple(rows))
    if all(x is y for x, y in zip(low, other, strict=True)):
        return torch.stack(low)
    dtype = max((x.dtype for x in other), key=lambda dtype: dtype.itemsize)
    return Two(torch.stack(low), torch.stack([x.to(dtype) for x in other]))


def parts(values: Any) -> tuple[Any, Any]:
    """Both forms of a value in which some leaves have two forms."""
    low = trees.tree_map(lambda x: x.low if isinstance(x, Two) else x, values)
    other = trees.tree_map(lambda x: x.other if isinstance(x, Two) else x, values)
    return low, other


def joined(low: Any, other: Any) -> Any:
    """The inverse: leaves with two forms where they differ."""
    return trees.tree_map(lambda x, y: x if x is y else Two(x, y), low, other)


def same_leaves(low: Any, other: Any) -> bool:
    """Whether two values consist of the same objects."""
    one, two = trees.tree_leaves(low), trees.tree_leaves(other)
    return len(one) == len(two) and all(x is y for x, y in zip(one, two, strict=True))
