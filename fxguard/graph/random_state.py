"""The state of random number generators, saved for a second run and restored after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxguard.graph import nodes

__all__ = ["RandomState", "random_state_kept"]


@dataclass(slots=True)
class RandomState:
    """The state of every generator that an operation with certain arguments may draw from."""

    cpu: Tensor
    devices: dict[int, Tensor]
    generators: tuple[tuple[torch.Generator, Tensor], ...] = ()  # the user's own

    @classmethod
    def now(cls, args: Any) -> RandomState:
        """The current state, including generators among the arguments."""
        leaves = list(nodes.leaves(args))
        used: set[int] = set()
        if torch.cuda.is_initialized():  # otherwise there is no tensor on it
            used = {a.device.index for a in leaves if isinstance(a, Tensor) and a.is_cuda}
        return cls(
            torch.get_rng_state(),
            {device: torch.cuda.get_rng_state(device) for device in used},
            tuple((a, a.get_state()) for a in leaves if isinstance(a, torch.Generator)),
        )

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            torch.cuda.set_rng_state(state, device)
        for generator, state in self.generators:
            generator.set_state(state)

    def is_same(self, other: RandomState) -> bool:
        """Whether nothing was drawn between two states of the same generators."""
        pairs = [(self.cpu, other.cpu)]
        pairs += [(state, other.devices[device]) for device, state in self.devices.items()]
        given = zip(self.generators, other.generators, strict=True)
        pairs += [(mine, theirs) for (_, mine), (_, theirs) in given]
        return all(torch.equal(a, b) for a, b in pairs)


@contextlib.contextmanager
def random_state_kept(args: Any) -> Iterator[None]:
    """Restore the random state after the block."""
    state = RandomState.now(args)
    try:
        yield
    finally:
        state.restore()
