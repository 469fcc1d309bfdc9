"""What the pytest plugin does for one test, once a test has asked for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module

import fxguard
from fxguard.errors import NonFiniteError
from fxguard.instrumented import find_guard
from fxguard.report import Report
from fxguard.run import guarding_outermost_modules

__all__ = ["Fixture", "guarding"]

__tracebackhide__ = True  # by pytest: it shows the test, and where the model was called


def stop(report: Report) -> None:
    """Fail the test; pytest shows the report."""
    raise NonFiniteError(report.summary, report)


@contextmanager
def guarding(options: dict[str, Any]) -> Iterator[Callable[[], list[str]]]:
    """Guard every outermost module that is called meanwhile; afterwards all are as they were.

    Yields:
        What gives the coverage of each of them so far.
    """
    with guarding_outermost_modules(**{"on_detect": stop, **options}) as guarded:
        try:
            yield lambda: [coverage_of(model) for model in guarded if find_guard(model)]
        finally:
            for model in guarded:
                if find_guard(model) is not None:  # the test may have removed it
                    fxguard.remove(model)


def coverage_of(model: Module) -> str:
    return f"{type(model).__name__}: {fxguard.guard_of(model).coverage()}"


class Fixture:
    """The fixture: fxguard itself, with an ``instrument`` that is undone when the test ends."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._models: list[Module] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(fxguard, name)

    def instrument(self, model: Module, **options: Any) -> Module:
        """As :func:`fxguard.instrument`; what the marker of the test says holds, too."""
        if isinstance(model, Module) and find_guard(model) is not None:
            fxguard.remove(model)  # by --fxguard, before the test came to this line
        fxguard.instrument(model, **{"on_detect": stop, **self._options, **options})
        self._models.append(model)
        return model

    def close(self) -> list[str]:
        """Leave every model as it was; their coverage."""
        guarded = [model for model in self._models if find_guard(model) is not None]
        lines = [coverage_of(model) for model in guarded]
        for model in guarded:
            fxguard.remove(model)
        return lines
