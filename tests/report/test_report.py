"""Records as text, tables, JSON and HTML, against texts written by hand from the specification."""

from __future__ import annotations

import copy
import dataclasses
import html.parser
import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxguard import BatchLimitReached, FxguardError, NonFiniteError, Report
from fxguard.records import Climb, Frame, Origin, Range, Row, Source
from fxguard.report.report import frame_text, row_text

INF, NAN = math.inf, math.nan

LINE = Source(
    "/site-packages/t5/modeling_t5.py", 109, "hidden_states = hidden_gelu * hidden_linear"
)
BLOCK = "encoder.block.0.layer.1.DenseReluDense"
WI_1 = Frame(
    f"{BLOCK}.wi_1",
    "Linear",
    False,
    (
        Row("weight", 7.2142e-06, 2.6449),
        Row("input[0]", 0.0, 47.41),
        Row("output", 5.5251e-05, 485.07),
    ),
    source=LINE,  # a module of one operation knows its line, and does not show it
)
MUL = Frame(
    BLOCK,
    "mul",
    True,
    (Row("input[0]", 0.0, 454.2), Row("input[1]", 5.5251e-05, 485.07), Row("output", 0.0, INF)),
    source=LINE,
)
OVERFLOW = Origin(
    MUL,
    "inf",
    "mul",
    "output",
    *(6144, 0, 2, 1, 65472.0, (0, 3, 17)),
    dtype="float16",
    limit=65504.0,
    needed=220289.0,
    climb=(
        Climb("encoder.block.0.layer.1.layer_norm mul", 4.07, 47.41),
        Climb(f"{BLOCK}.wi_1 linear", 47.41, 485.07, dataclasses.replace(LINE, line=108)),
    ),
    spread=(f"{BLOCK}.dropout dropout", f"{BLOCK}.wo linear"),
    spread_count=344,
    reached_output=True,
)
REPORT = Report(0, (WI_1, MUL), (OVERFLOW,))

VERDICT = """\
mul in encoder.block.0.layer.1.DenseReluDense made inf (modeling_t5.py:109)
  modeling_t5.py:109: hidden_states = hidden_gelu * hidden_linear
  it read input[0] up to 4.54e+02, input[1] up to 4.85e+02
  it needs 2.203e+05, 3.36 times what float16 holds (65504)
  output: 0 NaN, 2 +inf, 1 -inf of 6144 elements; largest finite magnitude 6.547e+04; first at [0, 3, 17]
  where the magnitude grew most on the way:
    4.07e+00 -> 4.74e+01  encoder.block.0.layer.1.layer_norm mul
    4.74e+01 -> 4.85e+02  encoder.block.0.layer.1.DenseReluDense.wi_1 linear  (modeling_t5.py:108)
  it spread to encoder.block.0.layer.1.DenseReluDense.dropout dropout, encoder.block.0.layer.1.DenseReluDense.wo linear and 342 more; the model returned it
"""  # noqa: E501
FRAMES = """\
Detected inf/nan during batch_number=0
Last 2 forward frames:
abs min  abs max  metadata
                  encoder.block.0.layer.1.DenseReluDense.wi_1 Linear
7.21e-06 2.64e+00 weight
0.00e+00 4.74e+01 input[0]
5.53e-05 4.85e+02 output
                  encoder.block.0.layer.1.DenseReluDense mul  # modeling_t5.py:109: hidden_states = hidden_gelu * hidden_linear
0.00e+00 4.54e+02 input[0]
5.53e-05 4.85e+02 input[1]
0.00e+00      inf output"""  # noqa: E501
GOLDEN = f"{VERDICT}\n{FRAMES}"


def test_text_is_the_verdict_and_the_classic_frames() -> None:
    """The verdict comes first; below it the frames read as in the specification, to the blank."""
    assert str(REPORT) == GOLDEN


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


def test_message_names_rank_batch_operation_and_line() -> None:
    """The message of the error is one line; the rank is told where there is one."""
    line = f"batch 0: mul in {BLOCK} made inf (modeling_t5.py:109)"
    assert REPORT.message == line
    assert dataclasses.replace(REPORT, rank=1).message == f"rank 1: {line}"


def test_source_is_shown_without_its_directory() -> None:
    """A line is `file:number: code`; where the text is unknown, `file:number`."""
    assert str(LINE) == "modeling_t5.py:109: hidden_states = hidden_gelu * hidden_linear"
    assert str(Source("/a/b.py", 3, "")) == "b.py:3"


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


# Tables.


def test_github_table_has_one_line_for_each_row() -> None:
    """A GitHub table holds head, rule, and a line of six cells for each row of each frame."""
    head, rule, *lines = REPORT.to_table().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [cell.strip() for cell in head.strip("|").split("|")] == [
        *("module", "kind", "value"),
        *("abs min", "abs max", "source"),
    ]
    assert set(rule) == {"|", "-"}
    assert cells[0] == [f"{BLOCK}.wi_1", "Linear", "weight", "7.21e-06", "2.64e+00", str(LINE)]
    assert cells[-1] == [BLOCK, "mul", "output", "0.00e+00", "inf", str(LINE)]
    assert len(cells) == 6


@pytest.mark.parametrize("tablefmt", ["simple", "plain", "grid", "pipe", "rst", "tsv", "html"])
def test_every_format_of_tabulate_shows_every_number(tablefmt: str) -> None:
    """Whatever the format, each module, label and number is in the table as it was written."""
    table = REPORT.to_table(tablefmt)
    for frame in REPORT.frames:
        assert frame.name in table
        for row in frame.rows:
            assert row.label in table
            assert f"{row.abs_max:.2e}" in table
    assert "6.55e+04" not in table


def test_bar_in_the_source_does_not_break_the_github_table() -> None:
    """A bar in the user's line makes no seventh cell."""
    line = Source("a.py", 1, "mask = padding | causal")
    report = Report(0, (dataclasses.replace(MUL, source=line),), ())
    last = report.to_table("github").splitlines()[-1]
    assert last.replace("\\|", "").count("|") == 7


# Data.


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def test_json_is_strict_and_complete() -> None:
    """NaN and infinities are strings, paths and indices are kept, and any parser can read it."""
    nan = Frame("head", "softmax", True, (Row("output", NAN, NAN), Row("x", note="None")))
    odd = Origin(nan, "nan", "softmax", "output", 2, 1, 0, 0, -INF, ())
    report = Report(4, (WI_1, MUL, nan), (OVERFLOW, odd), rank=2)
    for indent in (None, 2):
        data = json.loads(report.to_json(indent=indent), parse_constant=refuse)
        assert data["batch_number"] == 4
        assert data["rank"] == 2
        assert data["absorbed"] == []
        assert [frame["kind"] for frame in data["frames"]] == ["Linear", "mul", "softmax"]
        assert data["frames"][0]["rows"][0] == {
            "label": "weight",
            "abs_min": 7.2142e-06,
            "abs_max": 2.6449,
            "note": "",
            "dtype": "",
        }
        assert data["frames"][1]["rows"][2]["abs_max"] == "inf"
        assert data["frames"][2]["rows"][0]["abs_min"] == "nan"
        assert data["frames"][2]["rows"][1]["abs_min"] is None
        assert data["frames"][1]["source"] == {
            "file": "/site-packages/t5/modeling_t5.py",
            "line": 109,
            "code": "hidden_states = hidden_gelu * hidden_linear",
        }
        assert data["origins"][0]["first_index"] == [0, 3, 17]
        assert data["origins"][0]["posinf_count"] == 2
        assert data["origins"][1]["largest_finite"] == "-inf"
    assert "\n" not in report.to_json()
    assert "\n  " in report.to_json(indent=2)


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(), magnitudes, magnitudes), max_size=4), st.text(), st.text())
def test_json_keeps_any_text_and_number(rows: Any, name: str, code: str) -> None:
    """Every finite number is read back as it was, and every name and line of code."""
    members = tuple(Row(*row) for row in rows)
    report = Report(0, (Frame(name, "mul", True, members, Source("f.py", 1, code)),), ())
    (frame,) = json.loads(report.to_json(), parse_constant=refuse)["frames"]
    assert (frame["name"], frame["source"]["code"]) == (name, code)
    for (label, low, _), read in zip(rows, frame["rows"], strict=True):
        assert read["label"] == label
        assert float(read["abs_min"]).hex() == low.hex()


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(plain, value))
    return value is None or type(value) in (str, int, float, bool)


def test_dict_has_the_fields_by_name() -> None:
    """The dict follows the records, with the numbers as they are."""
    data = REPORT.to_dict()
    assert data["frames"][1]["rows"][2]["abs_max"] == INF
    assert data["origins"][0]["frame"]["source"]["line"] == 109
    assert data["origins"][0]["what"] == "mul"


def test_dict_is_made_of_plain_containers() -> None:
    """The dict holds dicts, lists, strings and numbers only, as its docstring says."""
    assert plain(REPORT.to_dict())


# Notebooks.


class Tags(html.parser.HTMLParser):
    """Collects the elements and the text of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_escapes_everything_from_outside() -> None:
    """Code, names and labels of the user are text, whatever they hold."""
    hostile = "<script>alert('x')</script><img src=x onerror=alert(1)>&amp;"
    source = Source(f"/a/{hostile}.py", 1, hostile)
    frame = Frame(hostile, hostile, True, (Row(hostile, 0.0, INF), Row("x", note=hostile)), source)
    report = Report(0, (frame,), (Origin(frame, "inf", hostile, hostile),))
    document = Tags(report._repr_html_())
    assert document.tags <= {"pre", "table", "thead", "tbody", "tr", "th", "td"}
    assert hostile in document.text


def test_html_shows_the_verdict_and_the_table() -> None:
    """A notebook shows what was found and every number, as elements."""
    document = Tags(REPORT._repr_html_())
    assert {"pre", "table", "td"} <= document.tags
    assert f"mul in {BLOCK} made inf (modeling_t5.py:109)" in document.text
    assert "7.21e-06" in document.text


# Errors and records.


def test_errors_are_value_errors_of_one_family() -> None:
    """Code that catches ValueError, as for the original debugger, catches both errors."""
    for kind in (NonFiniteError, BatchLimitReached):
        assert issubclass(kind, FxguardError)
        assert issubclass(kind, ValueError)
    assert not issubclass(NonFiniteError, BatchLimitReached)


@pytest.mark.parametrize(
    "copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy]
)
def test_error_takes_its_report_along(copied: Any) -> None:
    """The error survives pickling, as between the processes of a launcher, with its report."""
    error = copied(NonFiniteError(REPORT.message, REPORT))
    assert type(error) is NonFiniteError
    assert str(error) == f"batch 0: mul in {BLOCK} made inf (modeling_t5.py:109)"
    assert error.report == REPORT
    assert str(error.report) == GOLDEN


@pytest.mark.parametrize("record", [REPORT, MUL, OVERFLOW, LINE, MUL.rows[0], Range(0.0, 1.0)])
def test_records_are_frozen_and_hashable(record: Any) -> None:
    """No field of a record can be changed; equal records are one key."""
    for field in dataclasses.fields(record):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field.name, None)
    assert not hasattr(record, "__dict__")
    assert len({record, dataclasses.replace(record)}) == 1
