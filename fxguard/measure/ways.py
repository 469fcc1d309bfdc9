"""The ways to measure the values of a graph, and which backend takes which.

A check in a graph calls :attr:`Way.abs_min_max` of one value, and :attr:`Way.collect` of what all
checks gave. The numbers are the same whichever way is taken.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fxguard.measure import eager, func_levels, inductor, native, traceable

__all__ = ["EAGER", "INDUCTOR", "TRACEABLE", "WAYS", "Way"]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to the ranges of the values of a graph."""

    name: str
    abs_min_max: Callable[[Any], Any]  # a value to what `collect` takes: usually two tensors
    # What all checks of a graph gave, and statistics of bodies, to a tensor of shape [rows, 2].
    collect: Callable[[Sequence[Any]], Tensor]
    is_traceable: bool  # whether a compiler can follow; if not, the graph has to run as it is
    # The same for what stands in memory anyway, and of which tensors it is to be asked.
    in_memory: Callable[[Any], Any] | None = None
    takes: Callable[[Any], bool] = lambda example: False
    # Functions that a cache of compiled graphs is told to take for known: those that our graphs
    # call. Empty where the backend has no such cache.
    cacheable: tuple[Callable[..., Any], ...] = ()

    def cache_keys(self) -> dict[str, str]:
        """Qualified names of the cacheable functions, and what changes when they do.

        That is a hash of the files of this package. Nothing where there are no files to read, such
        as in an archive.
        """
        version = _version()
        if version is None:
            return {}
        return {f"{each.__module__}.{each.__name__}": version for each in self.cacheable}


TRACEABLE = Way("traceable", traceable.abs_min_max, traceable.collect, is_traceable=True)
EAGER = Way("eager", native.reading_or(eager.abs_min_max), eager.collect, is_traceable=False)
INDUCTOR = Way(
    "inductor",
    inductor.abs_min_max,
    inductor.collect,
    is_traceable=True,
    in_memory=inductor.abs_min_max_in_memory,
    takes=inductor.is_large,
    cacheable=(
        inductor.abs_min_max,
        inductor.abs_min_max_in_memory,
        inductor.collect,
        func_levels.without_levels,
    ),
)

# Name of a backend of TorchDynamo to the cheapest way under it; TRACEABLE under all others.
WAYS = {"eager": EAGER, "inductor": INDUCTOR}


@functools.cache
def _version() -> str | None:
    try:
        files = sorted(Path(__file__).parent.glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
        return hashlib.sha256(text).hexdigest() if text else None
    except OSError:
        return None
