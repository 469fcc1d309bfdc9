"""The ways to measure the values of a graph, and the way for each backend.

A check in a graph calls :attr:`Way.abs_min_max` on one value; :attr:`Way.collect` joins the results
of all checks. The numbers are the same in every way.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fxguard.measure import eager, func_levels, inductor, native, traceable, waiting

__all__ = ["EAGER", "INDUCTOR", "TRACEABLE", "WAYS", "Way"]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to measure the ranges of a graph's values."""

    name: str
    abs_min_max: Callable[[Any], Any]  # from a value to an input of `collect`, usually two tensors
    # From the results of all checks and the statistics of bodies to a tensor of shape [rows, 2].
    collect: Callable[[Sequence[Any]], Tensor]
    is_traceable: bool  # whether a compiler can trace it; if not, the graph has to run uncompiled
    # The same for tensors that are in memory anyway, and the test for such tensors, of which it is
    # given the example of the capture.
    in_memory: Callable[[Any], Any] | None = None
    takes: Callable[[Any], bool] = lambda example: False
    # For values whose measurements may wait for each other, in a graph that runs uncompiled.
    together: waiting.Together | None = None
    # Functions called in our graphs, registered as cacheable in a cache of compiled graphs. Empty
    # if the backend has no such cache.
    cacheable: tuple[Callable[..., Any], ...] = ()

    def cache_keys(self) -> dict[str, str]:
        """Qualified names of the cacheable functions, with a key that changes when they change.

        The key is a hash of this package's files. Empty if there are no files to read, such as in
        an archive.
        """
        version = _version()
        if version is None:
            return {}
        return {f"{each.__module__}.{each.__name__}": version for each in self.cacheable}


TRACEABLE = Way("traceable", traceable.abs_min_max, traceable.collect, is_traceable=True)
EAGER = Way(
    "eager",
    native.reading_or(eager.otherwise),
    eager.collect,
    is_traceable=False,
    in_memory=native.reading_dense_or(eager.otherwise),
    takes=native.is_dense,
    together=waiting.ON_A_GPU,
)
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

# From the name of a TorchDynamo backend to its cheapest way; TRACEABLE for all others.
WAYS = {"eager": EAGER, "inductor": INDUCTOR}


@functools.cache
def _version() -> str | None:
    try:
        files = sorted(Path(__file__).parent.glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
        return hashlib.sha256(text).hexdigest() if text else None
    except OSError:
        return None
