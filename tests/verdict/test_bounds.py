"""Bounds of finite elements beside infinities, against the elements themselves."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxguard.plan.plan import Step, Value
from fxguard.records import Range, Role
from fxguard.verdict.bounds import Bounds

INF = math.inf
DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


class Chain:
    """Operations on a tensor that holds -inf, and the bounds of what they make."""

    def __init__(self, start: list[float], dtype: str) -> None:
        self.dtype = dtype
        self.tensors: list[Tensor] = []
        self.values: list[Value] = []
        self.fits = True  # whether all bounds hold
        self.turned = False  # whether an element turned infinite
        self.bounds = Bounds(self.values, self.finite_part)
        self.last = self.value(torch.tensor(start, dtype=DTYPES[dtype]), Role.INPUT)

    def value(self, tensor: Tensor, role: Role) -> int:
        self.tensors.append(tensor)
        self.values.append(Value(role, "x", str(tensor.dtype).removeprefix("torch.")))
        return len(self.values) - 1

    def finite_part(self, value: int) -> Range:
        size = self.tensors[value].double().abs()
        is_made = self.values[value].role is Role.MADE
        return Range(float(size.min()), INF if is_made else largest(self.tensors[value]))

    def apply(self, kind: str, other: Any = None, *, number_first: bool = False) -> bool:
        """Do one operation; False where its result is none that a bound is for."""
        function = {"div": operator.truediv, "pow": operator.pow}.get(kind, getattr(Tensor, kind))
        x = self.tensors[self.last]
        inputs, literals, arguments = [self.last], [], [x]
        finite = x.isfinite()
        if isinstance(other, Tensor):
            inputs.append(self.value(other, Role.INPUT))
            finite = finite & other.isfinite()
        elif other is not None:
            literals.append(float(other))
        if other is not None:
            arguments.append(other)
        if number_first:
            arguments.reverse()
        made = function(*arguments)
        if made.isnan().any() or not made.isinf().any():
            return False
        self.turned |= bool((made.isinf() & finite).any())
        before, self.last = self.last, self.value(made, Role.MADE)
        assert before in inputs
        step = Step(
            kind,
            "",
            tuple(inputs),
            (self.last,),
            literals=tuple(literals),
            number_first=number_first,
        )
        self.fits &= self.bounds.follow(step, self.last)
        return True


def largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.double().abs().max()) if finite.numel() else 0.0


NUMBERS = st.one_of(
    *(st.floats(-size, size, width=16) for size in (2.0, 60000.0)), st.sampled_from([0.5, 3.0, 1e4])
)
BINARY = ["add", "sub", "mul", "div", "maximum", "minimum"]
UNARY = ["neg", "abs", "exp", "square", "sqrt", "log", "reciprocal", "log_softmax", "half"]


@st.composite
def chains(draw: Any) -> Chain:
    count = draw(st.integers(2, 4))
    start = draw(st.lists(NUMBERS, min_size=count, max_size=count))
    start[draw(st.integers(0, count - 1))] = draw(st.sampled_from([-INF, INF]))
    chain = Chain(start, draw(st.sampled_from(sorted(DTYPES))))
    for _ in range(draw(st.integers(1, 6))):
        form = draw(st.sampled_from(["tensor", "number", "number first", "unary"]))
        if form == "unary":
            kind = draw(st.sampled_from(UNARY))
            go_on = chain.apply(kind, -1 if kind == "log_softmax" else None)
        elif form == "tensor":
            other = torch.tensor(
                draw(st.lists(NUMBERS, min_size=count, max_size=count)), dtype=DTYPES[chain.dtype]
            ).to(chain.tensors[chain.last].dtype)
            go_on = chain.apply(draw(st.sampled_from(BINARY)), other)
        elif form == "number":
            go_on = chain.apply(draw(st.sampled_from([*BINARY[:4], "pow"])), draw(NUMBERS))
        else:
            go_on = chain.apply(
                draw(st.sampled_from(["div", "pow"])), draw(NUMBERS), number_first=True
            )
        if not go_on or not chain.fits:
            break
    return chain


@settings(deadline=None, max_examples=500)
@given(chains())
def test_no_finite_element_is_larger_than_its_bound(chain: Chain) -> None:
    """Whatever the operations: the bound is one, and where it fits nothing has turned infinite."""
    if chain.values[chain.last].role is Role.MADE and chain.fits:
        assert largest(chain.tensors[chain.last]) <= chain.bounds.of(chain.last)
    assert not (chain.turned and chain.fits)


@settings(deadline=None, max_examples=200)
@given(chains())
def test_numbers_within_the_limits_keep_the_bounds(chain: Chain) -> None:
    """The limits hold the numbers that they were made of, and what a later batch may have."""
    limits = chain.bounds.limits()
    if not chain.fits:
        assert limits is None
        return
    assert limits is not None
    for value, known in chain.bounds.numbers.items():
        assert limits[value].abs_min <= known.abs_min
        assert known.abs_max <= limits[value].abs_max


@pytest.mark.parametrize(
    ("number", "is_healthy"), [(1e30, True), (1e36, True), (1e38, False), (1e39, False)]
)
def test_the_bound_of_a_product_is_the_product(number: float, is_healthy: bool) -> None:
    """A factor fits as long as the largest finite element times it does."""
    chain = Chain([1.0, -100.0, -INF], "float32")
    assert chain.apply("mul", number)
    assert chain.fits is is_healthy


@pytest.mark.parametrize(("number", "is_healthy"), [(200.0, True), (300.0, False)])
def test_the_bound_of_a_power_is_the_power(number: float, is_healthy: bool) -> None:
    """Of the largest finite element: float16 holds 4e4, and not 9e4."""
    chain = Chain([number, -1.0, -INF], "float16")
    assert chain.apply("pow", 2.0)
    assert chain.fits is is_healthy is not chain.turned


@pytest.mark.parametrize("number_first", [False, True])
def test_the_number_of_a_power_is_rounded(number_first: bool) -> None:
    """bfloat16 makes 1.703125 of 1.7, and 1.7 to the power of 20 is 3 % more then."""
    chain = Chain([20.0 if number_first else 1e20, -INF, INF][:2], "bfloat16")
    assert chain.apply("abs")
    assert chain.apply("pow", 1.7, number_first=number_first)
    assert largest(chain.tensors[chain.last]) <= chain.bounds.of(chain.last)


@pytest.mark.parametrize(("number", "is_healthy"), [(3e4, True), (4e4, False)])
def test_the_bound_of_a_log_softmax_is_twice_the_largest(number: float, is_healthy: bool) -> None:
    """It is reached where one element has the sign of the other: float16 holds 6e4, and not 8e4."""
    chain = Chain([number, -number, -INF], "float16")
    assert chain.apply("log_softmax", -1)
    assert chain.fits is is_healthy is not chain.turned


def test_room_is_left_for_later_batches() -> None:
    """Numbers may be 64 times as large at least, where the limit is far away."""
    chain = Chain([1.0, -INF], "float16")
    for _ in range(24):
        chain.apply("add", torch.tensor([10.0, 10.0], dtype=torch.float16))
    limits = chain.bounds.limits()
    assert limits is not None
    assert all(limits[value].abs_max >= 64 * x.abs_max for value, x in chain.bounds.numbers.items())
