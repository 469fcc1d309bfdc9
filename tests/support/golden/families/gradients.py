"""A bad gradient at operands of the zoo's models."""

from __future__ import annotations

import functools

import pytest

from support import zoo
from support.planting_gradients import BAD, Planter, reports_and_bad_leaves

from ..records import Cases, Group, Record, of_reports

# Model, compiler, and each how many operands.
PLANTED = [
    *((name, None, 1) for name in ("in_place", "containers", "cnn", "twice")),
    *((name, "aot_eager", 2) for name in ("in_place", "containers", "cnn", "twice")),
    *((name, None, 3) for name in ("lstm", "encoder")),
    *((name, "aot_eager", 7) for name in ("lstm", "encoder")),
    *((name, None, 53) for name in ("t5", "gpt2", "vit", "mixtral", "resnet")),
]


def cases() -> Cases:
    """Each capture is planted anew."""
    for name, compiler, every in PLANTED:
        group = functools.partial(of_one_model, name, compiler, every)
        yield f"{name}/{compiler or 'eager'}", Group(group)


def of_one_model(name: str, compiler: str | None, every: int) -> Cases:
    """Operands of the captured graphs, by number."""
    counting = Planter()
    with pytest.MonkeyPatch.context() as patch:
        reports_and_bad_leaves(zoo.ZOO[name], counting, patch, compiler)
    for site in range(every // 2, counting.count, every):
        yield str(site), functools.partial(reported, name, site, compiler)


def reported(name: str, site: int, compiler: str | None) -> Record:
    """What is said of a training step, and which weights have a bad gradient."""
    planter = Planter(site, BAD[site % 2])
    with pytest.MonkeyPatch.context() as patch:
        found, bad = reports_and_bad_leaves(zoo.ZOO[name], planter, patch, compiler)
    return {**of_reports(found), "bad": bad}
