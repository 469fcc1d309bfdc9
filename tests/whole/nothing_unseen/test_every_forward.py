"""Whatever TorchDynamo does with a model, every forward of it is checked, as one whole batch.

What protects from a forward that nobody checks is taken away once, to show that the check fails.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.batch import module_hooks, observer
from fxguard.guard import recorder
from fxguard.guard.guard import GuardedModel
from support.cut_models import (
    CASES,
    CUT,
    MODES,
    check,
)
from support.ways import AOT, EAGER, PYTHON, WAYS

SAMPLE = ["shared", "returns early by value", "recursive", "aliases between", "autocast inside"]


def runs(rows: Iterable[tuple[str, ...]]) -> list[Any]:
    """Test parameters; what is out of the sample waits for the campaign."""
    return [
        pytest.param(
            *row,
            id="-".join(row),
            marks=[pytest.mark.campaign] if AOT in row and row[0] not in SAMPLE else [],
        )
        for row in rows
    ]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "way"), runs(itertools.product(CASES, WAYS)))
def test_every_forward_is_one_checked_batch(name: str, way: str) -> None:
    """Bits are kept, each call is one batch, the operation is blamed by its full name."""
    check(CASES[name], way)


@pytest.mark.sampled
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "nothing"])
@pytest.mark.parametrize("way", [PYTHON, EAGER])
@pytest.mark.parametrize("name", ["calls itself", "half frozen", *CUT[1:]])
def test_modes_around_the_model_change_nothing(name: str, way: str, mode: str) -> None:
    """The same under no_grad, inference_mode and autocast."""
    check(CASES[name], way, mode)


@torch.library.custom_op("fxguard_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def twice_of_fake(x: Tensor) -> Tensor:
    raise RuntimeError("no fake tensor here")


class OnlyReal(nn.Module):
    """TorchDynamo fails on an operation, as 2.13 does on ``grouped_mm`` in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return twice(x) * x


def test_what_torchdynamo_fails_on_is_left_to_the_observer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model runs, and every operation is checked; without the fallback it would not run."""
    plain = OnlyReal()
    guarded = fxguard.instrument(copy.deepcopy(plain))
    x = torch.randn(2, 16)
    with pytest.raises(Exception, match="fake tensor"):
        guarded(x)
    fxguard.remove(guarded)
    torch._dynamo.reset()
    monkeypatch.setattr(GuardedModel, "fallback", True)
    fxguard.instrument(guarded)
    assert torch.equal(guarded(x), plain(x))
    assert fxguard.guard_of(guarded).coverage() == (
        "checked 2 of 2 operations in 0 graphs and 2 between graphs"
    )
    with pytest.raises(fxguard.NonFiniteError, match="mul made inf"):
        guarded(torch.full((2, 16), 1e20))


# Every protection taken away once.


def unobserved(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def nothing(*args: Any) -> None:
    return None


def checking(name: str, way: str) -> Callable[[], object]:
    return lambda: check(CASES[name], way)


PROTECTIONS = [  # where it stands, what is put in its place, the check that then fails, and how
    (observer, "observe", unobserved, checking("computes between", EAGER), r"^input.*: \d+ \+inf"),
    (observer, "observe", unobserved, checking("half frozen", PYTHON), r"^input.*: \d+ NaN"),
    (module_hooks, "enter_module", nothing, checking("computes between", EAGER), "^exp made inf"),
    (module_hooks, "enter_module", nothing, checking("breaks before", PYTHON), "^exp made inf"),
]


@pytest.mark.parametrize(
    ("place", "name", "instead", "check_again", "failure"),
    [pytest.param(*row, id=f"{row[1]}-{index}") for index, row in enumerate(PROTECTIONS)],
)
def test_without_its_protection_the_check_fails(
    place: Any,
    name: str,
    instead: Any,
    check_again: Any,
    failure: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each line of the table above is what its check is a test of, and fails as it says."""
    monkeypatch.setattr(place, name, instead)
    with pytest.raises(AssertionError, match=failure):
        check_again()


def test_without_the_open_batch_a_model_that_calls_itself_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The recorder's own assertion: a batch that is not there cannot end."""
    monkeypatch.setattr(recorder.Recorder, "batch", property(lambda self: None))
    with pytest.raises(AssertionError) as found:
        check(CASES["calls itself"], EAGER)
    assert found.traceback[-1].path == Path(recorder.__file__)
