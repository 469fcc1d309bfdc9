"""Why an optimizer's step made a weight bad: a table of rules, the first that applies counts.

Each rule reads the numbers at the first bad element. There is no cause by default: what no rule
explains is "unknown", with the numbers that are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fxguard.advice.averaged import repair_of_variance
from fxguard.advice.causes import cause_of
from fxguard.advice.fixes import MOST_FIXES, fixes_for
from fxguard.advice.iterated import fix_of_turns
from fxguard.advice.operands import operands_text
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.words import words_for
from fxguard.batch.late_writes import LateWrite
from fxguard.findings import Fix
from fxguard.formats import limit_of
from fxguard.graph.poles import plain
from fxguard.records import Source
from fxguard.source.lines import Place, source_at
from fxguard.steps.first_bad import FirstBad

__all__ = ["Excused", "StepCase", "StepFinding", "finding_of", "told_writes"]

# Sums and averages of squared gradients, by name in the optimizer's state: Adam with amsgrad, Adam
# and its family, RMSprop and Adadelta, Adagrad.
SQUARES = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum")

# What an optimizer divides by, with an eps.
DIVISORS = {**dict.fromkeys(SQUARES, "sqrt({}) + eps"), "exp_inf": "max({}, abs(gradient) + eps)"}

# Averages of gradients: finite ones do not become NaN.
AVERAGES = ("exp_avg", "grad_avg")

RESULTS = ("ax",)  # states that are read from the weight after the step: of ASGD

NAMES = {
    "lr": "learning rate",
    "weight_decay": "weight decay",
    "betas[0]": "first beta",
    "betas[1]": "second beta",
}

STEPS_DIRECTLY = (
    "scaler.step(optimizer) in place of optimizer.step(): it skips such a step, and the "
    "scaler.update() after it lowers the scale"
)
BETWEEN = "look at what changes gradients between backward() and step(), such as clipping"


@dataclass(frozen=True, slots=True)
class Excused:
    """A backward whose bad gradients only the loss scale made: its step should be skipped."""

    batch_number: int
    scale: float
    by: str  # what made them: "backward of float (train.py:9)"; "" if unknown
    has_scaler: bool  # whether a GradScaler scaled the loss


@dataclass(frozen=True, slots=True)
class StepCase:
    """Everything known of a step that made a weight bad, at the first bad element."""

    optimizer: str  # its class
    dtype: str  # of the weight
    index: tuple[int, ...]
    weight: float  # after the step: inf or NaN
    gradient: float  # when the step had ended
    states: Mapping[str, float]  # the optimizer's, after the step
    settings: Mapping[str, float]  # of the weight's group: "lr", "betas[0]"
    held_eps: float | None = None  # eps as the weight's dtype holds it
    is_own: bool = False  # whether its step is not one of torch's
    inside: FirstBad | None = None  # of an own step, which ran again
    why_not_inside: str = ""  # why it did not
    saw_gradients: bool = False  # whether each backward was checked
    backwards: int = 1  # since the last step
    excused: Excused | None = None
    scaled_by: float = 1.0  # a GradScaler's scale that the gradients still have
    # What wrote the gradient since its backward, in order, as far as it was seen.
    changed_by: tuple[LateWrite, ...] = ()
    # What set the learning rate, "LambdaLR set it, at its step 3"; "" if unknown.
    schedule: str = ""
    # The part of it that is not finite, "(1 - 91 / 90) ** 0.9 (train.py:12)"; "" if unknown.
    reason: str = ""
    # The batch after which an earlier step wrote bad gradients into this weight; None for none.
    spoilt_in: int | None = None
    # The batch whose backward, since the last step, brought a bad gradient to this weight.
    brought_in: int | None = None

    @property
    def place(self) -> str:
        """``at [0, 3]: ``."""
        return f"at {list(self.index)}: "

    @property
    def lr(self) -> float:
        """The learning rate; NaN if it has none."""
        return self.settings.get("lr", math.nan)

    @property
    def divisor(self) -> tuple[str, float] | None:
        """What the step divides by: how, and the state that it reads; None if not known."""
        found = ((how, self.states[key]) for key, how in DIVISORS.items() if key in self.states)
        return next(found, None)

    @property
    def numbers(self) -> str:
        """``learning rate 0.1, gradient 3``."""
        rate = "" if math.isnan(self.lr) else f"learning rate {self.lr:g}, "
        states = "".join(f", {key} {value:.4g}" for key, value in self.states.items())
        return f"{rate}gradient {self.gradient:.4g}{states}"


@dataclass(frozen=True, slots=True)
class StepFinding:
    """The answer of a rule."""

    text: str
    cause: str = "unknown"
    fixes: tuple[Fix, ...] = ()
    words: str = ""  # the cause as it is printed; "" if its name says enough
    place: tuple[str, int] | None = None  # file and line of the operation to blame


RATIO_OF_NORMS = Fix(
    "advice",
    "take 1 for this ratio where a norm is 0: torch.where((a > 0) & (b > 0), a / b, 1.0)",
    ("a / b -> where((a > 0) & (b > 0), a / b, 1.0)",),
    of="div",
)

Rule = Callable[[StepCase], StepFinding | None]


def finding_of(case: StepCase) -> StepFinding:
    """Why the step made the weight bad, and what to do."""
    return next(found for rule in RULES if (found := rule(case)) is not None)


def _advice(*texts: str) -> tuple[Fix, ...]:
    return tuple(Fix("advice", text) for text in texts)


def _setting(case: StepCase) -> StepFinding | None:
    """A learning rate, or another setting, that is not finite."""
    for key, value in case.settings.items():
        # An own setting may be infinite on purpose, such as a bound.
        if math.isnan(value) or (math.isinf(value) and (key == "lr" or not case.is_own)):
            name = NAMES.get(key, key)
            by = f"; {case.schedule}" if key == "lr" and case.schedule else ""
            fix = f"look at how the {name} is computed"
            if key == "lr" and case.reason:
                fix += f": {case.reason}"
            return StepFinding(f"the {name} was {value:g} when the step began{by}", "unknown",
                               _advice(fix))  # fmt: skip
    return None


def _excused(case: StepCase) -> StepFinding | None:
    """A gradient that the loss scale made bad, in a step that is made all the same."""
    excused = case.excused
    if math.isfinite(case.gradient) or excused is None:
        return None
    text = (
        f"the gradient was not finite when the backward of batch {excused.batch_number} ended, "
        f"because of the loss scale of {excused.scale:g}"
    )
    if excused.by:
        text += f": {excused.by}"
    if excused.has_scaler:
        fixes: tuple[Fix, ...] = (Fix("advice", STEPS_DIRECTLY, ("o.step() -> s.step(o)",)),)
        if math.isnan(case.gradient) and case.scaled_by > 1:
            fixes += _advice("call scaler.unscale_(optimizer) first, where gradients are clipped")
    else:
        fixes = _advice("skip the step while a gradient is not finite, and lower the loss scale")
    return StepFinding(text, "loss scale", fixes)


def _gradient(case: StepCase) -> StepFinding | None:
    """A gradient that something has spoilt since its backward."""
    if math.isfinite(case.gradient):
        return None
    if case.is_own and case.why_not_inside:
        text = f"{case.place}the gradient is {case.gradient:.4g} after the step"
        return StepFinding(f"{text}, which was not looked into: {case.why_not_inside}")
    text = f"{case.place}the gradient was {case.gradient:.4g} when the step began"
    if case.brought_in is not None:
        return StepFinding(f"{text}: the backward of batch {case.brought_in} had brought it")
    if not case.saw_gradients:
        return StepFinding(text)
    if case.backwards > 1:
        text += f"; each of {case.backwards} backwards brought finite gradients"
        both = "or look at whether their sum overflows"
        return StepFinding(text, "unknown", _advice(f"{BETWEEN}, {both}"))
    text += "; it was finite when its backward ended"
    if not case.changed_by:
        return StepFinding(text, fixes=_advice(BETWEEN))
    text += f", and {told_writes(case.changed_by)} wrote it since"
    fixes = _advice("look at what this line makes of a gradient, or of a norm, that is 0 or large")
    return StepFinding(text, fixes=fixes, place=case.changed_by[0].place)


def told_writes(writes: Sequence[LateWrite]) -> str:
    """``mul_ (train.py:12) and add_ (train.py:13)``; ``train.py:12 (mul_, add_)`` of one line.

    Which of the operations of one line made a bad number is not known.
    """
    lines: dict[Place, list[LateWrite]] = {}
    for each in writes:
        lines.setdefault(each.place, []).append(each)
    return " and ".join(map(_told_line, lines.values()))


def _told_line(writes: Sequence[LateWrite]) -> str:
    if len(writes) == 1:
        return str(writes[0])
    place = Source(*writes[0].place, "").place
    return f"{place} ({', '.join(each.kind for each in writes)})"


def _inside(case: StepCase) -> StepFinding | None:
    """The operation of a script's own step, which ran again."""
    found = case.inside
    if found is None:
        return None
    made = f"{plain(found.kind)} made the first bad number of this step"
    if found.number is not None:
        text = f"{plain(found.kind)} was given the number {found.number:g}"
        fix = "look at how this number is computed: Python's 0 * inf and inf - inf are nan"
        return StepFinding(text, "unknown", _advice(fix), place=found.place)
    evidence = found.evidence
    if evidence is None:
        return StepFinding(made, place=found.place)
    cause = cause_of(evidence)
    source = None if found.place is None else source_at(found.place)
    around = Surroundings.of_nothing(evidence.kind, evidence.dtype, source)
    # Gradients are no counts, even where all are whole numbers.
    operands = tuple(replace(each, is_whole=False) for each in evidence.operands)
    fixes = fixes_for(cause, replace(evidence, operands=operands), around)
    if cause == "zero divisor" and found.made_by == ("norm", "norm"):
        fixes = (RATIO_OF_NORMS,)
    if cause == "domain" and found.is_of_variance:
        fixes = _advice(repair_of_variance(source, is_of_roundings=found.is_of_roundings))
    if cause == "overflow" and any(abs(x.low) == case.lr for x in evidence.operands if not x.dtype):
        fixes = _advice(f"a smaller learning rate: it is {case.lr:g}")
    elif cause == "overflow" and (of_turns := fix_of_turns(source)) is not None:
        fixes = (of_turns, *fixes)[:MOST_FIXES]
    problem = "NaN" if math.isnan(evidence.number) else f"{evidence.number:g}"
    text = f"{plain(found.kind)} made the first {problem} of this step: {operands_text(evidence)}"
    lost = found.lost_eps
    if cause == "zero divisor" and lost is not None:
        text += f"; eps {lost.number:g} is 0 in {lost.dtype}"
        held = f", or take an eps that {lost.dtype} holds (1e-4)" if lost.dtype == "float16" else ""
        fixes = _advice(f"keep the optimizer's state and this division in float32{held}")
    return StepFinding(text, cause, fixes, words_for(cause, evidence), found.place)


def _state(case: StepCase) -> StepFinding | None:
    """A state that was bad before the step."""
    fits = case.gradient**2 < limit_of(case.dtype)
    for key, value in case.states.items():
        # A buffer of momentum may hold what the step divided.
        is_average = key in AVERAGES or (key == "momentum_buffer" and case.divisor is None)
        was_bad = (is_average and math.isnan(value)) or (
            key in SQUARES and fits and not math.isfinite(value)
        )
        if case.is_own or not was_bad:
            continue
        text = f"{case.place}{key} was {value:.4g} before this step; the gradient is finite"
        if case.spoilt_in is not None:
            text += f". The step after batch {case.spoilt_in} wrote it"
        fix = "drop the optimizer's state, or load a healthy one, when weights are set back"
        return StepFinding(text, "unknown", _advice(fix))
    return None


def _centered(case: StepCase) -> StepFinding | None:
    """The variance of a centered RMSprop, which roundings can make negative."""
    if case.is_own or not {"square_avg", "grad_avg"} <= case.states.keys():
        return None
    variance = case.states["square_avg"] - case.states["grad_avg"] ** 2
    if not math.isnan(case.weight) or variance > 1e-6 * case.states["square_avg"]:
        return None
    text = f"{case.place}the step takes the root of square_avg - grad_avg², which is {variance:.4g}"
    return StepFinding(text, "rounding", _advice("centered=False: this difference cancels"))


def _eps(case: StepCase) -> StepFinding | None:
    """A divisor of 0, because the weight's dtype does not hold eps."""
    if case.is_own or case.divisor is None or case.divisor[1] != 0 or case.held_eps != 0:
        return None
    how, moment = case.divisor
    eps = case.settings.get("eps", 0.0)
    kept = f"eps {eps:g} is 0 in {case.dtype}" if eps else "eps is 0"
    text = (
        f"{case.place}the step divides by {how.format(moment)}, and {kept}; "
        f"gradient {case.gradient:.4g}"
    )
    larger = "an eps above 0"
    if case.dtype == "float16":
        larger = (
            "keep the weights in float32 (torch.autocast casts them for the forward where it "
            "helps), or take eps=1e-4, with which small gradients are as good as 0"
        )
    return StepFinding(text, "zero divisor", _advice(larger))


def _overflow(case: StepCase) -> StepFinding | None:
    """Finite numbers without a pole made an infinite weight."""
    states = (value for key, value in case.states.items() if key not in RESULTS)
    known = (case.gradient, case.lr, *states)
    if case.is_own or not math.isinf(case.weight) or not all(map(math.isfinite, known)):
        return None
    decay = case.lr * case.settings.get("weight_decay", 0.0)
    text = case.place + case.numbers
    if case.scaled_by > 1:
        return StepFinding(
            f"{text}; the gradient is still multiplied by the loss scale of {case.scaled_by:g}",
            "overflow",
            _advice("scaler.step(optimizer) in place of optimizer.step(): it divides by the scale"),
        )
    if abs(1 - decay) > 1:
        text += f"; weight decay {case.settings['weight_decay']:g} times the learning rate is "
        text += f"{decay:.4g}: each step multiplies the weight by {1 - decay:.4g}"
        return StepFinding(text, "overflow", _advice("a smaller weight decay or learning rate"))
    buffer = case.states.get("momentum_buffer", case.gradient)
    step = abs(case.lr * buffer)
    fixes = _advice(f"a smaller learning rate: it is {case.lr:g}")
    if step > limit_of(case.dtype) / 2 and case.lr <= 1:
        fixes = (*_advice(f"clip the gradient: it is {case.gradient:.4g}"), *fixes)
    return StepFinding(text, "overflow", fixes)


def _unknown(case: StepCase) -> StepFinding:
    """Only numbers."""
    text = case.place + case.numbers
    if case.is_own and case.why_not_inside:
        text += f"; the step was not looked into: {case.why_not_inside}"
    return StepFinding(text)


RULES: tuple[Rule, ...] = (
    _setting, _excused, _gradient, _inside, _eps, _centered, _state, _overflow, _unknown,
)  # fmt: skip
