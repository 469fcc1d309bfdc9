"""Small real NaNs: the report names the operation and the mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from support.answers import expect_no_contradiction
from support.masks import Function
from support.stories.bad_before import GIVEN
from support.stories.healthy import HEALTHY
from support.stories.overflows import OVERFLOW
from support.stories.poles import POLES
from support.stories.rounded import PRECISION
from support.stories.story import Story
from support.ways import AOT, EAGER, prepared

STORIES = {**OVERFLOW, **PRECISION, **POLES, **GIVEN}
# Every story in eager mode, and under AOTAutograd every twelfth; a third of them in the campaign.
COMPILED = [
    pytest.param(name, AOT, marks=[] if place % 12 == 0 else [pytest.mark.campaign])
    for place, name in enumerate(STORIES)
    if place % 3 == 0
]
WAYS = [*((name, EAGER) for name in STORIES), *COMPILED]


def report_of(forward: Any, inputs: tuple[Tensor, ...], way: str) -> fxguard.types.Report | None:
    """The report of one batch, None where it is healthy."""
    reports: list[fxguard.types.Report] = []
    model = forward if isinstance(forward, nn.Module) else Function(forward)
    fxguard.instrument(model, on_detect=reports.append)
    try:
        with torch.no_grad():
            prepared(model, way)(*inputs)
    except RuntimeError:
        assert reports, "the model raised, and there is no report"
    finally:
        fxguard.remove(model)
    return reports[0] if reports else None


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_the_operation_and_the_mistake_are_named(name: str, way: str) -> None:
    """The first origin is the operation that a competent engineer would change, and says why."""
    story: Story = STORIES[name]
    report = report_of(story.forward, story.inputs, way)
    assert report is not None, "no report"
    first = report.origins[0]
    assert (first.what, first.cause) == (story.operation, story.cause), first.message
    expect_no_contradiction(report)


@pytest.mark.sampled
@pytest.mark.parametrize("name", HEALTHY)
def test_what_only_looks_wrong_is_no_detection(name: str) -> None:
    """A bad value that does no harm, or none at all."""
    forward, inputs = HEALTHY[name]
    report = report_of(forward, inputs, EAGER)
    assert report is None, report.origins[0].message
