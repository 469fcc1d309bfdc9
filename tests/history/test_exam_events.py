"""The exam of `fxguard.history` on the numbers of a plain recorder: causes, and false alarms.

Events are found online, in one pass over the rows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fxguard.history._judge import Judge
from fxguard.history._series import Row
from fxguard.report.event import Event
from history.exam.healthy import HEALTHY, Healthy
from history.exam.planted import PLANTED, Planted
from history.exam.training import Started
from history.measured import Measured

PLANTED_SAMPLE = {"mlp-dropout-of-nearly-all", "mlp-momentum-turned"}
HEALTHY_SAMPLE = {"gan": 100, "mlp-epochs": 150}


def events_of(train: Callable[[Started], object]) -> list[Event]:
    judge, events = Judge(), list[Event]()

    def seen(row: Row) -> None:
        events.extend(judge.seen(row))

    with Measured(judge.register, seen) as measured:
        train(measured.started)
    return events


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            run, id=run.name, marks=() if run.name in PLANTED_SAMPLE else pytest.mark.campaign
        )
        for run in PLANTED
    ],
)
def test_a_planted_cause_is_named(run: Planted) -> None:
    """Its kind, its name and its step; nothing else is told."""
    first, *others = events_of(run.train)
    assert run.is_named_by(first), first
    assert 1 <= len(first.evidence) <= 3
    assert all(one.cause == run.cause for one in others)


@pytest.mark.parametrize(
    ("run", "steps"),
    [
        *(
            pytest.param(run, HEALTHY_SAMPLE[run.name], id=run.name)
            for run in HEALTHY
            if run.name in HEALTHY_SAMPLE
        ),
        *(
            pytest.param(run, run.steps, id=f"{run.name}-in-full", marks=pytest.mark.campaign)
            for run in HEALTHY
        ),
    ],
)
def test_a_healthy_run_has_no_events(run: Healthy, steps: int) -> None:
    assert not events_of(lambda started: run.train(started, steps))
