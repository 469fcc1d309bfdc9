"""Frames, rows and origins as words, against texts written by hand from the specification."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxguard import Report
from fxguard.records import Frame, Origin, Row, Source
from fxguard.report.text import frame_text, row_text
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
    masked = Origin(softmax, "nan", "softmax", "output", masked_row=True)
    report = Report(
        3,
        (linear,),
        (weight, dataclasses.replace(OVERFLOW, follows=True), masked),
        absorbed=(Origin(log, "inf", "log", "output"),),
        error="IndexError: index out of range in self",
    )
    assert report.verdict == [
        "weight head.weight holds NaN",
        "  weight: 4 NaN, 0 +inf, 0 -inf of 4 elements; largest finite magnitude none; "
        "first at [0, 0]",
        f"then mul in {BLOCK} made inf (modeling_t5.py:109) of it",
        "softmax in head made NaN (train.py:7)",
        "  train.py:7",
        "  row fully masked: it read a row in which every element is -inf",
        "forward then raised IndexError: index out of range in self",
        "note: log in bias made inf (train.py:7), but it reached no output",
    ]
    assert str(report).startswith("\n".join(report.verdict) + "\n\nDetected inf/nan during")
