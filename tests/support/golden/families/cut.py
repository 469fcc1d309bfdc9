"""Models that TorchDynamo cuts into graphs, leaves to Python or enters whole."""

from __future__ import annotations

import functools
from typing import Any

from support.cut_models import CASES, LOW, MODES, Case
from support.ways import WAYS

from ..records import Cases, Record, guarded


def cases() -> Cases:
    """Each in three ways, and one of them within a mode, with replay, or under a backward."""
    others: list[dict[str, Any]] = [
        *({"mode": mode} for mode in MODES if mode != "nothing"),
        {"replay": True},
        {"backward_too": True},
    ]
    for place, (name, case) in enumerate(CASES.items()):
        for way in WAYS:
            yield f"{name}/{way}", functools.partial(called, case, way=way)
        for other in (others[place % len(others)], others[(place + 2) % len(others)]):
            title = "/".join(f"{key} {value}" for key, value in other.items())
            yield f"{name}/{title}", functools.partial(called, case, **other)


def called(case: Case, mode: str = "nothing", backward_too: bool = False, **options: Any) -> Record:
    """What is said of a good batch, two bad ones and a good one."""

    def call(model: Any) -> None:
        for x in (LOW, case.faulty, case.faulty, LOW):
            if not backward_too:
                model(x)
                continue
            output = model(x.clone().requires_grad_())
            if output.requires_grad:
                output.sum().backward()

    with MODES[mode]():
        return guarded(case.make(), call, **options)
