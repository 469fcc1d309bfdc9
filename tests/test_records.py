"""Records: frozen data about values, frames and origins."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from fxguard.records import Frame, Range, Row, RowRole, Source, title_of
from support.t5_overflow import LINE, MUL, OVERFLOW, REPORT

INF, NAN = math.inf, math.nan


def test_source_is_shown_without_its_directory() -> None:
    """A line is `file:number: code`; where the text is unknown, `file:number`."""
    assert str(LINE) == "modeling_t5.py:109: hidden_states = hidden_gelu * hidden_linear"
    assert str(Source("/a/b.py", 3, "")) == "b.py:3"


@pytest.mark.parametrize(
    ("abs_max", "bad", "severity"),
    [(0.0, False, 0), (65504.0, False, 0), (INF, True, 1), (NAN, True, 2)],
)
def test_nan_is_worse_than_inf_and_inf_worse_than_finite(
    abs_max: float, bad: bool, severity: int
) -> None:
    """Severity orders finite, inf, NaN; a row is bad from inf on; a row without numbers is not."""
    assert Range(abs_max, abs_max).severity == severity
    assert Row("x", abs_max, abs_max).is_bad is bad
    assert not Row("x", note="empty").is_bad


@pytest.mark.parametrize("record", [REPORT, MUL, OVERFLOW, LINE, MUL.rows[0], Range(0.0, 1.0)])
def test_records_are_frozen_and_hashable(record: Any) -> None:
    """No field of a record can be changed; equal records are one key."""
    for field in dataclasses.fields(record):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field.name, None)
    assert not hasattr(record, "__dict__")
    assert len({record, dataclasses.replace(record)}) == 1


@pytest.mark.parametrize(
    ("role", "labels"),
    [
        (RowRole.INPUT, ("input", "input[0]", "input[input_ids]", "input[cache][1]")),
        (RowRole.OUTPUT, ("output", "output[1]", "output[logits]", "output (after layer_norm)")),
        (RowRole.OUTPUT, ("output[0][1] (scores)",)),
        (RowRole.PARAMETER, ("weight", "bias", "", "input_proj", "inputs", "output_scale")),
        (RowRole.PARAMETER, ("outputs[0]", "output0", "input.weight", "output weight")),
    ],
)
def test_the_role_of_a_row_is_its_whole_label(role: RowRole, labels: tuple[str, ...]) -> None:
    """A parameter may be called ``input_proj``, and is one all the same."""
    assert {Row(label).role for label in labels} == {role}


def test_the_outputs_of_a_frame_are_what_it_made() -> None:
    """A weight that is called ``output_scale`` and holds NaN was not made by it."""
    weight = Row("output_scale", NAN, NAN)
    healthy = Frame("head", "Scale", False, (weight, Row("input[0]", INF, INF), Row("output")))
    assert [row.label for row in healthy.outputs] == ["output"]
    assert not healthy.made_bad
    assert Frame("head", "Scale", False, (weight, Row("output[0]", 0.0, INF))).made_bad


def test_a_title_is_module_and_kind() -> None:
    """The root module has no name, and a title no blank in front."""
    assert title_of("encoder.block.0", "mul") == "encoder.block.0 mul"
    assert title_of("", "T5Model") == "T5Model"
    assert Frame("head", "mul", True, ()).title == "head mul"
