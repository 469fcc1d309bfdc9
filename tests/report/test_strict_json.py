"""Reports as plain data and as JSON, read by a parser that knows no extension of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fxguard.findings import Origin
from fxguard.records import Frame, Row, Source
from fxguard.report.load import load_report
from fxguard.report.strict_json import strict_json
from fxguard.types import Report
from support.t5_overflow import MUL, OVERFLOW, REPORT, WI_1

INF, NAN = math.inf, math.nan


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
            "mask": False,
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


magnitudes = st.floats(min_value=0) | st.just(NAN)


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


def test_dict_says_what_the_report_comes_to() -> None:
    """Beside the fields of the records, the phase and the fix; loading leaves those out."""
    data = REPORT.to_dict()
    assert (data["phase"], data["fix"]) == (REPORT.phase, REPORT.fix)
    [origin] = data["origins"]
    assert origin["cause"] == "overflow"
    assert origin["operands"] == "at [0, 3, 17]: 454.2 * 485.1"
    fix = {"kind": "advice", "text": "bfloat16", "rewrites": [], "at": None, "of": ""}
    fix |= {"tries": [], "then": ""}
    assert origin["fixes"][1] == fix


def test_reports_of_earlier_versions_can_be_read(tmp_path: Path) -> None:
    """What they did not know is unknown."""
    data = REPORT.to_dict()
    for name in ("cause", "operands", "turn", "harm", "fixes", "not_judged"):
        del data["origins"][0][name]
    path = tmp_path / "report.json"
    path.write_text(strict_json(data))
    loaded = load_report(path)
    assert loaded.origins[0].cause == "unknown"
    assert loaded.fix == ""
    path.write_text(REPORT.to_json())
    assert load_report(path) == REPORT
