"""Idioms that hold infinities or NaN and are healthy raise nothing; what went wrong is named."""

from __future__ import annotations

import pytest
import torch

from support.bad_and_discarded import DISCARDED
from support.masks_intended import MASKS
from support.too_large_and_healthy import TOO_LARGE
from support.twins import Twin, check_healthy, first_blamed
from support.ways import AOT, EAGER, PYTHON

TABLES = (MASKS, DISCARDED, TOO_LARGE)
HEALTHY = [twin for table in TABLES for twin in table.healthy]
WRONG = [twin for table in TABLES for twin in table.wrong]
REPLAY = "replay"
WAYS = (EAGER, AOT, REPLAY, PYTHON)


# Between graphs nobody sees the -inf that the score function writes inside its kernel.
UNSEEN = [("lse_of_flex_attention", PYTHON)]


def trial(twin: Twin, dtype: torch.dtype, way: str) -> object:
    marks = [pytest.mark.xfail(strict=True)] if (str(twin), way) in UNSEEN else []
    return pytest.param(twin, dtype, way, id=f"{twin}-{str(dtype)[6:]}-{way}", marks=marks)


def in_turn(twin: Twin, turn: int) -> torch.dtype:
    return twin.dtypes[turn % len(twin.dtypes)]


# The dtypes take turns; every twelfth idiom is also compiled, and every twelfth replayed.
SAMPLE = [
    *((twin, in_turn(twin, place), EAGER) for place, twin in enumerate(HEALTHY)),
    *((twin, in_turn(twin, place), AOT) for place, twin in enumerate(HEALTHY[::12])),
    *((twin, in_turn(twin, place), REPLAY) for place, twin in enumerate(HEALTHY[3::12])),
]
OTHERS = [
    (twin, dtype, way)
    for twin in HEALTHY
    for dtype in twin.dtypes
    for way in WAYS
    if (twin, dtype, way) not in SAMPLE
]


def check(twin: Twin, dtype: torch.dtype, way: str) -> None:
    check_healthy(twin, dtype, EAGER if way == REPLAY else way, replay=way == REPLAY)


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("twin", "dtype", "way"), [trial(*one) for one in SAMPLE])
def test_healthy_idioms_are_not_reported(twin: Twin, dtype: torch.dtype, way: str) -> None:
    """Twice, with other numbers: the outputs are those of the plain model, and nothing is raised.

    The second batch may be judged by the precedent of the first.
    """
    check(twin, dtype, way)


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("twin", "dtype", "way"), [trial(*one) for one in OTHERS])
def test_healthy_idioms_in_every_dtype_and_way(twin: Twin, dtype: torch.dtype, way: str) -> None:
    """The same for all that the sample leaves out."""
    check(twin, dtype, way)


@pytest.mark.sampled
@pytest.mark.parametrize("twin", WRONG, ids=str)
def test_their_sisters_that_went_wrong_are_reported(twin: Twin) -> None:
    """No idiom is healthy because nobody looks: next to it stands what must be reported."""
    assert first_blamed(twin, twin.dtypes[0]) in twin.blames.split("|")
