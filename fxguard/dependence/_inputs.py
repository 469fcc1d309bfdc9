"""The inputs of a model: which of them are data, and which dimension is that of samples."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fxguard import trees
from fxguard.graph.wide_form import is_float

__all__ = ["Inputs"]

MASKS = ("mask", "pad", "valid", "is_real")  # in names of inputs that tell what is padding


class Inputs:
    """The tensors that a model is given, with their names.

    Args:
        model: gives the names of its parameters.
        args: positional arguments.
        kwargs: keyword arguments.
        samples: the dimension of samples.

    Attributes:
        tensors: all of them, in order.
        names: of each; a tensor inside a container has the name of that.
        batch: how many samples there are; 0 if that is not known.
    """

    def __init__(
        self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int
    ) -> None:
        self.leaves, self.spec = trees.tree_flatten((args, kwargs))
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [self.leaves[i] for i in self.places]
        self.names = list(_names(model, args, kwargs))
        self.samples = samples
        main = self.main
        self.batch = 0 if main is None or main.dim() <= samples else main.shape[samples]

    @property
    def main(self) -> Tensor | None:
        """The first tensor with a dimension besides that of samples, or the first one."""
        deep = [x for x in self.tensors if x.dim() > 1 and x.dtype is not torch.bool]
        return next(iter([*deep, *(x for x in self.tensors if x.dim())]), None)

    def sample_dim(self, tensor: Tensor) -> int | None:
        """The dimension of samples of an input; None if it holds none.

        Masks have it in front, also where the data has it elsewhere.
        """
        for dim in (self.samples, 0):
            if self.batch and tensor.dim() > dim and tensor.shape[dim] == self.batch:
                return dim
        return None

    def rebuilt(self, tensors: Sequence[Tensor]) -> Any:
        """The arguments with other tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return trees.tree_unflatten(leaves, self.spec)

    def is_data(self, at: int) -> bool:
        """Whether an input may hold other contents: it neither masks nor counts."""
        x = self.tensors[at]
        is_count = x.dim() == 1 and not is_float(x) and x is not self.main
        return not (is_count or self.is_mask(at) or self.is_order(at))

    def is_mask(self, at: int) -> bool:
        """Whether an input says of which parts others consist, rather than being data."""
        x, name = self.tensors[at], self.names[at].lower()
        if x.dtype is torch.bool:
            return True
        return any(word in name for word in MASKS) and x is not self.main

    def groups(self, count: int) -> Tensor | None:
        """Which sample each element of dimension 0 belongs to, as in a batch of graphs.

        Args:
            count: how many samples there are.

        Returns:
            An input that counts up to this number, ``[0, 0, 0, 1, 1, ...]``; None if there is none.
        """
        for x in self.tensors:
            if x.dim() == 1 and not is_float(x) and x.dtype is not torch.bool and len(x) > count:
                steps = x.diff()
                if (
                    int(x[0]) == 0
                    and int(x[-1]) == count - 1
                    and bool(((steps == 0) | (steps == 1)).all())
                ):
                    return x.cpu()
        return None

    def is_order(self, at: int) -> bool:
        """Whether an input counts positions: rows of 0, 1, 2, ..."""
        x = self.tensors[at]
        if is_float(x) or x.dim() == 0 or x.shape[-1] < 2 or x.dtype is torch.bool:
            return False
        steps = x.diff(dim=-1)
        return bool(((steps == 1) | (steps == 0)).all()) and bool((steps == 1).any())


def _names(model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        by_identity = {id(value): name for name, value in bound.arguments.items()}
    except (TypeError, ValueError):  # it takes *args, or other arguments
        by_identity = {}
    for i, value in enumerate(args):
        name = by_identity.get(id(value), f"input {i}")
        yield from (name for x in trees.tree_leaves(value) if isinstance(x, Tensor))
    for name, value in kwargs.items():
        yield from (name for x in trees.tree_leaves(value) if isinstance(x, Tensor))
