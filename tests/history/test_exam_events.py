"""The exam of `fxguard.history` on the numbers of a plain recorder: causes, and false alarms.

Events are found online, in one pass over the rows.
"""

from __future__ import annotations

from collections.abc import Callable

from fxguard.history._judge import Judge
from fxguard.history._series import Row
from fxguard.report.event import Event
from history.exam.chosen import healthy, planted
from history.exam.healthy import Healthy
from history.exam.planted import Planted
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


@planted(PLANTED_SAMPLE)
def test_a_planted_cause_is_named(run: Planted) -> None:
    """Its kind, its name and its step; nothing else is told."""
    first, *others = events_of(run.train)
    assert run.is_named_by(first), first
    assert 1 <= len(first.evidence) <= 3
    assert all(one.cause == run.cause for one in others)


@healthy(HEALTHY_SAMPLE)
def test_a_healthy_run_has_no_events(run: Healthy, steps: int) -> None:
    assert not events_of(lambda started: run.train(started, steps))
