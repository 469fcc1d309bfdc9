"""Two runs of the same training: the first number in which they differ."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

import fxguard
from fxguard.history._series import Row, Series
from fxguard.history._writer import Writer
from fxguard.history.divergence import Divergence, compare_histories
from support.command_line import status
from support.needs import needs
from support.schema import told

needs("pyarrow")

Printed = pytest.CaptureFixture[str]
NAMES = ("input x", "matmul", "softmax", "loss", "seconds")
SERIES = [
    Series(f"{name} a.py:{i}", "time" if name == "seconds" else "operation", name, f"a.py:{i}", i)
    for i, name in enumerate(NAMES)
]


def write(
    folder: Path,
    steps: range,
    number: Callable[[int, str], float] = lambda step, name: step + 1.0,
    series: list[Series] = SERIES,
) -> Path:
    writer = Writer(folder, about={})
    for one in series:
        writer.register(one)
    for step in steps:
        numbers = [number(step, one.what) for one in series]
        writer.add(Row(step, [x / 2 for x in numbers], numbers))
    writer.close()
    return folder


def found(a: Path, b: Path, tolerance: float = 1e-6) -> Divergence:
    return compare_histories(fxguard.load_history(a), fxguard.load_history(b), tolerance)


def test_the_first_in_order_of_execution_in_the_first_step(tmp_path: Path, capsys: Printed) -> None:
    """Not the largest, nor the one that was registered first; with both numbers."""
    a = write(tmp_path / "a", range(100))

    def other(step: int, name: str) -> float:
        factor = {"softmax": 1.001, "loss": 7.0, "input x": 5.0}.get(name, 1.0)
        begin = 60 if name != "input x" else 61
        return (step + 1.0) * (factor if step >= begin else 1.0)

    b = write(tmp_path / "b", range(100), other, SERIES[::-1])
    result = found(a, b)
    assert result.first is not None
    assert (result.first.series.what, result.first.step) == ("softmax", 60)
    assert result.first.a == (30.5, 61.0)
    assert result.first.b == pytest.approx((30.5305, 61.061))
    assert [each.series.what for each in result.apart] == ["softmax", "loss", "input x"]
    assert (result.differs, result.agrees) == (True, False)
    assert status("history", str(a), str(b)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"A: {a}", f"B: {b}"]
    assert lines[3:] == [
        "they part at step 60: softmax a.py:2",
        "  largest: 61 in A, 61.061 in B, 1.0e-03 apart",
        "  smallest: 30.5 in A, 30.5305 in B, 1.0e-03 apart",
        "  in the same step, after it: loss a.py:3",
        "  the 60 steps before agree to 1e-06; 3 of 4 series part",
    ]


def test_the_same_numbers_agree(tmp_path: Path, capsys: Printed) -> None:
    """But for noise in the last bits, and for the time that a step took."""
    a = write(tmp_path / "a", range(50))
    b = write(
        tmp_path / "b",
        range(50),
        lambda step, name: (step + 1.0) * (9.0 if name == "seconds" else 1 + 1e-8),
    )
    assert found(a, b).agrees
    assert found(a, a).agrees
    assert status("history", str(a), str(b)) == 0
    assert "they agree in steps 0 to 49: 4 series, to 1e-06" in capsys.readouterr().out
    assert status("history", str(a), str(b), "--tolerance", "1e-9") == 1


def test_two_runs_that_have_no_step_in_common(tmp_path: Path, capsys: Printed) -> None:
    a, b = write(tmp_path / "a", range(50)), write(tmp_path / "b", range(60, 90))
    assert not found(a, b).agrees
    assert status("history", str(a), str(b)) == 2
    assert "nothing to compare: no series has a step that is in both" in capsys.readouterr().out


def test_they_are_compared_from_the_first_common_step(tmp_path: Path) -> None:
    a = write(tmp_path / "a", range(50))
    b = write(tmp_path / "b", range(20, 90), lambda step, name: step + 1.0 + (step > 40))
    result = found(a, b)
    assert result.steps is not None
    assert result.steps[0] == 20
    assert result.first is not None
    assert result.first.step == 41


def test_a_series_that_only_one_has_is_named(tmp_path: Path, capsys: Printed) -> None:
    """It is no difference of numbers."""
    a, b = write(tmp_path / "a", range(50)), write(tmp_path / "b", range(50), series=SERIES[1:])
    assert status("history", str(a), str(b)) == 0
    assert "  only in A: input x a.py:0" in capsys.readouterr().out


def test_a_longer_run_has_kept_less_of_the_same_steps(tmp_path: Path) -> None:
    """Sixteen steps are one row there: their extremes are compared."""
    a = write(tmp_path / "a", range(4_500))

    def other(step: int, name: str) -> float:
        return step + 1.0 + (name == "softmax" and step >= 35) * 1e6

    b, c = write(tmp_path / "b", range(9_000)), write(tmp_path / "c", range(9_000), other)
    assert found(a, b).agrees
    first = found(a, c).first
    assert first is not None
    assert first.series.what == "softmax"
    assert first.step <= 35 <= first.last_step < 48


@pytest.mark.parametrize("worse", [float("inf"), 0.0])
def test_an_infinity_and_a_zero_differ_from_numbers(tmp_path: Path, worse: float) -> None:
    a = write(tmp_path / "a", range(50))
    b = write(tmp_path / "b", range(50), lambda step, name: worse if step == 30 else step + 1.0)
    first = found(a, b).first
    assert first is not None
    assert (first.step, first.series.what) == (30, "input x")


def test_what_one_has_not_measured_is_not_compared(tmp_path: Path) -> None:
    a = write(tmp_path / "a", range(50))
    b = write(
        tmp_path / "b", range(50), lambda step, name: step + 1.0 if step % 10 == 0 else float("nan")
    )
    result = found(a, b)
    assert result.agrees
    assert result.compared == 4 * 5


def test_the_record(tmp_path: Path, capsys: Printed) -> None:
    """Strict JSON that the schema describes."""
    a = write(tmp_path / "a", range(50))
    b = write(tmp_path / "b", range(30, 50), lambda step, name: float("inf"))
    for other in (a, b):
        status("history", str(a), str(other), "--json", "-")
        record = json.loads(capsys.readouterr().out)
        assert told("Divergence", record) == told("", record) == []
        assert record["differs"] == (other is b)
        assert json.loads(found(a, other).to_json()) == record


def test_nan_in_one_run_alone(tmp_path: Path) -> None:
    """It is a number that differs; where both have it, they agree."""

    def bad(step: int, name: str) -> float:
        return math.inf if step == 40 and name == "matmul" else step + 1.0

    folders = [write(tmp_path / "a", range(50)), tmp_path / "b", tmp_path / "c"]
    for folder in folders[1:]:
        writer = Writer(folder, about={})
        for one in SERIES:
            writer.register(one)
        for step in range(50):
            high = [bad(step, one.what) for one in SERIES]
            writer.add(Row(step, [math.nan if x == math.inf else x / 2 for x in high], high))
        writer.close()
    result = found(*folders[:2])
    assert result.first is not None
    assert (result.first.step, result.first.series.what) == (40, "matmul")
    assert result.verdict[1] == "  largest: 41 in A, inf in B, inf apart"
    assert found(*folders[1:]).agrees
