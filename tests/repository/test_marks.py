"""Marks say when a test runs, and ``tests/conftest.py`` sets some. Each case looks at its own."""

from __future__ import annotations

import pytest

UNKNOWN = "slwo"
IN_A_CAMPAIGN = pytest.param(None, marks=pytest.mark.campaign)


def when(request: pytest.FixtureRequest) -> set[str]:
    return {mark.name for mark in request.node.iter_markers()} & {"slow", "campaign"}


def test_a_mark_that_is_not_known_is_an_error() -> None:
    """A mark that is spelled wrong would leave a test to nobody, or run it everywhere."""
    with pytest.raises(pytest.fail.Exception, match="not found in `markers`"):
        getattr(pytest.mark, UNKNOWN)


@pytest.mark.sampled
@pytest.mark.parametrize("place", [0, 1, IN_A_CAMPAIGN, 2, 3, 4])
def test_of_a_sampled_test_every_third_case_is_not_slow(
    place: int | None, request: pytest.FixtureRequest
) -> None:
    """Cases of a campaign are not counted, and stay what they are."""
    if place is None:
        assert when(request) == {"campaign"}
    else:
        assert when(request) == ({"slow"} if place % 3 else set())


@pytest.mark.slow_unless_campaign
@pytest.mark.parametrize("place", [0, IN_A_CAMPAIGN])
def test_all_but_a_campaign_is_slow(place: int | None, request: pytest.FixtureRequest) -> None:
    """So that a file with campaigns has one mark for the rest."""
    assert when(request) == ({"campaign"} if place is None else {"slow"})
