"""Infinities that somebody wants, or that nobody reads, and their sisters that went wrong."""

from __future__ import annotations

import functools
from typing import Any

import torch

from support.bad_and_discarded import DISCARDED
from support.masks_intended import MASKS
from support.too_large_and_healthy import TOO_LARGE
from support.twins import Twin
from support.ways import AOT, EAGER, PYTHON

from ..records import Cases, Record, guarded

FILES = {"mask": MASKS, "discarded": DISCARDED, "large": TOO_LARGE}
WAYS = ({"way": AOT}, {"replay": True}, {"way": PYTHON}, {"strict": True})


def cases() -> Cases:
    """Healthy ones twice in a row, for the precedent; some in another way, or another dtype."""
    place = 0
    for title, twins in FILES.items():
        for number, twin in enumerate((*twins.healthy, *twins.wrong)):
            place += 1
            name, run = f"{title}/{number}/{twin}", functools.partial(two_batches, twin)
            yield f"{name}/{EAGER}", run
            options = WAYS[place % len(WAYS)]
            if place % 2:
                yield (
                    f"{name}/{'/'.join(map(str, options.values()))}",
                    functools.partial(run, **options),
                )
            if place % 3 == 0 and len(twin.dtypes) > 1:
                yield f"{name}/half", functools.partial(run, dtype=twin.dtypes[1])


def two_batches(twin: Twin, dtype: torch.dtype | None = None, **options: Any) -> Record:
    """What is said of two batches of one idiom."""
    kind = dtype or twin.dtypes[0]

    def call(model: Any) -> None:
        for seed in (1, 2):
            twin.run(model, kind, seed)

    return guarded(twin.model(kind), call, **options)
