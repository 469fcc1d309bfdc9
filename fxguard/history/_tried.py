"""What second runs say of an event: sentences, and its cause where they show another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxguard.history._said import NUMBER
from fxguard.history._series import Series
from fxguard.history._trials import Trial
from fxguard.report.event import Event

__all__ = ["with_trial"]

NOT_TRIED = "not tried: {}"
NOT_WRITTEN = ("gradient", "operation", "unknown")  # causes with which no weight is written
NO_JUMP = "not tried: the loss had not jumped by then"


def with_trial(event: Event, trial: Trial | None, series: Sequence[Series]) -> Event:
    """The event with what was tried.

    Args:
        event: what happened.
        trial: second runs of a batch; None if there were none.
        series: all series.
    """
    if event.cause == "growth":
        return event
    if trial is None or trial.step < event.step:
        return replace(event, tried=(NO_JUMP,))
    if trial.why_not:
        return replace(event, tried=(NOT_TRIED.format(trial.why_not),))
    tried = tuple(_sentences(trial, event))
    if trial.is_machines:
        return replace(event, cause="machine", tried=tried)
    jumped = trial.changed_at(min(trial.step, event.step + event.lead))
    if event.cause == "data" and jumped < event.step and trial.shows_data(event.step):
        return replace(event, step=jumped, lead=0, tried=tried)
    is_known = any(sentence.startswith(NUMBER) for sentence in event.evidence[:1])
    if event.cause in NOT_WRITTEN and not is_known and trial.shows_data(event.step):
        what = " or ".join(_given(series)) or event.what
        shows = event.source if event.cause == "operation" else ""  # first there
        return replace(
            event, cause="data", step=jumped, what=what, source=shows, lead=0, tried=tried
        )
    return replace(event, tried=tried)


def _sentences(trial: Trial, event: Event) -> list[str]:
    at = "" if trial.step == event.step + event.lead else f"in step {trial.step}, "
    if trial.is_machines:
        return [f"{at}the same run once more gives {trial.again:.3g}, not {trial.loss:.3g}"]
    found = list[str]()
    before = trial.before_step(event.step)
    if before is not None:
        as_well = "" if trial.is_usual(before.now) else ", too"
        which = _which(trial.step - before.step)
        text = f"with these weights {which} gives {before.now:.3g}{as_well}"
        if trial.sample is not None:
            index, loss = trial.sample
            text += (
                f", with another sample in the place of sample {index} this one gives {loss:.3g}"
            )
        found.append(f"the batch: {at}{text}")
    if trial.weights:
        *later, (step, loss) = trial.weights
        as_well = "" if trial.is_usual(loss) else ", too"
        text = f"with those of step {step} this batch gives {loss:.3g}{as_well}"
        if later and not as_well:
            text += f", with those of step {later[-1][0]} {later[-1][1]:.3g}"
        found.append(f"the weights: {at}{text}")
    found.append(f"{at}the same run once more gives {trial.again:.3g} again")
    return found


def _which(steps: int) -> str:
    if steps == 0:
        return "the batch before, of the same step,"
    return "the batch before" if steps == 1 else f"the batch of {steps} steps before"


def _given(series: Sequence[Series]) -> list[str]:
    """What models and losses are given, by the names that events have for it."""
    targets = [one for one in series if one.kind == "target"]
    targets.sort(key=lambda one: bool(one.source))  # what torch's losses compare with comes first
    inputs = (one for one in series if one.kind == "input")
    return list(dict.fromkeys(one.what for one in (*targets[:1], *inputs)))[:2]
