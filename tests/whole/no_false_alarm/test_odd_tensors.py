"""What is no fault though it looks like one: experts without tokens, integers, casts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fxguard
from support.odd_tensors import POSITIVE, QUIET, SMALL, Case, Experts, Model, check
from support.ways import WAYS, assert_same_bits, prepared, the_way

pytestmark = QUIET


@pytest.mark.parametrize("way", WAYS)
def test_an_expert_without_tokens_is_no_fault(way: str) -> None:
    """Nobody chose the last expert: its rows are empty, and its frames say so."""
    with the_way(way):
        model = fxguard.instrument(Model(Experts))
        prepared(model, way)(SMALL)
    unused = [f for f in fxguard.guard_of(model).frames() if f.name == "odd.experts.2"]
    assert [(row.label, row.note) for row in unused[-1].rows[2:]] == [
        ("input[0]", "empty"),
        ("output", "empty"),
    ]


def wrapping(x: Tensor) -> Tensor:
    whole = x.to(torch.int32) * 2**30 * 4
    return whole.float() / x


def quantized_returned(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(torch.log(x), 0.1, 0, torch.qint8)


def cast_to_e4m3fn(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float() * 2


@pytest.mark.parametrize("way", WAYS)
def test_integers_that_wrap_around_are_no_report(way: str) -> None:
    """Integer overflow is silent in torch and out of scope; a float made of it is checked."""
    assert wrapping(POSITIVE).eq(0).all()  # 2**32 and its multiples
    check(Case(wrapping, POSITIVE, SMALL, "div", "nan"), way)


@pytest.mark.parametrize("way", WAYS)
def test_what_quantizing_swallows_is_a_note(way: str) -> None:
    """Integers hold no infinity: one that was quantized reaches no output, and is not reported."""
    with the_way(way):
        model = fxguard.instrument(Model(quantized_returned))
        guarded = prepared(model, way)
        for x, notes in ((POSITIVE, []), (POSITIVE * 0, ["log"])):
            assert_same_bits(guarded(x), quantized_returned(x))
            assert [note.what for note in fxguard.guard_of(model).notes] == notes


@pytest.mark.parametrize("way", WAYS)
def test_what_a_cast_to_e4m3fn_makes_is_what_counts(way: str) -> None:
    """Versions of torch differ in whether this cast saturates: there is a report where it does not.

    The dtype has no infinity; a NaN that comes to it stays one, and keeps its cause.
    """
    large = SMALL * 1e5
    with the_way(way):
        reports: list[fxguard.types.Report] = []
        model = fxguard.instrument(Model(cast_to_e4m3fn), on_detect=reports.append)
        guarded = prepared(model, way)
        for x in (SMALL, large, torch.log(-POSITIVE)):
            assert_same_bits(guarded(x), cast_to_e4m3fn(x))
    *overflow, given = [report.origins[0].what for report in reports]
    assert overflow == (["to"] if cast_to_e4m3fn(large).isnan().any() else [])
    assert given.startswith(("argument `", "input["))
