"""What opens an event of a training run, and what is to blame for it, on made-up series."""

from __future__ import annotations

import math
import random

import pytest

from fxguard.history._judge import Judge
from fxguard.history._series import Kind, Row, Series
from fxguard.report.event import Event

NAN = math.nan

SERIES: list[tuple[Kind, str, str]] = [
    ("input", "input 0", ""),
    ("input", "input 0", "mean"),
    ("operation", "embed linear", ""),
    ("operation", "body linear", ""),
    ("operation", "body relu", ""),
    ("target", "targets", "mean"),
    ("operation", "loss mse_loss", ""),
    ("loss", "loss", ""),
    ("gradient", "embed.weight", ""),
    ("gradient", "body.weight", ""),
    ("setting", "learning rate of Adam's step", ""),
    ("state", "exp_avg_sq of Adam's step", ""),
    ("step", "embed.weight", ""),
    ("step", "body.weight", ""),
    ("weight", "embed.weight", ""),
    ("weight", "body.weight", ""),
    ("drift", "embed.weight", ""),
    ("drift", "body.weight", ""),
]
PLACE = {(kind, what, detail): place for place, (kind, what, detail) in enumerate(SERIES)}
USUAL = [1.0, 0.2, 2.0, 3.0, 3.0, 0.5, 2.3, 2.3, 0.1, 0.2, 1e-3, 1e-4, 2e-3]
USUAL += [2e-3, 8.0, 9.0, 0.0, 0.0]
STEADY = {"setting", "drift"}


def usual(step: int, noise: random.Random) -> list[float]:
    """The numbers of a step of a calm run."""
    row = []
    for (kind, _, _), number in zip(SERIES, USUAL, strict=True):
        spread = 0 if kind in STEADY else 0.001 if kind == "weight" else 0.05
        row.append(number * math.exp(noise.gauss(0, spread)))
    row[6] = row[7]
    return row


def judged(changes: dict[int, dict[int, float]], steps: int = 200) -> list[Event]:
    """The events of a calm run in which some numbers are multiplied, from some steps on."""
    noise = random.Random(0)
    judge = Judge()
    for place, (kind, what, detail) in enumerate(SERIES):
        name = f"{kind} {what} {detail}"
        assert judge.register(Series(name, kind, what, order=place, detail=detail)) == place
    events: list[Event] = []
    for step in range(steps):
        row = usual(step, noise)
        for since, factors in changes.items():
            if step >= since:
                for place, factor in factors.items():
                    row[place] = row[place] * factor if row[place] else factor
        events += judge.seen(Row(step, row, row))
    return events


LOSS = {6: 3.0, 7: 3.0, 8: 4.0, 9: 4.0}
FORWARD = {2: 6.0, 3: 5.0, 4: 5.0} | LOSS


@pytest.mark.parametrize(
    ("changes", "cause", "what", "lead"),
    [
        ({120: {0: 200.0} | FORWARD}, "data", "input 0", 0),
        ({120: {5: 7.0} | LOSS}, "data", "targets", 0),
        ({120: LOSS}, "data", "targets", 0),
        ({120: {17: 0.9} | {3: 5.0, 4: 5.0} | LOSS}, "weights", "body.weight", 0),
        ({120: {10: 30.0, 12: 30.0, 13: 30.0}, 122: FORWARD}, "step", "learning rate", 2),
        ({120: {11: 1e-3, 12: 9.0, 13: 9.0}, 121: FORWARD}, "step", "exp_avg_sq", 1),
        ({120: {9: 50.0}}, "gradient", "body.weight", 0),
        ({120: {4: 40.0} | LOSS}, "operation", "body relu", 0),
    ],
)
def test_what_left_its_band_first_is_the_cause(
    changes: dict[int, dict[int, float]], cause: str, what: str, lead: int
) -> None:
    (event,) = judged(changes)
    assert (event.cause, event.step, event.lead) == (cause, 120, lead)
    assert what in event.what
    assert 1 <= len(event.evidence) <= 3


def test_a_calm_run_has_no_events() -> None:
    assert not judged({}, 3000)
