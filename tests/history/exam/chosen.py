"""Runs of the exam as parameters of a test: CI takes a few, and a campaign takes all."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from history.exam.healthy import HEALTHY
from history.exam.planted import PLANTED

__all__ = ["healthy", "planted"]


def planted(sample: Collection[str]) -> pytest.MarkDecorator:
    """``run`` is each planted one; those whose names are in the sample are no campaign."""
    runs = [
        pytest.param(run, id=run.name, marks=() if run.name in sample else pytest.mark.campaign)
        for run in PLANTED
    ]
    return pytest.mark.parametrize("run", runs)


def healthy(sample: Mapping[str, int]) -> pytest.MarkDecorator:
    """``run`` and ``steps``: some healthy ones for a few steps, and all in full as a campaign."""
    few = [pytest.param(x, sample[x.name], id=x.name) for x in HEALTHY if x.name in sample]
    full = [
        pytest.param(x, x.steps, id=f"{x.name}-in-full", marks=pytest.mark.campaign)
        for x in HEALTHY
    ]
    return pytest.mark.parametrize(("run", "steps"), [*few, *full])
