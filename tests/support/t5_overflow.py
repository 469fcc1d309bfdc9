"""The report of the overflow in T5 that the specification shows, and its text, written by hand."""

from __future__ import annotations

import dataclasses
import math

from fxguard.findings import Climb, Fix, Origin
from fxguard.records import Frame, Row, Source
from fxguard.types import Report

INF = math.inf

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
    cause="overflow",
    operands="at [0, 3, 17]: 454.2 * 485.1",
    fixes=(
        Fix("tried", "keep `DenseReluDense` in float32: finite, error 2e-3"),
        Fix("advice", "bfloat16"),
    ),
)
REPORT = Report(0, (WI_1, MUL), (OVERFLOW,))

VERDICT = """\
mul in encoder.block.0.layer.1.DenseReluDense made inf and -inf (modeling_t5.py:109): overflow
  modeling_t5.py:109: hidden_states = hidden_gelu * hidden_linear
  at [0, 3, 17]: 454.2 * 485.1
  fix: keep `DenseReluDense` in float32: finite, error 2e-3 (tried)
  or: bfloat16 (advice)
  it needs 2.203e+05, 3.36 times what float16 holds (65504)
  where the magnitude grew most on the way:
    4.07e+00 -> 4.74e+01  encoder.block.0.layer.1.layer_norm mul
    4.74e+01 -> 4.85e+02  encoder.block.0.layer.1.DenseReluDense.wi_1 linear  (modeling_t5.py:108)
  output: 0 NaN, 2 +inf, 1 -inf of 6144 elements; largest finite magnitude 6.547e+04
  it spread to encoder.block.0.layer.1.DenseReluDense.dropout dropout, encoder.block.0.layer.1.DenseReluDense.wo linear and 342 more; the model returned it
  it read input[0] up to 4.54e+02, input[1] up to 4.85e+02
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
