"""Frames, rows and origins as words, against texts written by hand from the specification."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxguard.findings import Growth, Origin
from fxguard.records import Frame, Row, Source
from fxguard.report.text import frame_text, row_text
from fxguard.types import Report
from support.t5_overflow import BLOCK, OVERFLOW

INF, NAN = math.inf, math.nan


def test_nan_is_written_twice_and_other_rows_say_why_they_have_no_number() -> None:
    """NaN, None, other objects and empty tensors stand in the columns of the numbers."""
    frame = Frame(
        "",
        "Model",
        False,
        (
            Row("input[0]", note="None"),
            Row("input[use_cache]", note="not a tensor"),
            Row("input[cache]", note="empty"),
            Row("input[shape]", note="meta"),
            Row("output[logits]", NAN, NAN),
        ),
    )
    assert frame_text(frame).splitlines() == [
        "                   Model",
        "             None input[0]",
        "     not a tensor input[use_cache]",
        "            empty input[cache]",
        "             meta input[shape]",
        "     nan      nan output[logits]",
    ]


def test_operation_without_a_line_has_a_bare_title() -> None:
    """Without a known line the title of an operation is name and kind."""
    frame = Frame("head", "mul", True, ())
    assert frame_text(frame) == "                  head mul"


magnitudes = st.floats(min_value=0) | st.just(NAN)


@settings(deadline=None)
@given(magnitudes, magnitudes, st.text("abc[]0", min_size=1))
def test_numbers_stand_in_two_columns_of_eight(low: float, high: float, label: str) -> None:
    """Each number is written as printf's %8.2e, whatever it is."""
    assert row_text(Row(label, low, high)) == "%8.2e %8.2e %s" % (low, high, label)  # noqa: UP031


@pytest.mark.parametrize("note", ["None", "not a tensor", "empty", "meta", "not measured"])
def test_reasons_take_the_width_of_the_numbers(note: str) -> None:
    """A reason is right-aligned in the 17 columns of the two numbers; no reason reads None."""
    assert row_text(Row("x", note=note)) == note.rjust(17) + " x"
    assert row_text(Row("x")) == "None".rjust(17) + " x"


def test_the_verdict_tells_origins_errors_and_notes_in_order() -> None:
    """A weight; what followed of it, in one line; what forward raised; what was absorbed."""
    line = Source("train.py", 7, "")
    log = Frame("bias", "log", True, (Row("output", INF, INF),), source=line)
    linear = Frame("head", "Linear", False, (Row("weight", NAN, NAN), Row("output", NAN, NAN)))
    weight = Origin(linear, "nan", "weight head.weight", "weight", 4, 4, 0, 0, None, (0, 0))
    softmax = Frame("head", "softmax", True, (Row("output", NAN, NAN),), source=line)
    masked = Origin(softmax, "nan", "softmax", "output", cause="masked row")
    report = Report(
        3,
        (linear,),
        (weight, dataclasses.replace(OVERFLOW, follows=True), masked),
        absorbed=(Origin(log, "inf", "log", "output"),),
        error="IndexError: index out of range in self",
    )
    assert report.verdict == [
        "weight head.weight holds NaN",
        "  weight: 4 NaN, 0 +inf, 0 -inf of 4 elements; first at [0, 0]",
        f"then mul in {BLOCK} made inf and -inf (modeling_t5.py:109) of it",
        "softmax in head made NaN (train.py:7): masked row, all of the row is -inf",
        "  train.py:7",
        "forward then raised IndexError: index out of range in self",
        "note: log in bias made inf (train.py:7), but it reached no output",
    ]
    assert str(report).startswith("\n".join(report.verdict) + "\n\nDetected inf/nan during")


ABSORBED = dataclasses.replace(OVERFLOW, spread=(), spread_count=0, climb=())


@pytest.mark.parametrize(
    ("cause", "not_judged", "end"),
    [
        ("unknown", "", ", but it reached no output"),
        ("zero divisor", "", ": at a pole; it reached no output, and does no harm"),
        (
            "overflow",
            "no float64 kernel for _mm",
            ": overflow; it reached no output; not judged: no float64 kernel for _mm",
        ),
    ],
)
def test_a_note_says_whether_an_absorbed_value_does_harm(
    cause: str, not_judged: str, end: str
) -> None:
    """It says so only where somebody has looked."""
    origin = dataclasses.replace(ABSORBED, cause=cause, not_judged=not_judged)
    report = Report(0, (), (), absorbed=(origin,))
    assert report.verdict == [f"note: {origin.message}{end}"]


def test_five_lines_suffice_for_the_right_fix() -> None:
    """Headline and cause, line, numbers, harm, and the best fix; a loop comes after it."""
    origin = dataclasses.replace(
        OVERFLOW, harm="the model's output is finite and wrong: 0 instead of 1"
    )
    lines = Report(0, (), (origin,)).verdict
    assert lines[:5] == [
        f"{OVERFLOW.message}: overflow",
        f"  {OVERFLOW.frame.source}",
        f"  {OVERFLOW.operands}",
        f"  {origin.harm}",
        f"  fix: {OVERFLOW.fixes[0]}",
    ]
    turn = "call 37 of `cell` in this forward; grew 2.0 times a call since call 0"
    looped = Report(0, (), (dataclasses.replace(OVERFLOW, turn=turn),)).verdict
    assert looped[3] == f"  fix: {OVERFLOW.fixes[0]}"
    assert f"  {turn}" in looped[4:]


@pytest.mark.parametrize(
    ("operands", "needed", "line"),
    [
        ("at [1]: 2 * 3", 70000.0, "  it needs 7e+04, 1.07 times what float16 holds (65504)"),
        ("at [1]: 2 * 3 is 70000 in float64", 7e4, "  it needs 7e+04, 1.07 times {}"),
        (
            "at [1]: 2 * 3 is -66000 in float64",
            7e4,
            "  its largest element needs 7e+04, 1.07 times {}",
        ),
        ("at [1]: exp(800.0) is inf in float64, too", INF, None),
        ("", INF, "  it is infinite in float64 too"),
    ],
)
def test_what_an_overflow_needs(operands: str, needed: float, line: str | None) -> None:
    """The largest number of the tensor; an infinity that the operands have said is enough."""
    origin = dataclasses.replace(OVERFLOW, operands=operands, needed=needed)
    said = [each for each in Report(0, (), (origin,)).verdict if "needs" in each or "too" in each]
    rest = said[bool(operands) and "too" in operands :]
    assert rest == ([] if line is None else [line.format("what float16 holds (65504)")])


def unknown(kind: str, *inputs: tuple[float, float], phase: str = "forward") -> Origin:
    """An infinity of which nobody knows more than magnitudes."""
    rows = [Row(f"input[{i}]", *each) for i, each in enumerate(inputs)]
    frame = Frame("", kind, True, (*rows, Row("output", 0.0, INF)), phase=phase)
    return Origin(frame, "inf", kind, "output", dtype="float32", limit=3.4028234e38)


UNKNOWN = [
    (unknown("log", (0.0, 3.0)), False),
    (unknown("log_", (1e-40, 3e38)), False),
    (unknown("exp", (0.0, 90.0)), True),
    (unknown("mul", (0.0, 3e30), (1.0, 1e9)), True),
    (unknown("mul", (0.0, 3.0), (1.0, 1e9)), False),
    (unknown("mul"), True),
    (unknown("div", (1.0, 3.0), (1e-39, 1.0)), True),
    (unknown("div", (1.0, 3.0), (0.0, 1.0)), False),
    (unknown("div", (1.0, 3.0), (0.1, 1.0)), False),
    (unknown("div", (1.0, 3.0)), True),
    (unknown("rsqrt", (0.0, 1.0)), False),
    (unknown("matmul", (0.0, 1e20), (0.0, 1e20)), True),
    (unknown("mul", (0.0, INF), (1.0, 2.0)), True),
    (unknown("log", (0.0, 3.0), phase="backward"), True),
]


@pytest.mark.parametrize(("origin", "is_told"), UNKNOWN)
def test_the_limit_of_a_dtype_is_told_where_it_may_be_exceeded(
    origin: Origin, is_told: bool
) -> None:
    """Of a logarithm it is beside the point, and where all operands are far from it."""
    assert ("  float32 holds 3.4e+38" in Report(0, (), (origin,)).verdict) == is_told
    overflow = dataclasses.replace(origin, cause="overflow")
    assert "  float32 holds 3.4e+38" in Report(0, (), (overflow,)).verdict


LOST = dataclasses.replace(
    OVERFLOW,
    problem="underflow",
    cause="underflow",
    operands="at [0]: 0.0001 * 0.0001 is 1e-08 in float64 (likewise in 30 more elements)",
    needed=None,
    nan_count=None,
    dtype="float16",
    lost_share=0.9687,
    largest_lost=1e-8,
)


def test_an_underflow_says_how_much_is_0_and_how_large_it_was() -> None:
    """In the headline, and beside the smallest number of the dtype; never as inf or NaN."""
    report = Report(0, (LOST.frame,), (LOST,))
    where = LOST.message.partition(" made ")[0]
    line = f"{where} made 96.8% of its nonzero elements 0 (modeling_t5.py:109)"
    assert report.message == f"batch 0: {line}"
    lines = str(report).splitlines()
    assert lines[0] == f"{line}: underflow"
    assert lines[2] == f"  {LOST.operands}"
    assert "  it lost up to 1.0e-08; the smallest number of float16 is 6.0e-08" in lines
    assert "Detected underflow during batch_number=0" in lines
    assert "inf/nan" not in str(report)
    assert "Detected inf/nan during batch_number=0" in str(Report(0, (), (OVERFLOW, LOST)))


@pytest.mark.parametrize(
    ("share", "text"), [(1.0, "100%"), (0.9999, "99.9%"), (0.5, "50%"), (0.2509, "25%")]
)
def test_a_share_is_rounded_down(share: float, text: str) -> None:
    """100 % is all of them."""
    assert f" {text} of its" in dataclasses.replace(LOST, lost_share=share).message


def test_the_fix_and_the_phase_are_those_of_the_first_origin() -> None:
    """One line or two; what only follows has no say, and a bad input is data."""
    report = Report(0, (), (dataclasses.replace(OVERFLOW, follows=True, fixes=()), OVERFLOW))
    first, second = OVERFLOW.fixes
    assert report.fix == f"{first}\n{second}"
    assert report.phase == "forward"
    given = dataclasses.replace(OVERFLOW, what="argument `x` of T5.forward", fixes=())
    assert Report(0, (), (given,)).phase == "data"
    assert Report(0, (), (given,)).fix == ""
    assert (Report(0, (), ()).phase, Report(0, (), ()).fix) == ("", "")


def test_blown_up_weights_take_the_place_of_other_fixes() -> None:
    """What overflowed is only the effect: keeping it in float32 would help nobody."""
    grown = Growth("conv1.weight", 3.1e27, 0.3, 0)
    report = Report(5, (), (OVERFLOW,), grown=(grown,))
    line = "conv1.weight up to 3.1e+27, it was 0.3 in batch 0"
    assert report.verdict[:3] == [line, f"  fix: {report.fix}", f"{OVERFLOW.message}: overflow"]
    assert "learning rate" in report.fix
    assert not any("in float32" in shown for shown in report.verdict)
    assert report.message == f"batch 5: {line}; {OVERFLOW.message}"
    assert report.advice == f"{report.message}: overflow; fix: {report.fix}"
