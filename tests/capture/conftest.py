"""What these tests hear of TorchDynamo."""

from __future__ import annotations

from typing import Any

import pytest

from fxguard.capture import traced_modules


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The function that has called each module that was traced."""
    found: list[str] = []
    leave_mark = traced_modules._leave_mark

    def counted(tx: Any, *args: Any) -> None:
        found.append(tx.f_code.co_name)
        leave_mark(tx, *args)

    monkeypatch.setattr(traced_modules, "_leave_mark", counted)
    return found
