"""What fails hides no report; a mistake of fxguard's own is seen by its tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fxguard import forgiving
from fxguard.forgiving import or_else, theirs, where_theirs_may_raise

OURS = f"{forgiving.HERE}made_up.py"


def in_handler(function: Callable[[], object]) -> str:
    try:
        function()
    except theirs() as error:
        return type(error).__name__
    return "nothing"


def in_block(function: Callable[[], object]) -> str:
    with where_theirs_may_raise():
        function()
        return "nothing"
    return "something"


def a_line(source: str, file: str) -> Callable[[], object]:
    """A function of a file."""
    namespace: dict[str, Callable[[], object]] = {}
    exec(compile(f"def f(): {source}", file, "exec"), namespace)
    return namespace["f"]


BROKEN = ("assert False", "None.x", "{}['x']", "x")


@pytest.mark.parametrize("source", BROKEN)
def test_a_mistake_of_ours_is_raised_in_tests(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And caught for a user; the same line of somebody else's file is always caught."""
    ours, other = a_line(source, OURS), a_line(source, "/project/train.py")
    for run in (in_handler, in_block):
        with pytest.raises(forgiving.MISTAKES):
            run(ours)
        assert run(other) != "nothing"
    monkeypatch.setattr(forgiving, "RAISES", False)
    for run in (in_handler, in_block):
        assert run(ours) != "nothing"


def test_what_a_line_of_ours_calls_is_theirs() -> None:
    """Their mistake, one line further in, and what torch raises from C."""
    theirs_alone = a_line("None.x", "/project/train.py")
    namespace = {"called": theirs_alone, "torch": torch}
    exec(compile("def f(): called()", OURS, "exec"), namespace)
    exec(compile("def g(): torch.ones(2) @ torch.ones(3)", OURS, "exec"), namespace)
    assert in_handler(namespace["f"]) == "AttributeError"  # type: ignore[arg-type]
    assert in_handler(namespace["g"]) == "RuntimeError"  # type: ignore[arg-type]


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_program_passes(
    error: type[BaseException], raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgiving, "RAISES", raises)

    def ends() -> None:
        raise error

    for run in (in_handler, in_block):
        with pytest.raises(error):
            run(ends)
    assert in_handler(int) == in_block(int) == "nothing"


def test_a_rule_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule of ours may not raise at all in tests."""
    assert or_else(0, int, "3") == 3
    with pytest.raises(ValueError, match="invalid literal"):
        or_else(0, int, "three")
    monkeypatch.setattr(forgiving, "RAISES", False)
    assert or_else(0, int, "three") == 0
