"""The pytest plugin's work for one test, loaded once a test asks for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.nn import Module
from typing_extensions import Unpack

import fxguard
from fxguard.api.instrument import guarded
from fxguard.api.outermost import OutermostModules
from fxguard.errors import UsageError
from fxguard.guard.guard import GuardedModel
from fxguard.install.instrumented import find_guard
from fxguard.options import InstrumentOptions, Options
from fxguard.report.errors import NonFiniteError
from fxguard.report.report import Report

__all__ = ["Fixture", "guarding"]

Model = TypeVar("Model", bound=Module)

__tracebackhide__ = True  # by pytest: it shows the test, and where the model was called


def stop(report: Report) -> None:
    """Fail the test; pytest shows the report."""
    raise NonFiniteError(report.summary, report)


@contextmanager
def guarding(options: dict[str, Any]) -> Iterator[Callable[[], list[str]]]:
    """Guard every outermost module that is called in the block; afterwards all are restored.

    Yields:
        A function that returns the coverage of each of them so far.
    """
    try:
        chosen = Options(**{"on_detect": stop, **options})
    except UsageError as error:  # pytest would treat an exception here as its own fault
        warnings.warn(f"nothing is checked: {error}", stacklevel=4)
        yield list
        return
    with OutermostModules(chosen, on_refusal=warn, capture_all=True) as outermost:
        yield lambda: [coverage_of(guard) for guard in outermost.guards]


def warn(name: str, reason: str) -> None:
    warnings.warn(f"{name} is not checked: {reason}", stacklevel=6)


def coverage_of(guard: GuardedModel) -> str:
    return f"{guard.model_name}: {guard.coverage()}"


class Fixture:
    """The fixture: fxguard itself, with an ``instrument`` that is undone when the test ends."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._models: list[Module] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(fxguard, name)

    def instrument(self, model: Model, **options: Unpack[InstrumentOptions]) -> Model:
        """Like :func:`fxguard.instrument`, with the options of the test's marker as well."""
        if isinstance(model, Module) and find_guard(model) is not None:
            fxguard.remove(model)  # instrumented by --fxguard before the test reached this line
        fxguard.instrument(model, **{"on_detect": stop, **self._options, **options})
        self._models.append(model)
        return model

    def close(self) -> list[str]:
        """Restore every model, and return their coverage."""
        models = [model for model in self._models if find_guard(model) is not None]
        lines = [coverage_of(guarded(model)) for model in models]
        for model in models:
            fxguard.remove(model)
        return lines
