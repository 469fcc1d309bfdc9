"""TorchDynamo writes no texts for its logs in captures that nobody asked for."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config, exc, symbolic_convert, utils
from torch._logging._internal import trace_log

import fxguard
from fxguard.guard.guard import GuardedModel


@pytest.fixture(autouse=True)
def as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures are quiet, as they are outside of these tests."""
    monkeypatch.setattr(GuardedModel, "fallback", True)


class Breaks(nn.Module):
    """A graph break between two operations, and an object that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        self.seen.append(1)
        return x + 1


LISTS_CALLS = pytest.mark.skipif(
    not hasattr(exc, "_extract_stack_with_positions"), reason="this torch lists no calls"
)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that lists of calls were made for."""
    found: list[str] = []
    summary: Any = exc.FrameSummary  # type: ignore[attr-defined]

    def made(file: str, line: int, name: str, **options: Any) -> Any:
        found.append(name)
        return summary(file, line, name, **options)

    monkeypatch.setattr(exc, "FrameSummary", made)
    return found


@LISTS_CALLS
def test_the_calls_that_lead_to_a_capture_are_listed_only_for_who_asked(listed: list[str]) -> None:
    """A capture of the user's is as before, and its graph break is counted in both."""
    guarded = fxguard.instrument(Breaks())
    guarded(torch.ones(2))
    assert not listed
    assert "1 graph break" in fxguard.guard_of(guarded).coverage()
    assert guarded.seen == [1]
    torch.compile(Breaks(), backend="eager")(torch.ones(2))
    assert listed


@LISTS_CALLS
def test_a_log_that_somebody_has_asked_for_is_written(listed: list[str]) -> None:
    """``TORCH_LOGS=graph_breaks`` sets the level of the logger."""
    log: logging.Logger = symbolic_convert.graph_break_log  # type: ignore[attr-defined]
    level = log.level
    log.setLevel(logging.DEBUG)
    try:
        fxguard.instrument(Breaks())(torch.ones(2))
    finally:
        log.setLevel(level)
    assert listed


def test_the_users_own_settings_are_left_alone() -> None:
    """What a capture is told about its side effects ends with the call."""
    before = config.side_effect_replay_policy
    fxguard.instrument(Breaks())(torch.ones(2))
    assert config.side_effect_replay_policy == before


NOTES_SETTINGS = pytest.mark.skipif(
    not hasattr(utils, "_get_dynamo_config_for_logging"), reason="this torch notes no settings"
)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[utils.CompilationMetrics]:
    """What TorchDynamo notes of each capture."""
    found: list[utils.CompilationMetrics] = []
    monkeypatch.setattr(utils, "_compilation_metrics", found)
    return found


@NOTES_SETTINGS
def test_settings_are_noted_only_for_who_asked(noted: list[utils.CompilationMetrics]) -> None:
    """All else that TorchDynamo notes of a capture is as before."""
    fxguard.instrument(Breaks())(torch.ones(2))
    assert noted
    assert all(each.dynamo_config is each.inductor_config is None for each in noted)
    assert {each.co_name for each in noted} >= {"forward"}
    noted.clear()
    torch.compile(Breaks(), backend="eager")(torch.ones(2))
    assert noted
    assert all(each.dynamo_config and each.inductor_config for each in noted)


@NOTES_SETTINGS
def test_settings_are_noted_where_they_are_written(
    noted: list[utils.CompilationMetrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``TORCH_TRACE`` has the logger of traces handle what comes."""
    monkeypatch.setattr(trace_log, "handlers", [logging.NullHandler()])
    fxguard.instrument(Breaks())(torch.ones(2))
    assert noted
    assert all(each.dynamo_config and each.stack_trace for each in noted)


def test_the_log_of_captures_that_somebody_has_asked_for_names_the_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """``TORCH_LOGS=+dynamo`` sets the level of the logger."""
    log = logging.getLogger("torch._dynamo.convert_frame")
    with caplog.at_level(logging.DEBUG, log.name):
        log.addHandler(caplog.handler)
        try:
            fxguard.instrument(Breaks())(torch.ones(2))
        finally:
            log.removeHandler(caplog.handler)
    assert "test_unread.py" in caplog.text
