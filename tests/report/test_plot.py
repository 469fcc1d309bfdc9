"""The chart of a batch in matplotlib."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch
from matplotlib.axes import Axes

import fxguard
from fxguard.types import Frame, Row, Trace, TracedBatch

mpl.use("Agg")

from matplotlib import pyplot as plt


def frame(index: int, low: float, high: float, dtype: str = "float16") -> Frame:
    rows = (Row("input[0]", 9.0, 9e9, dtype=dtype), Row("output", low, high, dtype=dtype))
    return Frame(f"layers.{index}", "mul", True, rows)


FRAMES = (
    frame(0, 0.5, 10.0),
    frame(1, 0.0, 20.0),
    frame(2, 0.25, math.inf),
    frame(3, math.nan, math.nan),
    Frame("layers.4", "split", True, (Row("output", note="not measured"),)),
    frame(5, 1.0, 30.0),
)


@pytest.fixture(autouse=True)
def closed() -> Any:
    yield
    plt.close("all")


def trace_of(*batches: TracedBatch) -> Trace:
    return Trace("Net", None, "2.13.0", batches)


def lines(ax: Axes) -> dict[str, list[float]]:
    """What was drawn, by label."""
    return {
        str(line.get_label()): [float(y) for y in line.get_ydata()]
        for line in ax.get_lines()
        if not str(line.get_label()).startswith("_")
    }


def test_the_ranges_of_outputs() -> None:
    """Over depth, on a logarithmic axis; what has no place there is marked at its edges."""
    ax = trace_of(TracedBatch(3, FRAMES)).plot()
    nan = math.nan
    drawn = lines(ax)
    assert drawn["abs max"] == pytest.approx([10, 20, nan, nan, nan, 30], nan_ok=True)
    assert drawn["abs min"] == pytest.approx([0.5, nan, 0.25, nan, nan, 1], nan_ok=True)
    places = {str(line.get_label()): list(line.get_xdata()) for line in ax.get_lines()}
    assert (places["inf"], places["NaN"], places["abs min is 0"]) == ([2], [3], [1])
    assert ax.get_yscale() == "log"
    assert ax.get_title("left") == "Net, batch 3"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_limits(dtype: str) -> None:
    """Lines at the largest and the smallest normal number of the dtypes."""
    ax = trace_of(TracedBatch(0, (frame(0, 0.5, 2.0, dtype),))).plot()
    levels = {line.get_ydata()[0] for line in ax.get_lines()}
    info = torch.finfo(getattr(torch, dtype))
    assert {info.max, info.smallest_normal} <= levels
    ax.figure.canvas.draw()


def test_which_batch() -> None:
    """The one that is named, else the first with a detection, else the first; into given axes."""
    trace = trace_of(TracedBatch(3, FRAMES), TracedBatch(4, FRAMES[:2], verdict=("mul made inf",)))
    ax = plt.subplots()[1]
    assert trace.plot(3, ax) is ax
    assert ax.get_title("left") == "Net, batch 3"
    assert trace.plot().get_title("left") == "Net, batch 4"
    with pytest.raises(fxguard.FxguardError, match="no batch 9 in this trace; it has 3, 4"):
        trace.plot(9)


def test_a_real_model(tmp_path: Path) -> None:
    """Is written as a picture, names with a dollar sign too."""
    odd = torch.nn.ModuleDict({"a$b$": torch.nn.Linear(4, 4), "_c": torch.nn.Linear(4, 4)})
    model = torch.nn.Sequential(odd["a$b$"], torch.nn.Tanh(), odd["_c"])
    model.add_module("$x_", torch.nn.Linear(4, 4))
    fxguard.instrument(model, trace_batch_nums=[0], trace_to=tmp_path)(torch.randn(2, 4))
    ax = fxguard.load_trace(tmp_path / "Sequential-0.jsonl").plot()
    ax.figure.savefig(tmp_path / "ranges.png")
    assert (tmp_path / "ranges.png").stat().st_size > 10_000


def test_without_matplotlib() -> None:
    """What to install is said; nothing else needs it."""
    program = (
        "import sys; sys.modules['matplotlib'] = None; import fxguard\n"
        "try: fxguard.types.Trace('Net', None, '', (fxguard.types.TracedBatch(0, ()),)).plot()\n"
        "except fxguard.FxguardError as error: print(error)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "plot draws with matplotlib: pip install matplotlib\n"
