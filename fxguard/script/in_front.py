"""Where gradients arrive at what a script has computed in front of its models and their losses."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxguard.batch.autograd_nodes import metadata_of
from fxguard.measure.func_levels import has_levels
from fxguard.script.noted import noted_at
from fxguard.torch_names import current_autograd_node

__all__ = ["Arrival", "InFront"]

HEARD = "fxguard.heard"  # key in the metadata of autograd nodes: who listens there


class Arrival(NamedTuple):
    """Where a backward begins, or comes to what a script has computed."""

    node: Any  # of autograd
    gradient: Tensor | None  # None for the backward of a single number


class InFront:
    """Listens to the gradients of tensors that a model or its loss has read."""

    def __init__(self) -> None:
        self._arrived: list[Arrival] = []
        self._me = weakref.ref(self)

    def listen(self, values: Iterable[Any]) -> None:
        """Models read these values; those of them that the script computed may get gradients."""
        for value in values:
            # Asking for the node of a view that was written without gradients raises.
            if not isinstance(value, Tensor) or not value.requires_grad or has_levels(value):
                continue
            node: Any = value.grad_fn
            noted = None if node is None else noted_at(node)
            if noted is None or noted[0].path is not None:  # one node for several results
                continue
            known = metadata_of(node)
            if known.get(HEARD) is not self._me:
                known[HEARD] = self._me
                node.register_prehook(_Listener(self._me, value.output_nr))

    def arrives(self, output: int, gradients: tuple[Tensor | None, ...]) -> None:
        """Called in a backward before the node that it is at runs."""
        gradient = gradients[output]
        if gradient is not None and not has_levels(gradient):
            self._arrived.append(Arrival(current_autograd_node(), gradient.detach()))

    def take(self) -> list[Arrival]:
        """What has arrived since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived


class _Listener(NamedTuple):
    """A hook on a node of autograd. It keeps nobody alive."""

    of: weakref.ref[InFront]
    output: int

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        listening = self.of()
        if listening is not None and not torch.compiler.is_compiling():
            listening.arrives(self.output, gradients)
