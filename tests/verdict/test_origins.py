"""Bad values to their origins, against hand-made cases and a definition written out as loops."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fxguard import NonFiniteError, guard_of, instrument
from fxguard.plan.blame import Blame
from fxguard.plan.plan import Step, Value
from fxguard.records import Range, Role, Severity
from fxguard.verdict.origins import Verdict, find_origins

FINITE, INF, NAN = Severity


@dataclass
class Program:
    """A few operations, written down by hand."""

    values: list[Value] = field(default_factory=list)
    severities: list[Severity] = field(default_factory=list)
    magnitudes: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    masks: set[int] = field(default_factory=set)
    ignored: set[int] = field(default_factory=set)
    largest: dict[int, float] = field(default_factory=dict)  # of finite elements, 1 otherwise
    turned: dict[int, bool] = field(default_factory=dict)  # what is known of elements
    asked: list[int] = field(default_factory=list)  # whose severity was asked for

    def value(
        self,
        severity: Severity = FINITE,
        role: Role = Role.INPUT,
        *,
        dtype: str = "",
        abs_max: float = 1.0,
    ) -> int:
        index = len(self.values)
        self.values.append(Value(role, f"{role.value}{index}", dtype))
        self.severities.append(severity)
        self.magnitudes.append((abs_max, math.inf, math.nan)[severity])
        return index

    def step(
        self, kind: str, inputs: Any, severity: Severity = FINITE, *, literal: bool = False
    ) -> int:
        made = self.value(severity, Role.MADE)
        self.steps.append(Step(kind, "block", tuple(inputs), (made,), literal))
        return made

    def verdict(self, *reached: int) -> Verdict:
        def severity(value: int) -> Severity:
            self.asked.append(value)
            return self.severities[value]

        return find_origins(
            self.steps,
            self.values,
            severity,
            abs_max=self.magnitudes.__getitem__,
            is_mask=self.masks.__contains__,
            finite_part=lambda value: Range(0.0, self.largest.get(value, 1.0)),
            turned_infinite=self.turned.get,
            reached=reached,
            is_ignored=lambda step: self.steps.index(step) in self.ignored,
        )


def test_finite_values_have_no_origin() -> None:
    """Where nothing is bad nobody is to blame."""
    program = Program()
    x = program.value()
    y = program.step("mul", [x, x])
    assert program.verdict(y) == Verdict()


def test_inf_and_the_nan_made_of_it_are_both_origins() -> None:
    """An overflow is an origin, so is what turns it into NaN, and what carries them is none."""
    program = Program()
    x = program.value()
    a = program.step("mul", [x, x], INF)
    b = program.step("add", [a, x], INF)
    c = program.step("sub", [b, b], NAN)
    d = program.step("relu", [c], NAN)
    assert program.verdict(d) == Verdict((Blame(a, 0, INF), Blame(c, 2, NAN)))


def test_nan_that_turns_into_inf_is_not_a_new_origin() -> None:
    """Only an output worse than every input is an origin; the NaN is still traced through inf."""
    program = Program()
    x = program.value()
    a = program.step("sqrt", [x], NAN)
    b = program.step("nan_to_num", [a], INF)
    assert program.verdict(b) == Verdict((Blame(a, 0, NAN),))


def test_independent_origins_come_in_order_of_execution() -> None:
    """Two origins that meet are told in the order in which they ran, not in order of use."""
    program = Program()
    x = program.value()
    first = program.step("exp", [x], INF)
    second = program.step("log", [x], INF)
    both = program.step("add", [second, first], INF)
    assert program.verdict(both).origins == (Blame(first, 0, INF), Blame(second, 1, INF))


def test_absorbed_value_does_not_count() -> None:
    """log(0) that a where discards is absorbed; the same log counts when where keeps it."""
    program = Program()
    x = program.value()
    log = program.step("log", [x], INF)
    kept = program.step("where", [log, x])
    assert program.verdict(kept) == Verdict(absorbed=(Blame(log, 0, INF),))
    program.severities[kept] = INF
    assert program.verdict(kept) == Verdict((Blame(log, 0, INF),))


def test_absorbed_and_counted_origins_are_kept_apart() -> None:
    """An absorbed value beside one that reaches the output is not blamed for it."""
    program = Program()
    x = program.value()
    log = program.step("log", [x], INF)
    kept = program.step("where", [log, x])
    exp = program.step("exp", [kept], INF)
    assert program.verdict(exp) == Verdict((Blame(exp, 2, INF),), (Blame(log, 0, INF),))


def test_value_that_nothing_reaches_is_absorbed() -> None:
    """A bad value that is no output and that nobody reads is absorbed."""
    program = Program()
    x = program.value()
    log = program.step("log", [x], INF)
    assert program.verdict(x) == Verdict(absorbed=(Blame(log, 0, INF),))
    assert program.verdict(x, log) == Verdict((Blame(log, 0, INF),))


def test_intentional_infinity_is_no_origin_but_nan_of_it_is() -> None:
    """masked_fill(mask, -inf) and what carries it are fine; softmax of a row of them is not."""
    program = Program()
    x = program.value()
    filled = program.step("masked_fill", [x], INF, literal=True)
    scaled = program.step("mul", [filled, x], INF)
    weights = program.step("softmax", [scaled])
    assert program.verdict(filled, scaled, weights) == Verdict()
    program.severities[weights] = NAN
    assert program.verdict(weights) == Verdict((Blame(weights, 2, NAN),))


def test_operation_without_the_literal_is_an_origin() -> None:
    """The same masked_fill without an infinite literal overflowed on its own."""
    program = Program()
    x = program.value()
    filled = program.step("masked_fill", [x], INF)
    assert program.verdict(filled) == Verdict((Blame(filled, 0, INF),))


def test_literal_infinity_does_not_excuse_nan() -> None:
    """An operation that was given an infinity and made NaN is an origin."""
    program = Program()
    x = program.value()
    product = program.step("mul", [x], NAN, literal=True)
    assert program.verdict(product) == Verdict((Blame(product, 0, NAN),))


def test_overflow_beside_a_mask_keeps_its_origin() -> None:
    """A mask that is added to an overflow does not hide it."""
    program = Program()
    x = program.value()
    scores = program.step("matmul", [x, x], INF)
    mask = program.step("full", [], INF, literal=True)
    masked = program.step("add", [mask, scores], INF)
    assert program.verdict(masked) == Verdict((Blame(scores, 0, INF),))


@pytest.mark.parametrize("role", [Role.INPUT, Role.BUFFER, Role.CONSTANT])
def test_given_mask_is_no_origin_and_given_overflow_is(role: Role) -> None:
    """-inf in an attention mask is intended; +inf in the same place is blamed."""
    program = Program()
    x, mask = program.value(), program.value(INF, role)
    program.masks = {mask}
    masked = program.step("add", [x, mask], INF)
    assert program.verdict(masked, mask) == Verdict()
    program.masks = set()
    assert program.verdict(masked) == Verdict((Blame(mask, None, INF),))


def test_mask_that_holds_nan_is_an_origin() -> None:
    """NaN is never intended, not even in a mask."""
    program = Program()
    mask = program.value(NAN)
    program.masks = {mask}
    masked = program.step("add", [mask], NAN)
    assert program.verdict(masked) == Verdict((Blame(mask, None, NAN),))


@pytest.mark.parametrize("severity", [INF, NAN])
def test_bad_weight_is_an_origin(severity: Severity) -> None:
    """A weight is blamed for what was made of it, and never taken for a mask."""
    program = Program()
    x, weight = program.value(), program.value(severity, Role.WEIGHT)
    program.masks = {weight}
    y = program.step("linear", [x, weight], severity)
    z = program.step("relu", [y], severity)
    assert program.verdict(z) == Verdict((Blame(weight, None, severity),))


def test_weights_are_looked_at_only_behind_something_bad() -> None:
    """The numbers of a weight are asked for only where an operation that read it made bad ones."""
    program = Program()
    x, fine, used = (
        program.value(),
        program.value(role=Role.WEIGHT),
        program.value(role=Role.WEIGHT),
    )
    hidden = program.step("linear", [x, fine])
    y = program.step("linear", [hidden, used], INF)
    assert program.verdict(y) == Verdict((Blame(y, 1, INF),))
    assert used in program.asked
    assert fine not in program.asked


def test_bad_input_that_is_returned_is_an_origin() -> None:
    """An input that is an output is blamed although no operation read it."""
    program = Program()
    x = program.value(NAN)
    assert program.verdict(x) == Verdict((Blame(x, None, NAN),))
    program.severities[x] = FINITE
    assert program.verdict(x) == Verdict()


def test_ignored_operation_is_not_blamed_but_its_inputs_are() -> None:
    """Ignoring an operation hides what it makes, not what it passes on, and nothing after it."""
    program = Program()
    x = program.value()
    exp = program.step("exp", [x], INF)
    log = program.step("sub", [exp, exp], NAN)
    end = program.step("relu", [log], NAN)
    program.ignored = {1}
    assert program.verdict(end) == Verdict((Blame(exp, 0, INF),))
    program.ignored = {0, 1}
    assert program.verdict(end) == Verdict()
    program.ignored = {0}
    assert program.verdict(end) == Verdict((Blame(log, 1, NAN),))


# Masks that hold the most negative number of their dtype.

DTYPES = [
    *("float16", "bfloat16", "float32"),
    "float64",
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["add", "sub", "sub_", "add_"])
def test_adding_to_a_mask_of_the_lowest_number_is_intended(dtype: str, kind: str) -> None:
    """finfo.min plus a negative score is -inf on purpose; a NaN made of it still counts."""
    program = Program()
    lowest = torch.finfo(getattr(torch, dtype)).max
    scores = program.value(dtype=dtype, abs_max=10.0)
    mask = program.value(dtype=dtype, abs_max=lowest)
    masked = program.step(kind, [scores, mask], INF)
    weights = program.step("softmax", [masked])
    assert program.verdict(masked, weights) == Verdict()
    program.severities[weights] = NAN
    assert program.verdict(masked, weights) == Verdict((Blame(weights, 1, NAN),))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_adding_to_a_large_number_is_an_overflow(dtype: str) -> None:
    """The next smaller number of the dtype is no mask; nor is another operation an addition."""
    program = Program()
    info = torch.finfo(getattr(torch, dtype))
    below = torch.nextafter(torch.tensor(info.max), torch.tensor(0.0)).item()
    scores = program.value(dtype=dtype, abs_max=10.0)
    large = program.value(dtype=dtype, abs_max=below)
    added = program.step("add", [scores, large], INF)
    assert program.verdict(added) == Verdict((Blame(added, 0, INF),))
    program = Program()
    mask = program.value(dtype=dtype, abs_max=info.max)
    divided = program.step("div", [mask, mask], INF)
    assert program.verdict(divided) == Verdict((Blame(divided, 0, INF),))


class Saturated(nn.Module):
    """Clamps to the dtype's largest number, as T5 does in float16, and goes on."""

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return torch.clamp(x, max=torch.finfo(x.dtype).max) * factor


def test_saturated_activation_is_fine_while_it_is_finite() -> None:
    """A value at the end of its dtype is no detection."""
    x = torch.tensor([65504.0, 1.0], dtype=torch.float16)
    assert instrument(Saturated())(x, 0.5).tolist() == [32752.0, 0.5]


def test_saturated_activation_that_overflows_is_found() -> None:
    """A positive value at the end of its dtype is no mask: twice as much is an overflow."""
    model = instrument(Saturated())
    with pytest.raises(NonFiniteError, match="mul"):
        model(torch.tensor([65504.0, 1.0], dtype=torch.float16), 2.0)


class Masked(nn.Module):
    """Masked attention scores, and the weights that they give."""

    def forward(self, scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        masked = scores + mask
        return masked, torch.softmax(masked, dim=-1)


@pytest.mark.parametrize("name", DTYPES)
def test_lowest_number_as_a_mask_raises_only_for_nan(name: str) -> None:
    """finfo.min in a mask raises nothing while each row keeps a number, and NaN raises."""
    model, dtype = instrument(Masked()), getattr(torch, name)
    lowest = torch.finfo(dtype).min
    mask = torch.tensor([0.0, lowest], dtype=dtype)
    masked, weights = model(torch.tensor([1.0, lowest], dtype=dtype), mask)
    assert masked.tolist() == [1.0, -math.inf]
    assert weights.tolist() == [1.0, 0.0]
    with pytest.raises(NonFiniteError, match="softmax"):
        model(torch.tensor([lowest, lowest], dtype=dtype), torch.full((2,), lowest, dtype=dtype))
    (*_, origin) = guard_of(model).last_report.origins
    assert origin.problem == "nan"


# The definition, written out.


@st.composite
def programs(draw: Any) -> tuple[Program, list[int]]:
    """A random graph of up to eight operations with random severities."""
    program = Program()
    severities = st.sampled_from([FINITE, FINITE, INF, NAN])
    for _ in range(draw(st.integers(0, 3))):
        role = draw(st.sampled_from([role for role in Role if role.is_given]))
        program.value(draw(severities), role)
        if draw(st.booleans()):
            program.masks.add(len(program.values) - 1)
    for number in range(draw(st.integers(1, 8))):
        known = len(program.values)
        read = draw(st.lists(st.integers(0, known - 1), max_size=3)) if known else []
        made = [program.value(draw(severities), Role.MADE) for _ in range(draw(st.integers(1, 2)))]
        literal = draw(st.integers(0, 3)) == 0
        program.steps.append(Step(f"op{number}", "m", tuple(read), tuple(made), literal))
        if draw(st.integers(0, 5)) == 0:
            program.ignored.add(number)
    reached = draw(st.lists(st.sampled_from(range(len(program.values))), unique=True))
    return program, reached


def by_definition(program: Program, reached: list[int]) -> Verdict:
    """Section 4 of the specification as loops over the whole graph."""
    severity = program.severities

    def is_origin(value: int, step: Step) -> bool:
        worse = severity[value] > max((severity[i] for i in step.inputs), default=FINITE)
        intended = step.infinite_literal and severity[value] == INF
        return worse and not intended and program.steps.index(step) not in program.ignored

    def arrives(value: int) -> bool:
        """Whether bad values lead from this one to a reached one."""
        return value in reached or any(
            severity[made] and arrives(made)
            for step in program.steps
            if value in step.inputs
            for made in step.outputs
        )

    def is_given(value: int) -> bool:
        """Whether a value that nobody made is bad, and not on purpose."""
        role = program.values[value].role
        mask = value in program.masks and severity[value] == INF and role is not Role.WEIGHT
        return role.is_given and severity[value] > FINITE and not mask

    found: list[Blame] = []

    def add(value: int, step: int | None) -> None:
        blame = Blame(value, step, severity[value])
        if blame not in found:
            found.append(blame)

    for index, step in enumerate(program.steps):
        if any(severity[value] for value in step.outputs):
            for value in filter(is_given, step.inputs):
                add(value, None)
        for value in step.outputs:
            if is_origin(value, step):
                add(value, index)
    for value in filter(is_given, reached):
        add(value, None)
    return Verdict(
        tuple(blame for blame in found if arrives(blame.value)),
        tuple(blame for blame in found if not arrives(blame.value)),
    )


@settings(deadline=None, max_examples=500)
@given(programs())
def test_verdict_is_the_one_of_the_definition(case: tuple[Program, list[int]]) -> None:
    """Origins are outputs worse than all inputs from which bad values lead to an output."""
    program, reached = case
    assert program.verdict(*reached) == by_definition(program, reached)
