"""``python -m fxguard.about`` says what is installed, and which way measures."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import fxguard
from fxguard import about
from fxguard.measure import native


def test_the_command_says_versions_and_the_way() -> None:
    """Three lines where the part in C is built."""
    command = [sys.executable, "-m", "fxguard.about"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == "\n".join(about.lines()) + "\n"
    assert ended.stdout.startswith(f"fxguard {fxguard.__version__}\ntorch {torch.__version__}, ")


@pytest.mark.parametrize("is_built", [True, False])
def test_what_to_do_is_said_where_it_is_not_built(
    is_built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler, and to install fxguard once more."""
    monkeypatch.setattr(native, "is_built", is_built)
    text = "\n".join(about.lines())
    assert ("measured in C" in text) == is_built
    assert ("Install a C compiler" in text) != is_built
