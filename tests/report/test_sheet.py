"""What a page is made of: every number as text, and what follows from it, decided in Python."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxguard.formats import FORMATS, headroom
from fxguard.records import Frame, Row
from fxguard.report.page import SCRIPTS
from fxguard.report.sheet import Sheet, page_data
from fxguard.report.text import row_text

INF, NAN = math.inf, math.nan
F16 = FORMATS["float16"].max

magnitudes = st.floats(min_value=0) | st.just(NAN)
rows = st.builds(
    Row,
    label=st.sampled_from(["weight", "input[0]", "output", "output[1]", "output_scale"]),
    abs_min=st.none() | magnitudes,
    abs_max=st.none() | magnitudes | st.just(F16),
    note=st.sampled_from(["", "empty", "not a tensor"]),
    dtype=st.sampled_from(["", "float16", "bfloat16", "int64"]),
)
frames = st.builds(
    Frame,
    name=st.sampled_from(["", "head"]),
    kind=st.just("mul"),
    is_op=st.booleans(),
    rows=st.lists(rows, max_size=4).map(tuple),
)


def output(high: float, dtype: str = "float16") -> Frame:
    return Frame("head", "mul", True, (Row("output", 0.0, high, dtype=dtype),))


def resolved(data: dict[str, Any], number: int) -> list[Any]:
    """The rows of a sheet without references, as the script of the page finds them."""
    found: list[Any] = []
    for index, row in enumerate(data["sheets"][number]["rows"]):
        if not isinstance(row, int):
            found.append(row)
        else:
            found.append(found[index - row] if row else resolved(data, number - 1)[index])
    return found


@settings(deadline=None)
@given(st.lists(st.lists(frames, max_size=4), min_size=1, max_size=3))
def test_rows_are_those_of_the_text(batches: list[list[Frame]]) -> None:
    """Whatever rows refer to, each one reads as it does in the classic frames."""
    sheets = [Sheet(str(number), each) for number, each in enumerate(batches)]
    data = json.loads(json.dumps(page_data(sheets), allow_nan=False))
    for number, batch in enumerate(batches):
        rows = [row for frame in batch for row in frame.rows]
        for row, shown in zip(rows, resolved(data, number), strict=True):
            columns = f"{shown:>17}" if isinstance(shown, str) else "{:>8} {:>8}".format(*shown)
            assert f"{columns} {row.label}" == row_text(row)


@settings(deadline=None)
@given(st.lists(frames, max_size=4))
def test_headroom_is_the_least_of_the_outputs(batch: list[Frame]) -> None:
    """Of floating-point outputs only, masks aside; one that is bad has none at all."""
    data = page_data([Sheet("0", batch)])
    [plan], [sheet] = data["plans"], data["sheets"]
    for frame, places, bits in zip(batch, plan["outputs"], sheet["headroom"], strict=True):
        outputs = [frame.rows[place] for place in places]
        assert {row.label for row in outputs} <= {"output", "output[1]"}
        assert not {row.dtype for row in outputs} & {"int64"}
        known = [row for row in outputs if row.abs_max is not None]
        if any(row.is_bad for row in known):
            assert bits == "bad"
            continue
        room = [headroom(row.dtype, row.abs_max) for row in known if row.abs_max is not None]
        least = min(room, default=INF)
        assert bits == (None if math.isinf(least) else round(least, 1))


def test_masks_are_marked_where_they_stand() -> None:
    """The largest number of the row's own dtype, on either side of a comparison."""
    ours = [output(F16), output(F16, "float32"), output(1.0)]
    theirs = [[Row("output", 0.0, x, dtype="float32")] for x in (F16, FORMATS["float32"].max)]
    [sheet] = page_data([Sheet("0", ours, other=[*theirs, [None]])])["sheets"]
    assert sheet["masks"] == [0]
    assert sheet["other_masks"] == [1]


def test_of_two_traces_the_smaller_headroom_counts() -> None:
    """Each side by its own dtype; the page shows both."""
    ours = [output(4094.0), output(1.0, "float32"), output(1.0, "float32")]
    sides = (Row("output", 0.0, 1.0, dtype="float32"), Row("output", 0.0, 8188.0, dtype="float16"))
    theirs = [[sides[0]], [sides[1]], [Row("output", NAN, NAN, dtype="float16")]]
    data = page_data([Sheet("0", ours, other=theirs)])
    assert data["sheets"][0]["headroom"] == [4.0, 3.0, "bad"]
    assert data["plans"][0]["dtypes"] == ["float16 / float32", "float32 / float16"]
    assert data["used"] == ["float32", "float16"]


def test_changes_are_doublings_from_the_median() -> None:
    """The lower one of two medians; what nobody measured has none; a NaN is beyond everything."""
    batches = [[2.0, 0.0, 1.0], [2.0, 0.0, NAN], [32.0, 3.0, 0.25], [1.0, 0.0, 1.0]]
    sheets = [Sheet("", [output(x) for x in batch]) for batch in batches]
    found = [sheet["changes"] for sheet in page_data(sheets)["sheets"]]
    assert found == [[0, 0, 0], [0, 0, "inf"], [4.0, "inf", -2.0], [-1.0, 0, 0]]
    silent = Frame("head", "mul", True, (Row("output", note="empty", dtype="float16"),))
    pair = [Sheet("0", [silent, output(0.0)]), Sheet("1", [silent, output(3.0)])]
    assert [sheet["changes"] for sheet in page_data(pair)["sheets"]] == [[None, 0], [None, "inf"]]


@pytest.mark.parametrize(
    "sheets",
    [
        [Sheet("0", [output(1.0)])],
        [Sheet("0", [output(1.0)]), Sheet("1", [output(1.0), output(1.0)])],
        [Sheet(str(i), [output(1.0)], other=[[None]]) for i in range(2)],
    ],
)
def test_changes_need_batches_with_the_same_frames(sheets: list[Sheet]) -> None:
    """One batch has no others, and two traces are compared with each other."""
    assert not any("changes" in sheet for sheet in page_data(sheets)["sheets"])


def test_the_script_knows_no_rule() -> None:
    """It tests no label and no dtype, and holds no limit: Python has done so."""
    files = resources.files("fxguard.report.page")
    scripts = "\n".join(files.joinpath(name).read_text("utf-8") for name in SCRIPTS)
    for rule in ("startsWith", '"output', '"input[', "0.99999", "1e-5", "u?int", "toExponential(2"):
        assert rule not in scripts
