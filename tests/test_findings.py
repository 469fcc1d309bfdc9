"""What an origin is, and how it is called."""

from __future__ import annotations

import math

import pytest

from fxguard.findings import Origin
from fxguard.records import Frame, Role, Row
from support.t5_overflow import LINE

NAN = math.nan


@pytest.mark.parametrize(
    ("what", "role", "message"),
    [
        ("mul", Role.MADE, "mul in head made NaN (modeling_t5.py:109)"),
        ("weight head.weight", Role.WEIGHT, "weight head.weight holds NaN"),
        ("buffer head.mean", Role.BUFFER, "buffer head.mean holds NaN"),
        ("constant _tensor_constant0", Role.CONSTANT, "constant _tensor_constant0 holds NaN"),
        ("argument `x` of Net.forward", Role.INPUT, "argument `x` of Net.forward: 3 NaN"),
        ("input `self.scale`", Role.INPUT, "input `self.scale`: 3 NaN"),
        ("input[0] of mul", Role.INPUT, "input[0] of mul: 3 NaN"),
        ("weight_norm", Role.MADE, "weight_norm in head made NaN (modeling_t5.py:109)"),
        ("argument_sort", Role.MADE, "argument_sort in head made NaN (modeling_t5.py:109)"),
    ],
)
def test_what_an_origin_is(what: str, role: Role, message: str) -> None:
    """Only an operation has a line; what was given to the model is counted where it is known."""
    frame = Frame("head", "mul", True, (Row("output", NAN, NAN),), LINE)
    origin = Origin(frame, "nan", what, "output", numel=4, nan_count=3)
    assert origin.role is role
    assert origin.message == message
    assert origin.is_operation is (role is Role.MADE)
    assert origin.standing == (what.split()[0] if role.is_standing else "")
