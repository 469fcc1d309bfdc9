"""A test that needs something optional cannot be skipped in CI, where nobody would notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import needs

ASKS = [
    lambda: needs.needs("fxguard_has_no_such_extra"),
    lambda: needs.needs("torch.no_such_part"),
    lambda: needs.needs_program("fxguard-has-no-such-program"),
]


@pytest.mark.parametrize("ask", ASKS)
def test_what_is_missing_fails_in_ci_and_is_skipped_elsewhere(
    ask: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same request, with and without ``CI=true``."""
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"CI needs all extras: .*no.such"):
        ask()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match=r"no.such"):
        ask()


def test_what_is_there_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clean twin, in CI."""
    monkeypatch.setenv("CI", "true")
    assert needs.needs("tabulate").__name__ == "tabulate"
    assert Path(needs.needs_program("fxguard-has-no-such-program", "sh")).name == "sh"


def test_nothing_else_skips_what_is_missing() -> None:
    """pytest's own ``importorskip`` skips in CI too: no test uses it."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    users = [file.name for file in files if "pytest.importorskip" in file.read_text()]
    assert users == [Path(__file__).name]
    assert len(files) > 50
