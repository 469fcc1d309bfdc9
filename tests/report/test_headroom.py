"""How near outputs came to the limits of their dtypes."""

from __future__ import annotations

import math

from fxguard.formats import FORMATS
from fxguard.records import Frame, Row
from fxguard.report.headroom import headroom_of, nearest, outputs_with_limits

INF, NAN = math.inf, math.nan


def frame(*rows: Row) -> Frame:
    return Frame("head", "mul", True, rows)


def made(high: float | None, dtype: str = "float16", label: str = "output") -> Row:
    return Row(label, 0.0, high, dtype=dtype)


def test_integers_have_no_limit_to_leave() -> None:
    """Nor have what was read and what a parameter holds."""
    kept = [made(1.0), made(2.0, "bfloat16", "output[1]"), made(3.0, "complex64", "output[2]")]
    others = [made(1.0, dtype) for dtype in ("int64", "uint8", "bool")]
    others += [made(1.0, label=label) for label in ("weight", "input[0]", "output_scale")]
    assert outputs_with_limits(frame(*others, *kept)) == kept


def test_the_least_headroom_counts() -> None:
    """Without numbers there is none to know; with an inf or a NaN there is none."""
    assert headroom_of([made(4094.0), made(8188.0), made(None), made(0.0)]) == 3.0
    assert headroom_of([made(None)]) == headroom_of([]) == INF
    for bad in (INF, NAN):
        assert headroom_of([made(1.0), made(bad)]) == -INF


def test_the_nearest_output() -> None:
    """The first of several; bad numbers, masks and inputs are not near to a limit."""
    mask = made(FORMATS["float16"].max)
    frames = [
        frame(made(60000.0, label="input[0]"), made(1.0)),
        frame(mask, made(INF, label="output[1]"), made(8188.0, label="output[2]")),
        frame(made(8188.0)),
    ]
    found = nearest(frames)
    assert found is not None
    assert (found.frame, found.row.label, found.bits) == (frames[1], "output[2]", 3.0)
    assert nearest([frame(mask), frame(made(NAN)), frame(made(1.0, "int64"))]) is None
