"""The pytest plugin of fxguard: a fixture, a marker, two options, and the report of a failure.

It stands beside the package, because pytest imports it wherever fxguard is installed: neither
fxguard nor torch is imported before a test asks for them.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest

MARKER = (
    "fxguard(**options): guard every outermost nn.Module that the test calls, with the options of "
    "fxguard.instrument"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The two options."""
    group = parser.getgroup("fxguard", "numerics of PyTorch models")
    group.addoption(
        "--fxguard",
        action="store_true",
        help="guard every outermost nn.Module that is called in a test",
    )
    group.addoption(
        "--fxguard-update",
        action="store_true",
        help="let fxguard.testing.check_profile write its files",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, and say what was asked for."""
    config.addinivalue_line("markers", MARKER)
    if config.getoption("fxguard_update"):
        from fxguard.testing import settings

        settings.update = True
        config.add_cleanup(lambda: setattr(settings, "update", False))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Guard what the test calls, its fixtures included, where that is asked for."""
    if item.get_closest_marker("fxguard") is None and not item.config.getoption("fxguard"):
        return (yield)
    from fxguard.testing.session import guarding

    with guarding(options_of(item)) as coverage:
        item.stash[COVERAGE] = coverage
        return (yield)


COVERAGE = pytest.StashKey[Any]()  # gives the coverage of every model of the test so far


@pytest.fixture
def fxguard(request: pytest.FixtureRequest) -> Iterator[Any]:
    """``fxguard.instrument`` and the rest of fxguard; what it instruments is left as it was."""
    from fxguard.testing.session import Fixture

    fixture = Fixture(options_of(request.node))
    yield fixture
    coverage = fixture.close()
    request.node.user_properties += [("fxguard_coverage", line) for line in coverage]


def options_of(item: Any) -> dict[str, Any]:
    """What the markers of a test say, the nearest one last."""
    options: dict[str, Any] = {}
    for marker in reversed(list(item.iter_markers("fxguard"))):
        options.update(marker.kwargs)
    return options


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add fxguard's report to a failure, and to JUnit's file."""
    found = found_by(call.excinfo.value) if call.excinfo is not None else None
    if found is not None:
        item.user_properties.append(("fxguard_origin", found.message))
    if call.when == "call" and (coverage := item.stash.get(COVERAGE, None)) is not None:
        item.user_properties += [("fxguard_coverage", line) for line in coverage()]
    report = yield
    if found is not None or "fxguard.testing" in sys.modules:
        kept = [(title, without_traces(text)) for title, text in report.sections]
        report.sections = [(title, text) for title, text in kept if text.strip()]
    if found is not None:
        report.sections.append(("fxguard report", str(found)))
    return report


def without_traces(text: str) -> str:
    """Captured logs without the lines that torch writes while it captures a model."""
    return "\n".join(line for line in text.split("\n") if " torch.__trace:" not in line)


def found_by(error: BaseException | None) -> Any:
    """The report that an exception, or what it was raised from, carries."""
    errors = sys.modules.get("fxguard.report.errors")  # not imported: then nothing was found
    kinds = () if errors is None else (errors.NonFiniteError, errors.NumericsError)
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, kinds) and error.report:
            return error.report
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Let go of the model that the test looked at last."""
    if (watch := sys.modules.get("fxguard.testing.watch")) is not None:
        watch.forget()
