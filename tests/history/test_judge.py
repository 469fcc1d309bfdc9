"""What opens an event of a training run, and what is to blame for it, on made-up series."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from fxguard.history._first import Exit
from fxguard.history._judge import Judge
from fxguard.history._run import Run
from fxguard.history._said import said
from fxguard.history._series import Kind, Row, Series
from fxguard.history.history import load_history
from fxguard.report.event import Event
from support.needs import needs

NAN = math.nan

Described = tuple[Kind, str, str]  # and its detail

SERIES: list[Described] = [
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


def usual(noise: random.Random) -> list[float]:
    """The numbers of a step of a calm run."""
    row = []
    for (kind, _, _), number in zip(SERIES, USUAL, strict=True):
        spread = 0 if kind in STEADY else 0.001 if kind == "weight" else 0.05
        row.append(number * math.exp(noise.gauss(0, spread)))
    row[6] = row[7]
    return row


Numbers = list[float]


def events_of(rows: Iterable[Numbers], series: Sequence[Described] = SERIES) -> list[Event]:
    """What a judge says of a run. A row may be shorter: what it lacks is registered later."""
    judge, events, known = Judge(), list[Event](), 0
    for step, row in enumerate(rows):
        for place in range(known, len(row)):
            kind, what, detail = series[place]
            name = f"{kind} {what} {detail}"
            described = Series(name, kind, what, order=place, detail=detail, dtype="float16")
            assert judge.register(described) == place
        known = max(known, len(row))
        events += judge.seen(Row(step, row, row))
    return events


def judged(changes: dict[int, dict[int, float]], steps: int = 200) -> list[Event]:
    """The events of a calm run in which some numbers are multiplied, from some steps on."""
    noise = random.Random(0)

    def rows() -> Iterator[Numbers]:
        for step in range(steps):
            row = usual(noise)
            for since, factors in changes.items():
                if step >= since:
                    for place, factor in factors.items():
                        row[place] = row[place] * factor if row[place] else factor
            yield row

    return events_of(rows())


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


def test_a_setting_that_was_constant_and_changes_a_little_is_a_cause() -> None:
    (event,) = judged({120: {10: 1.2}, 121: FORWARD})
    assert (event.cause, event.what) == ("step", "learning rate of Adam's step")
    assert event.evidence[0] == "learning rate of Adam's step goes from 0.001 to 0.0012 in step 120"


def test_a_factor_behind_the_loss_is_an_operation() -> None:
    """What compares outputs with targets is in its band."""
    noise = random.Random(11)
    series = [*SERIES[:7], ("operation", "loss mul", ""), *SERIES[7:]]

    def rows() -> Iterator[Numbers]:
        for step in range(200):
            row = usual(noise)
            factor = 20.0 if step >= 120 else 1.0
            row[8] *= factor
            row[9] *= factor
            yield [*row[:7], row[6] * factor, row[7] * factor, *row[8:]]

    (event,) = events_of(rows(), series)
    assert (event.cause, event.what, event.step) == ("operation", "loss mul", 120)


def test_a_climb_names_the_setting_that_was_raised_before() -> None:
    noise = random.Random(12)

    def rows() -> Iterator[Numbers]:
        for step in range(300):
            row = usual(noise)
            row[10] *= 1.1 if step >= 195 else 1
            row[3] *= 4 * 2 ** (max(0, step - 200) / 25)
            yield row

    first = events_of(rows())[0]
    assert first.cause == "growth"
    assert first.evidence[1] == (
        "learning rate of Adam's step goes from 0.001 to 0.0011 in step 195"
    )


def test_the_evidence_has_numbers() -> None:
    (event,) = judged({120: {15: 8.1, 17: 7.1} | {3: 5.0, 4: 5.0} | LOSS})
    assert event.what == "body.weight"
    assert event.evidence[0] == (
        "body.weight is 8.1 times as large in step 120 as in the step before; "
        "no step of the optimizer wrote it"
    )
    assert event.evidence[1].startswith("the loss goes from 2.")
    assert event.evidence[1].endswith("in step 120")


def test_a_jump_that_nothing_explains_is_of_unknown_cause() -> None:
    noise = random.Random(0)
    rows = ([noise.gauss(2, 0.05) * (1 if step < 90 else 3)] for step in range(120))
    (event,) = events_of(rows, [("loss", "loss", "")])
    assert (event.cause, event.what, event.step) == ("unknown", "loss", 90)


def test_a_calm_run_has_no_events() -> None:
    assert not judged({}, 3000)


def test_no_event_is_told_twice_while_it_lasts() -> None:
    """Also where the loss stays where it jumped to, and jumps about there."""
    noise = random.Random(1)
    wild = {step: {7: noise.uniform(0.7, 2), 6: 1.0} for step in range(121, 160)}
    assert len(judged({120: {0: 200.0} | FORWARD} | wild, 400)) == 1


def test_another_cause_is_told_when_the_run_has_settled() -> None:
    first = {120: {0: 200.0} | FORWARD, 121: {0: 1 / 200} | {k: 1 / v for k, v in FORWARD.items()}}
    second = {260: {10: 30.0, 12: 30.0, 13: 30.0}, 261: FORWARD}
    assert [event.cause for event in judged(first | second, 400)] == ["data", "step"]


def test_the_first_steps_open_no_event() -> None:
    assert not judged({40: {0: 200.0} | FORWARD}, 100)


@pytest.mark.parametrize(
    "rate",
    [
        pytest.param(lambda step: min(1.0, (step + 1) / 200), id="warm-up"),
        pytest.param(lambda step: 0.5 * (1 + math.cos(math.pi * step / 600)), id="cosine"),
        pytest.param(lambda step: 0.1 ** (step // 150), id="steps"),
        pytest.param(lambda step: 0.1 + 0.9 * abs((step % 200) / 100 - 1), id="triangles"),
        pytest.param(lambda step: 0.5 * (1.02 + math.cos(math.pi * (step % 150) / 150)), id="warm"),
        pytest.param(lambda step: 1.05**-step, id="exponential"),
    ],
)
def test_a_schedule_is_no_event(rate: Callable[[int], float]) -> None:
    """Neither is that steps follow the rate, and gradients a little."""
    noise = random.Random(2)

    def rows() -> Iterator[Numbers]:
        for step in range(600):
            row = usual(noise)
            for place in (10, 12, 13):
                row[place] *= rate(step)
            for place in (6, 7, 8, 9):
                row[place] *= rate(step) ** 0.2 if rate(step) else 1.0
            yield row

    assert not events_of(rows())


def test_a_last_short_batch_is_no_event() -> None:
    """Its loss and its gradients vary more."""
    noise = random.Random(3)

    def rows() -> Iterator[Numbers]:
        for step in range(1000):
            row = usual(noise)
            if step % 25 == 24:
                for place in (6, 7, 8, 9):
                    row[place] *= math.exp(noise.gauss(0, 0.2))
            yield row

    assert not events_of(rows())


def of_sizes(rows: Callable[[int], int], size: Callable[[int], int]) -> list[Event]:
    """The events of a run whose inputs have some rows, and whose loss jumps in step 120."""
    noise = random.Random(12)
    series: list[Described] = [
        ("input", "input 0", "number of rows"),
        ("input", "input 0", "size of a row"),
        *SERIES,
    ]

    def made() -> Iterator[Numbers]:
        for step in range(200):
            row = usual(noise)
            if step >= 120:
                for place, factor in LOSS.items():
                    row[place] *= factor
            yield [float(rows(step)), float(size(step)), *row]

    return events_of(made(), series)


@pytest.mark.parametrize("which", ["number of rows", "size of a row"])
def test_a_larger_batch_is_named(which: str) -> None:
    larger = lambda step: 96 if step >= 120 else 24  # noqa: E731
    constant = lambda step: 24  # noqa: E731
    is_rows = which == "number of rows"
    (event,) = of_sizes(larger if is_rows else constant, constant if is_rows else larger)
    assert (event.cause, event.what, event.step) == ("data", "input 0", 120)
    assert event.evidence[0] == f"the {which} of input 0 goes from 24 to 96 in step 120"
    assert "look at what the code computes from its size" in event.evidence[1]


def test_a_smaller_batch_explains_no_jump() -> None:
    (event,) = of_sizes(lambda step: 5 if step == 120 else 64, lambda step: 24)
    assert (event.cause, event.what) == ("data", "targets or input 0")
    assert "number of rows" not in str(event.evidence)


def test_batches_that_vary_in_size_explain_no_jump() -> None:
    drawn = random.Random(13)
    (event,) = of_sizes(lambda step: drawn.randint(10, 100), lambda step: drawn.randint(10, 100))
    assert event.what == "targets or input 0"


def test_zeros_and_what_is_not_measured() -> None:
    """A gradient that is zero in some steps, and a series that is measured in every tenth."""
    noise = random.Random(4)

    def rows() -> Iterator[Numbers]:
        for step in range(600):
            row = usual(noise)
            row[8] *= noise.random() < 0.3
            row[3] = row[3] if step % 10 == 0 else NAN
            row[15] = row[15] if step % 10 == 0 else NAN
            if step >= 400:
                for place, factor in ({0: 200.0} | FORWARD).items():
                    row[place] *= factor
            yield row

    (event,) = events_of(rows())
    assert (event.step, event.cause, event.what) == (400, "data", "input 0")


def test_a_loss_that_crosses_zero_is_calm() -> None:
    noise = random.Random(5)
    rows = ([noise.gauss(0.02, 0.3)] for _ in range(5000))
    assert not events_of(rows, [("loss", "loss", "")])


def test_two_losses_that_take_turns_have_a_band_each() -> None:
    noise = random.Random(6)
    series: list[Described] = [("loss", "loss of D", ""), ("loss", "loss of G", "")]

    def rows() -> Iterator[Numbers]:
        for step in range(600):
            number = noise.gauss(2, 0.05) * (4 if step >= 500 and step % 2 else 1)
            yield [NAN, number * 100] if step % 2 else [number, NAN]

    (event,) = events_of(rows(), series)
    assert event.step == 501


def test_a_stage_that_comes_back_knows_what_was_usual() -> None:
    """A search for a rate has its own loss, and leaves the rate as it was last."""
    noise = random.Random(14)
    series = [*SERIES, ("loss", "loss of the search", "")]

    def rows() -> Iterator[Numbers]:
        for step in range(260):
            row, searches = usual(noise), 200 <= step < 224
            if searches:
                row[10], row[12], row[13] = 1e-4 * 1.3 ** (step - 200), NAN, NAN
            if step >= 224:
                row[10], row[12], row[13] = 0.04, 0.08, 0.08
            if step >= 225:
                for place, factor in FORWARD.items():
                    row[place] *= factor
            loss = row[7]
            row[7] = NAN if searches else loss
            yield [*row, loss if searches else NAN] if step >= 200 else row

    (event,) = events_of(rows(), series)
    assert (event.cause, event.what) == ("step", "learning rate of Adam's step")
    assert event.step == 224


def test_losses_that_take_turns_for_long_have_a_stage_each() -> None:
    noise = random.Random(15)
    series = [*SERIES, ("loss", "loss of the other", "")]

    def rows() -> Iterator[Numbers]:
        for step in range(800):
            row, is_other = usual(noise), step // 100 % 2
            if is_other:
                for place in (2, 3, 4):
                    row[place] *= 8
            loss = row[7]
            row[7] = NAN if is_other else loss
            yield [*row, 5 * loss if is_other else NAN] if step >= 100 else row

    assert not events_of(rows(), series)


def test_series_that_appear_later() -> None:
    """They open no event, and those after them are found as ever."""
    noise = random.Random(7)

    def rows() -> Iterator[Numbers]:
        for step in range(400):
            row = usual(noise)
            if step >= 300:
                row[17] = 0.9
                for place, factor in LOSS.items():
                    row[place] *= factor
            yield row if step >= 100 else row[:9]

    (event,) = events_of(rows())
    assert (event.step, event.cause, event.what) == (300, "weights", "body.weight")


def test_an_operation_that_runs_no_more_is_a_cause() -> None:
    noise = random.Random(8)

    def rows() -> Iterator[Numbers]:
        for step in range(300):
            row = usual(noise)
            if step >= 200:
                row[4] = NAN
                for place, factor in LOSS.items():
                    row[place] *= factor
            yield row

    (event,) = events_of(rows())
    assert (event.step, event.cause, event.what) == (200, "operation", "body relu")
    assert "runs no more in step 200" in event.evidence[0]


def test_an_infinite_loss_is_an_event() -> None:
    assert judged({120: {9: 50.0, 7: math.inf}})[0].step == 120


def test_a_burst_in_one_series_is_no_event() -> None:
    """Only losses and gradients open one."""
    assert not judged({120: {4: 50.0}, 123: {4: 1 / 50}, 150: {2: 9.0}, 160: {11: 40.0}})


def growing(rate: float, place: int = 3, since: int = 200, steps: int = 420) -> list[Event]:
    noise = random.Random(9)

    def rows() -> Iterator[Numbers]:
        for step in range(steps):
            row = usual(noise)
            row[place] *= 4 * 2 ** (rate * max(0, step - since))
            yield row

    return events_of(rows())


def test_a_climb_is_told_once_per_doubling() -> None:
    first, *others = growing(1 / 25)
    assert (first.cause, first.what) == ("growth", "body linear")
    assert abs(first.step - 200) <= 8
    assert 5 <= len(others) <= 8
    assert all(
        (one.cause, one.what, one.step) == ("growth", first.what, first.step) for one in others
    )
    assert "twice as large every 2" in first.evidence[0]


def test_a_climb_names_the_end_of_the_dtype() -> None:
    told = growing(1 / 100, steps=1400)[-1].evidence[0]
    assert "body linear: " in told
    assert "float16 ends in about" in told


def test_a_climb_of_what_is_small_is_none() -> None:
    """So is one of a single weight: a bias begins at zero."""
    assert not growing(1 / 100, steps=500)
    assert not growing(1 / 40, place=15, steps=300)


@pytest.mark.parametrize("rises", [True, False])
def test_a_loss_that_rises_while_it_still_falls_quickly(rises: bool) -> None:
    """Its band is wide then; nobody sees a jump, and all eight last steps are far above."""
    noise, place = random.Random(3), PLACE["step", "body.weight", ""]

    def rows() -> Iterator[Numbers]:
        for step in range(260):
            row = usual(noise)
            level = 2 * 2 ** (-min(step, 200) / 60) * math.exp(noise.gauss(0, 0.1))
            if rises and step >= 200:
                row[place] *= 25
                level *= 2 ** (2.8 * min(step - 200, 30) / 30)
            row[6] = row[7] = level
            yield row

    events = events_of(rows())
    if rises:
        (event,) = events
        assert (event.step, event.cause, event.lead > 0) == (200, "step", True)
        assert event.what == "the optimizer's step on body.weight"
    else:
        assert not events


@pytest.mark.parametrize("steps", [20_000, pytest.param(100_000, marks=pytest.mark.campaign)])
def test_random_walks_have_no_events(steps: int) -> None:
    """Whatever the spread of their steps, and the noise on them."""
    series: list[Described] = [("loss", "loss", ""), ("gradient", "a", ""), ("gradient", "b", "")]
    series += [("operation", "f", ""), ("weight", "a", "")]
    noise = random.Random(10)
    places = [0.0] * len(series)

    def rows() -> Iterator[Numbers]:
        for _ in range(steps):
            for i in range(len(series)):
                places[i] = 0.999 * places[i] + noise.gauss(0, 0.02)
            yield [math.exp(x + noise.gauss(0, 0.1)) for x in places]

    assert not events_of(rows(), series)


def written_at(steps: Sequence[int], jump: int = 160) -> Event:
    """The event of a run whose loss jumps, in which something else than the optimizer writes."""
    noise = random.Random(0)

    def rows() -> Iterator[Numbers]:
        for step in range(jump + 4):
            row = usual(noise)
            if step in steps:
                row[17] = 0.9
            for place, factor in FORWARD.items() if step >= jump else ():
                row[place] *= factor
            yield row

    (event,) = events_of(rows())
    return event


def test_a_weight_that_is_rarely_written_is_to_blame_each_time() -> None:
    event = written_at([100, 160])
    assert (event.cause, event.step, event.what) == ("weights", 160, "body.weight")
    assert "it was written before step 100, too" in event.evidence
    assert not any("too" in line for line in written_at([160]).evidence)


def test_a_weight_that_is_often_written_is_not_to_blame() -> None:
    """As by an optimizer around another one, each fifth step."""
    assert written_at(range(0, 165, 5)).cause == "data"


def test_a_group_that_an_optimizer_did_not_have_is_a_cause() -> None:
    series = [*SERIES, ("setting", "weight_decay of Adam's step (group 1)", "")]
    series.append(("setting", "learning rate of Adam's step (group 1)", ""))
    noise = random.Random(0)

    def rows() -> Iterator[Numbers]:
        for step in range(164):
            row = usual(noise)
            if step >= 159:
                row += [0.01, 0.3]
            for place, factor in FORWARD.items() if step >= 160 else ():
                row[place] *= factor
            yield row

    (event,) = events_of(rows(), series)
    name = "learning rate of Adam's step (group 1)"
    assert (event.cause, event.step, event.lead, event.what) == ("step", 159, 1, name)
    assert event.evidence[0] == f"{name} is 0.3, and is there for the first time in step 159"


def falling(jump: float, since: int = 140, steps: int = 146) -> list[Event]:
    """The events of a loss that halves every 30 steps, and is so many times as large at the end.

    What the model is given changes then.
    """
    noise = random.Random(0)

    def rows() -> Iterator[Numbers]:
        for step in range(steps):
            row = usual(noise)
            for place in (6, 7):
                row[place] *= 2 ** (-step / 30)
            for place in (0, 6, 7) if step >= since else ():
                row[place] *= 20.0 if place == 0 else jump
            yield row

    return events_of(rows())


def test_a_falling_loss_that_steps_up_is_an_event() -> None:
    """Though it has been as high a hundred steps before."""
    (event,) = falling(4.0)
    assert (event.cause, event.step, event.what) == ("data", 140, "input 0")
    assert falling(1.3) == []


def test_an_input_that_other_weights_compute_is_no_data() -> None:
    """Second runs have shown that the batch is not to blame, and the input has changed."""
    noise, judge = random.Random(0), Judge()
    for place, (kind, what, detail) in enumerate(SERIES):
        judge.register(Series(f"{kind} {what} {detail}", kind, what, order=place, detail=detail))
    events = []
    for step in range(140):
        row = usual(noise)
        for place, factor in ({0: 200.0} | FORWARD).items() if step >= 138 else ():
            row[place] *= factor
        events += judge.seen(Row(step, row, row), lambda begin: False)
    (event,) = events
    assert (event.cause, event.what) == ("operation", "what computes input 0")
    assert event.headline == "step 138: what computes input 0 changed, and what it reads had not"


def of_gradients(grown: Sequence[int], factor: float) -> list[Event]:
    """The events of eight noisy gradients that move together, of which some grow in step 140.

    The loss jumps three steps later.
    """
    series: list[Described] = [("loss", "loss", "")]
    series += [("gradient", f"layers.{at}.weight", "") for at in range(8)]
    noise = random.Random(0)

    def rows() -> Iterator[Numbers]:
        for step in range(150):
            loss = math.exp(noise.gauss(0, 0.05)) * (9.0 if step >= 143 else 1.0)
            of_batch = math.exp(noise.gauss(0, 0.5))
            row = [of_batch * math.exp(noise.gauss(0, 0.05)) for _ in range(8)]
            for place in grown if step >= 140 else ():
                row[place] *= factor
            yield [loss, *row]

    return events_of(rows(), series)


def test_gradients_that_grow_beside_the_others_are_a_cause() -> None:
    """Each by itself is in its band: from batch to batch all of them move as much."""
    (event,) = of_gradients([2, 3, 5], 2.5)
    assert (event.cause, event.step, event.lead) == ("gradient", 140, 3)
    assert event.what == "layers.2.weight"
    assert event.evidence[1] == "so do those of layers.3.weight and layers.5.weight"
    (event,) = of_gradients([6], 2.5)
    assert (event.step, event.what) == (140, "layers.6.weight")
    assert event.evidence[1] == "beside the other gradients it is 2.6 times as large as is usual"


@pytest.mark.parametrize(("grown", "factor"), [(range(8), 1.5), ([3], 1.3), ([], 1.0)])
def test_gradients_that_move_as_they_do_are_no_cause(grown: Sequence[int], factor: float) -> None:
    (event,) = of_gradients(grown, factor)
    assert (event.cause, event.step) == ("unknown", 143)


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        ([4.0] * 40 + [8.0], "head relu goes from 4 to 8 in step 40"),
        (
            [4.0] * 40 + [0.0, 0.0],
            "head relu is 0 in step 41: the median of the 64 steps before is 4",
        ),
        (
            [4.0] * 40 + [30.0, 32.0],
            "head relu is 32 in step 41: the median of the 64 steps before is 4",
        ),
    ],
)
def test_a_number_is_told_beside_that_before_or_what_is_usual(
    numbers: list[float], sentence: str
) -> None:
    """The step before may be out of the band as well: it may belong to the event before."""
    table = torch.tensor(numbers, dtype=torch.float64)[:, None]
    one = Exit(len(numbers) - 1, 0, -20.0, is_rare_write=False)
    relu = Series("operation head relu", "operation", "head relu")
    assert said([relu], list(range(len(numbers))), table, one) == sentence


def of_state(state: float, gradient: float) -> list[Event]:
    """The events of a run whose state and gradients have grown in a step; the loss jumps later."""
    noise = random.Random(0)

    def rows() -> Iterator[Numbers]:
        for step in range(150):
            row = usual(noise)
            row[8] *= math.exp(noise.gauss(0, 0.7))  # far from its band is far indeed
            if step >= 140:
                row[8], row[11] = row[8] * gradient, row[11] * state
            for place in (6, 7) if step >= 142 else ():
                row[place] *= 4.0
            yield row

    return events_of(rows())


def test_a_state_is_a_cause_unless_it_follows_its_gradient() -> None:
    (event,) = of_state(4.0, 1.0)
    assert (event.step, event.what) == (140, "exp_avg_sq of Adam's step")
    (event,) = of_state(4.0, 8.0)
    assert (event.step, event.cause) == (142, "data")


def test_what_has_grown_for_long_is_told() -> None:
    """It is out of no band: a weight of a loss that a script computes, or a temperature."""
    noise = random.Random(0)
    series = [*SERIES[:6], ("operation", "loss exp", ""), *SERIES[6:]]

    def rows() -> Iterator[Numbers]:
        for step in range(206):
            row = usual(noise)
            row.insert(6, 0.1 * 2 ** (step / 25))
            for place in (0, 7, 8) if step >= 200 else ():
                row[place] *= 200.0
            yield row

    (event,) = events_of(rows(), series)
    assert event.what == "input 0"
    assert event.evidence[1].startswith("loss exp has grown steadily, from 0.")
    assert event.evidence[1].endswith(" in step 199")
    assert not any("has grown" in line for line in judged({120: {0: 200.0} | FORWARD})[0].evidence)


def test_a_loss_that_does_not_come_back_is_an_event_of_its_batches() -> None:
    """It has been as far from its band before: a target network is updated now and then."""

    def events(stays: bool, is_data: bool | None) -> list[Event]:
        noise, judge = random.Random(0), Judge()
        judge.register(Series("loss", "loss", "loss"))
        judge.register(Series("target mean", "target", "targets", order=-1, detail="mean"))
        found = list[Event]()
        for step in range(340):
            far = step % 100 in (50, 51, 52) or (stays and step >= 320)
            loss = 0.02 * math.exp(noise.gauss(0, 0.05)) * (10.0 if far else 1.0)
            row = Row(step, [loss, 0.5], [loss, 0.5])
            found += judge.seen(row, lambda begin: is_data if begin <= 321 else None)
        return found

    (event,) = events(stays=True, is_data=True)
    assert (event.step, event.cause) == (320, "data")
    (event,) = events(stays=True, is_data=None)
    assert (event.step, event.cause) == (320, "unknown")
    assert events(stays=False, is_data=True) == []


def lasting(factor: float, steps: int) -> list[Event]:
    """The events of a noisy loss that is so many times as large for some steps, as an input is."""
    noise = random.Random(0)

    def rows() -> Iterator[Numbers]:
        for step in range(180):
            row = usual(noise)
            for place in (6, 7):
                row[place] *= math.exp(noise.gauss(0, 0.12))
            for place in (0, 6, 7) if 150 <= step < 150 + steps else ():
                row[place] *= 9.0 if place == 0 else factor
            yield row

    return events_of(rows())


def test_a_moderate_jump_that_lasts_is_an_event() -> None:
    (event,) = lasting(1.9, steps=30)
    assert (event.step, event.what) == (150, "input 0")
    assert lasting(1.9, steps=2) == lasting(1.25, steps=30) == []


@pytest.mark.parametrize(("rise", "jump", "is_event"), [(0.5, 0.2, False), (0.0, 0.7, True)])
def test_most_of_a_jump_that_lasts_is_no_slow_rise(
    rise: float, jump: float, is_event: bool
) -> None:
    """Both end as high, in octaves: what had risen before is none of the jump."""
    noise = random.Random(0)

    def rows() -> Iterator[Numbers]:
        for step in range(220):
            row = usual(noise)
            risen = rise * min(1.0, max(0.0, (step - 140) / 40))
            for place in (6, 7):
                row[place] = 2.3 * 2 ** (risen + (jump if step >= 185 else 0.0))
                row[place] *= math.exp(noise.gauss(0, 0.01))
            yield row

    assert bool(events_of(rows())) == is_event


def test_a_slow_rise_of_a_part_is_none() -> None:
    """A second loss is blended in: the first factor that is not 0 makes no jump."""
    noise = random.Random(0)

    def rows() -> Iterator[Numbers]:
        for step in range(260):
            row = usual(noise)
            for place in (6, 7):
                row[place] *= 1 + max(0.0, step - 140) / 60
            yield row

    assert events_of(rows()) == []


def test_what_runs_before_an_operation_may_have_changed_nearly_as_much() -> None:
    """All of a network grows a little, the gradients jump, and one operation is out of its band."""

    def events(earlier: float) -> list[Event]:
        noise = random.Random(0)

        def rows() -> Iterator[Numbers]:
            for step in range(150):
                row = usual(noise)
                if step >= 140:
                    factors = {2: earlier, 3: 1.6, 8: 40.0, 9: 40.0}
                    for place, factor in factors.items():
                        row[place] *= factor
                yield row

        return events_of(rows())

    (event,) = events(1.0)
    assert (event.cause, event.what) == ("operation", "body linear")
    (event,) = events(1.4)
    assert (event.cause, event.what) == ("unknown", "the norm of all gradients")
    assert event.evidence[0].startswith("furthest from its band in step 140 is body linear: by ")


def sinking(steps: int) -> list[Event]:
    """The events of a run whose gradients jump, and an operation sinks in so many steps before."""
    noise = random.Random(0)

    def rows() -> Iterator[Numbers]:
        for step in range(150):
            row = usual(noise)
            sunk = min(1.0, max(0.0, (step - 140 + steps) / steps))
            row[4] *= 0.2**sunk
            for place in (8, 9) if step >= 140 else ():
                row[place] *= 40.0
            yield row

    return events_of(rows())


def test_what_sinks_step_by_step_is_no_cause() -> None:
    (event,) = sinking(1)
    assert (event.step, event.what) == (140, "body relu")
    (event,) = sinking(12)
    assert (event.step, event.what) == (140, "all weights")


def spiking(factor: float) -> list[Event]:
    """The events of a run in which one gradient is so many times as large, in one step."""
    noise = random.Random(0)

    def rows() -> Iterator[Numbers]:
        for step in range(150):
            row = usual(noise)
            row[8] *= 10  # another one is most of them all
            if step == 140:
                row[9] *= factor
            yield row

    return events_of(rows())


@pytest.mark.parametrize("alone", [False, True])
def test_a_gradient_that_was_zero(alone: bool) -> None:
    """A part of the loss begins to count: its gradients were 0 until then."""
    noise = random.Random(0)

    def rows() -> Iterator[Numbers]:
        for step in range(150):
            row = usual(noise)
            row[9] = 0.1 * row[9] if step >= 140 else 0.0
            if alone:
                row[8] = 0.0
            yield row

    assert events_of(rows()) == []


def test_one_gradient_that_spikes() -> None:
    (event,) = spiking(6.0)
    assert (event.step, event.cause, event.what) == (140, "gradient", "body.weight")
    assert spiking(3.0) == []


@pytest.mark.parametrize(("times", "is_event"), [(2.5, False), (30.0, True)])
def test_a_noisy_loss_that_is_once_far_above_all_before_is_an_event(
    times: float, is_event: bool
) -> None:
    """Its deviation is half an octave: fourteen of them are a factor of more than a hundred."""
    noise = random.Random(0)

    def rows() -> Iterator[Numbers]:
        for step in range(200):
            row = usual(noise)
            for place in (6, 7):
                row[place] *= 2 ** noise.gauss(0, 0.5) * (times if step == 160 else 1.0)
            yield row

    assert [event.step for event in events_of(rows())] == [160] * is_event


def test_a_series_that_is_a_little_out_of_its_band_just_before_begins_nothing() -> None:
    noise = random.Random(0)

    def rows() -> Iterator[Numbers]:
        for step in range(170):
            row = usual(noise)
            if step == 159:
                row[9] *= 1.55
            if step >= 160:
                row[0], row[6], row[7] = row[0] * 9, row[6] * 9, row[7] * 9
                row[9] *= 2.5
            yield row

    (event,) = events_of(rows())
    assert (event.step, event.what) == (160, "input 0")


@pytest.mark.parametrize(
    ("rate", "what"), [(1.05, "learning rate of Adam's step"), (1.01, "body.weight")]
)
def test_a_learning_rate_that_grows_quickly_is_to_blame_for_gradients(
    rate: float, what: str
) -> None:
    """As in a search for a rate, that ends where the loss explodes."""
    noise = random.Random(0)

    def rows() -> Iterator[Numbers]:
        for step in range(170):
            row = usual(noise)
            row[10] *= rate**step
            if step >= 150:
                row[9] *= 40
            yield row

    (event,) = events_of(rows())
    assert event.what == what
    assert event.cause == ("step" if rate == 1.05 else "gradient")


def test_a_loss_that_moves_behind_its_event_is_told_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs("pyarrow")
    noise = random.Random(0)
    series = [
        Series(f"{kind} {what} {detail}", kind, what, order=place, detail=detail)
        for place, (kind, what, detail) in enumerate(SERIES)
    ]
    run = Run(tmp_path, (0, 1), {}, series, lambda event: event)
    for step in range(140):
        row = usual(noise)
        if step == 120:
            row[9] *= 50
        if step >= 123:
            row[6], row[7] = row[6] * 9, row[7] * 9
        run.add(Row(step, row, row), None)
    run.close()
    (event,) = load_history(tmp_path).events
    assert (event.step, event.cause, event.what, event.lead) == (120, "gradient", "body.weight", 3)
    assert event.evidence[-1].startswith("the loss goes from 2.")
    told = [line for line in capsys.readouterr().err.splitlines() if "step 120: " in line]
    assert [line.endswith("the loss moved 3 steps later") for line in told] == [False, True]


def test_a_climb_that_is_told_in_between_has_no_loss_that_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("pyarrow")
    run = Run(tmp_path, (0, 1), {}, [], lambda event: event)
    seen = {1: [Event(1, "gradient", "a.weight")], 2: [Event(2, "growth", "b linear")]}

    def judged_so(row: Row, is_data: object) -> list[Event]:
        run.judge.moved = (1, "the loss goes from 1 to 9 in step 3") if row.step == 3 else None
        return seen.get(row.step, [])

    monkeypatch.setattr(run.judge, "seen", judged_so)
    for step in range(4):
        run.add(Row(step, [], []), None)
    run.close()
    events = load_history(tmp_path).events
    assert [(event.what, event.lead) for event in events] == [("a.weight", 2), ("b linear", 0)]
