"""Tensors that are not dense float32 ones are checked like others.

Every protection is taken away once, to show that the check fails.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fxguard.capture import backend
from fxguard.measure import eager, traceable, ways
from support.odd_tensors import BY_NAME, QUIET, Case, Model, check
from support.subclasses import (
    QuantizedByFunction,
    replaced_inside,
    tagged_given,
    tagged_inside,
)
from support.ways import AOT, EAGER, PYTHON, WAYS, prepared, the_way

pytestmark = QUIET


RUNS = [
    pytest.param(
        *(case, way),
        id=f"{name}-{way}",
        marks=[pytest.mark.campaign] if way == AOT and place % 4 else [],
    )
    for place, (name, case) in enumerate(BY_NAME.items())
    for way in WAYS
    if way not in case.refused
]
REFUSED = [
    pytest.param(case, way, id=f"{name}-{way}")
    for name, case in BY_NAME.items()
    for way in case.refused
]


@pytest.mark.sampled
@pytest.mark.parametrize(("case", "way"), RUNS)
def test_odd_tensors_are_checked_like_others(case: Case, way: str) -> None:
    """The bits are those of the plain model; what turned bad is blamed, counted and located."""
    origin = check(case, way).origins[0]
    if case.function is not QuantizedByFunction:  # its graph is not run again
        assert origin.numel is not None
        assert origin.nan_count + origin.posinf_count + origin.neginf_count > 0
    if not isinstance(case.function, type) and case.function not in (
        *(tagged_given, tagged_inside, replaced_inside),  # the subclass's own line is the last one
    ):
        lines, first = inspect.getsourcelines(case.function)
        assert first < origin.frame.source.line < first + len(lines)


@pytest.mark.parametrize(("case", "way"), REFUSED)
def test_what_torch_refuses_is_refused_without_fxguard(case: Case, way: str) -> None:
    """The table's gaps are torch's own: the plain model fails in the same way."""
    with the_way(way), pytest.raises(TypeError, match="Multiple dispatch failed"):
        prepared(Model(case.function), way)(case.clean)


@pytest.mark.sampled
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("way", [EAGER, AOT])
@pytest.mark.parametrize("name", ["chosen_by_nonzero", "chosen_by_mask", "Experts"])
def test_sizes_known_only_at_run_time(name: str, way: str, capture: bool) -> None:
    """Captured in one graph or left between two, tensors of any number of elements are checked."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=capture):
        check(BY_NAME[name], way)


# Every protection taken away once.


def not_measured(value: Any) -> Any:
    return traceable.mark(traceable.NO_DATA, torch.device("cpu"))


def as_float32(pairs: Any, collect: Any = traceable.collect) -> Tensor:
    return collect(pairs).float()


def by_modulus_alone(dense: Tensor) -> Tensor:
    return dense.abs()


def as_it_is(value: Tensor) -> Tensor:
    return value.detach()


MISSED = (AssertionError, "not reported")
PROTECTIONS = [  # where it stands, what is put in its place, a case that then fails, and how
    (traceable, "CONVERTED", {}, "float8_e5m2", (AssertionError, "^float in odd made inf")),
    (traceable, "CONVERTED", {}, "float8_returned", MISSED),
    (traceable, "CONVERTED", {}, "float8_e4m3fnuz", (AssertionError, "^float in odd made NaN")),
    (
        traceable,
        "CONVERTED",
        {},
        "complex32_cast",
        (AssertionError, "^view_as_real in odd made inf"),
    ),
    (traceable, "COMPLEX", (), "complex64_fft", (AssertionError, "^getattr in odd made NaN")),
    (
        traceable,
        "COMPLEX",
        (),
        "complex64_square",
        (AssertionError, "^view_as_real in odd made inf"),
    ),
    (traceable, "FLOATS", (), "float16_product", MISSED),
    (traceable, "FLOATS", (), "bfloat16_product", MISSED),
    (traceable, "FLOATS", (), "float64_to_float32", MISSED),
    (
        traceable,
        "collect",
        as_float32,
        "float64_beyond_float32",
        (AssertionError, "^false alarm: "),
    ),
    (
        traceable,
        "magnitudes",
        by_modulus_alone,
        "complex64_near_the_top",
        (AssertionError, "^false alarm: "),
    ),
    (traceable, "numbers", as_it_is, "coo_elementwise", (AssertionError, "^to_dense in odd")),
    (traceable, "numbers", as_it_is, "csr_elementwise", (AssertionError, "^to_dense in odd")),
    (traceable, "numbers", as_it_is, "jagged_given", MISSED),
    *(
        (place, "abs_min_max", not_measured, case, MISSED)
        for place in (traceable, eager)
        for case in ("elementwise", "jagged_made_inside", "chosen_by_mask")
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("place", "name", "instead", "case", "failure"),
    [pytest.param(*row, id=f"{row[0].__name__[8:]}.{row[1]}-{row[3]}") for row in PROTECTIONS],
)
def test_without_its_protection_the_check_fails(
    place: Any,
    name: str,
    instead: Any,
    case: str,
    failure: tuple[type[Exception], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each line of the table above is what its case is a test of, and fails as it says."""
    monkeypatch.setattr(place, name, instead)
    if place is eager:
        way_with = replace(ways.EAGER, **{name: instead}, in_memory=None)
        monkeypatch.setitem(ways.WAYS, "eager", way_with)
    elif name in ("abs_min_max", "collect"):  # graphs are given the functions of a way
        monkeypatch.setattr(backend, "TRACEABLE", replace(ways.TRACEABLE, **{name: instead}))
    way = EAGER if place is eager else PYTHON if name == "numbers" else AOT
    with pytest.raises(failure[0], match=failure[1]):
        check(BY_NAME[case], way)


@pytest.mark.parametrize("name", ["chosen_by_nonzero", "chosen_by_mask"])
def test_without_sizes_of_run_time_being_told_apart_the_check_fails(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether such a tensor is empty is no question to ask while it is traced."""
    monkeypatch.setattr(traceable, "_known_only_at_run_time", lambda size: False)
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Could not guard on data"),
    ):
        check(BY_NAME[name], AOT)
