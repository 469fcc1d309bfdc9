"""What a second run adds to a verdict: causes, and whether absorbed values do harm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fxguard.advice.causes import cause_of, cause_of_given
from fxguard.advice.deduced import deduced
from fxguard.advice.surroundings import Surroundings
from fxguard.batch.batch import Batch
from fxguard.batch.dataflow import DataFlow
from fxguard.batch.events import GraphRun
from fxguard.batch.keys import Key
from fxguard.forgiving import or_else
from fxguard.graph.evidence import Evidence
from fxguard.graph.one_operation import OneOperation
from fxguard.graph.tables import ENTRIES
from fxguard.graph.wide_form import NotJudged
from fxguard.measure.details import Detail
from fxguard.plan.blame import Blame
from fxguard.records import Range, Severity
from fxguard.rerun.consequences import Replaced, if_other, if_repaired
from fxguard.rerun.differences import Difference
from fxguard.rerun.evidence import Look, evidence_in
from fxguard.rerun.other_samples import samples_of
from fxguard.rerun.other_values import RaisedOnOther
from fxguard.rerun.other_ways import Outcome
from fxguard.verdict.origins import Verdict

__all__ = ["FAILURES", "Opinion", "SecondOpinion"]

MOST_JUDGED = 16  # absorbed values of one batch, each of which takes a run

FAILURES = ("overflow", "underflow", "rounding")  # of precision; all others are mathematical


@dataclass(frozen=True, slots=True)
class Opinion:
    """The opinion on an absorbed value."""

    harm: str = ""  # the harm that it did; "" if none, or unknown
    not_judged: str = ""  # why the harm is unknown
    lasts: bool = False  # whether this holds for every batch with the same bad values


class SecondOpinion:
    """The second opinion on one batch, while it is open.

    Args:
        batch: the batch.
        flow: the data flow of the batch.
        verdict: the verdict by data flow alone.

    Attributes:
        verdict: the same, with harmful absorbed values among the origins.
        absorbed: the opinion on each absorbed origin.
        details: the details of values that second runs have shown.
        eager: likewise the outcome of values in eager mode.
    """

    def __init__(self, batch: Batch, flow: DataFlow, verdict: Verdict) -> None:
        self.batch = batch
        self.flow = flow
        self.verdict = verdict
        self.stopped: dict[int, str] = {}  # event to why a second run of its graph did not go on
        self.details: dict[int, Detail] = {}
        self.eager: dict[int, Outcome] = {}
        absorbed_nan = [b for b in verdict.absorbed if b.severity is Severity.NAN]
        others = [blame for blame in verdict.both if blame not in absorbed_nan]
        self.looks = self._looks(others)
        self.absorbed = self._judged(verdict.absorbed)
        # If every batch is judged anew, harmless ones do not also run in float64.
        told = [b for b in absorbed_nan if self.absorbed[b].harm or self.absorbed[b].lasts]
        self.looks |= self._looks(told)
        harmful = {blame for blame, opinion in self.absorbed.items() if opinion.harm}
        if harmful:
            counted = {*verdict.origins, *harmful}
            self.verdict = replace(
                verdict,
                origins=tuple(blame for blame in verdict.both if blame in counted),
                absorbed=tuple(blame for blame in verdict.absorbed if blame not in harmful),
            )

    def evidence(self, blame: Blame) -> Evidence | None:
        """The evidence on the operation that made a bad value."""
        look = self.looks.get(blame)
        return None if look is None else look.evidence

    def deduced(self, blame: Blame) -> Evidence | None:
        """The same, or what magnitudes alone leave no doubt about."""
        evidence = self.evidence(blame)
        if evidence is not None or blame.step is None:
            return evidence
        step, dtype = self.flow.steps[blame.step], self.flow.values[blame.value].dtype
        ranges = [self.flow.ranges[value] for value in step.inputs]
        read = [(each.abs_min, each.abs_max) for each in ranges if isinstance(each, Range)]
        if len(read) < len(ranges):
            return None
        return deduced(step.kind, dtype, is_nan=blame.severity is Severity.NAN, read=read)

    def operation(self, blame: Blame) -> OneOperation | None:
        """That operation with its operands, if they were seen."""
        look = self.looks.get(blame)
        return None if look is None else look.operation

    def cause(self, blame: Blame) -> str:
        """Why it made the bad value, as in :attr:`fxguard.findings.Origin.cause`."""
        if blame.step is None:
            return cause_of_given(self.flow.values[blame.value].role)
        evidence = self.deduced(blame)
        if evidence is None:
            kind, is_nan = self.flow.steps[blame.step].kind, blame.severity is Severity.NAN
            return "data" if kind in ENTRIES and is_nan else "unknown"
        around = Surroundings(self.flow.steps, self.flow.values, blame, self.verdict.intended)
        return or_else("unknown", cause_of, evidence, around)

    def no_cause(self, blame: Blame) -> str:
        """Why nobody has looked at the operation that made a bad value; "" if somebody has."""
        if blame.step is None or blame in self.looks:
            return ""
        key = self.flow.keys[blame.value]
        if key.is_between_graphs:
            return self.batch.no_evidence.get(key.value, "")
        return self.stopped.get(key.event, "")

    @property
    def lasts(self) -> bool:
        """Whether the absorbed values are harmless in every batch with the same bad values."""
        return all(opinion.lasts for opinion in self.absorbed.values())

    def _looks(self, blames: Sequence[Blame]) -> dict[Blame, Look]:
        keys = self.flow.keys
        by_event: dict[int, dict[int, Blame]] = {}
        found: dict[Blame, Look] = {}
        for blame in blames:
            if blame.step is None:
                continue
            key = keys[blame.value]
            if not key.is_between_graphs:
                by_event.setdefault(key.event, {})[key.value] = blame
            elif key.value in self.batch.evidence:
                found[blame] = Look(self.batch.evidence[key.value])
        for event, values in by_event.items():
            run = self.batch.run_of(Key(event, 0))
            if run is None:
                continue
            place = {value: blame.value for value, blame in values.items()}
            seen = evidence_in(run, values, self._in_eager_mode(event, run, values))
            self.stopped[event] = seen.stopped
            self.details |= {place[value]: detail for value, detail in seen.details.items()}
            self.eager |= {place[value]: outcome for value, outcome in seen.eager.items()}
            found |= {values[value]: look for value, look in seen.looks.items()}
        return found

    def _in_eager_mode(self, event: int, run: GraphRun, values: Mapping[int, Blame]) -> list[int]:
        """The value whose outcome in eager mode will be asked for: that of the first origin."""
        first = next(iter(self.verdict.both), None)
        is_asked = run.is_compiled or samples_of(self.batch, self.flow, event) is not None
        return [value for value, blame in values.items() if blame is first and is_asked]

    def _judged(self, absorbed: Sequence[Blame]) -> dict[Blame, Opinion]:
        opinions: dict[Blame, Opinion] = {}
        failures, nan = [], []
        for blame in absorbed:
            if blame.severity is Severity.NAN:
                nan.append(blame)
            elif blame.step is None:
                opinions[blame] = Opinion(lasts=True)
            elif (cause := self.cause(blame)) in FAILURES:
                failures.append(blame)
            elif cause == "unknown":
                opinions[blame] = not_judged(self._why_unknown(blame))
            else:
                opinions[blame] = Opinion(lasts=True)
        opinions |= _together_or_one_by_one(failures, self._of_failures)
        opinions |= _together_or_one_by_one(nan, self._of_nan)
        return opinions

    def _why_unknown(self, blame: Blame) -> str:
        evidence = self.evidence(blame)
        if evidence is not None and evidence.not_judged:
            return evidence.not_judged
        return self.no_cause(blame) or "a second run of its graph did not show it"

    def _of_nan(self, blames: Sequence[Blame]) -> Opinion:
        try:
            keys = [self.flow.keys[blame.value] for blame in blames]
            differences, lasts = if_other(self.batch, self.flow, keys)
        except NotJudged as reason:
            return not_judged(str(reason))
        return Opinion("what left the model depends on it" if differences else "", lasts=lasts)

    def _of_failures(self, blames: Sequence[Blame]) -> Opinion:
        starts = [
            Replaced(self.flow.keys[blame.value], self.looks[blame].wide)
            for blame in blames
            if blame in self.looks
        ]
        try:
            differences, lasts = if_repaired(self.batch, self.flow, starts)
        except (NotJudged, RaisedOnOther) as reason:
            return not_judged(str(reason))
        return Opinion(_harm_of(differences), lasts=lasts)


def not_judged(reason: str) -> Opinion:
    """An opinion that is given once, because asking again for the next batch would be useless."""
    return Opinion(not_judged=reason, lasts=True)


TOO_MANY = not_judged(f"more than {MOST_JUDGED} of its kind in one batch")


def _together_or_one_by_one(
    blames: Sequence[Blame], judge: Callable[[Sequence[Blame]], Opinion]
) -> dict[Blame, Opinion]:
    """Judge all at once; if that does harm or cannot be judged, one by one."""
    if not blames:
        return {}
    together = judge(blames)
    if len(blames) == 1 or not (together.harm or together.not_judged):
        return dict.fromkeys(blames, together)
    opinions = {blame: judge([blame]) for blame in blames[:MOST_JUDGED]}
    opinions |= dict.fromkeys(blames[MOST_JUDGED:], TOO_MANY)
    if together.harm and not any(opinion.harm for opinion in opinions.values()):
        opinions[blames[0]] = together
    return opinions


def _harm_of(differences: Sequence[Difference]) -> str:
    """What is wrong with the model's outputs, in words."""
    if not differences:
        return ""
    worst = max(differences, key=lambda found: found.error)
    if worst.given is None or worst.wanted is None:
        return "what left the model is wrong: another number was meant"
    place = "" if not worst.index else f" at {list(worst.index)}"
    digits = _digits_that_differ(worst.given, worst.wanted)
    wrong = f"what left the model is finite and wrong: {worst.given:.{digits}g}{place}"
    if math.isfinite(worst.wanted):
        return f"{wrong}, in float64 {worst.wanted:.{digits}g}"
    return f"{wrong}, where without that bound it is not finite"


def _digits_that_differ(one: float, other: float) -> int:
    """So many that two numbers are not printed alike."""
    return next((n for n in range(4, 17) if f"{one:.{n}g}" != f"{other:.{n}g}"), 17)
