"""Modes that a test leaves switched on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.cut_models import modes


@pytest.fixture(autouse=True)
def modes_as_they_were() -> Iterator[None]:
    """A test that leaves a mode switched on fails itself, and no other."""
    yield
    left = modes()
    torch.set_autocast_enabled("cpu", False)
    assert left == modes()
