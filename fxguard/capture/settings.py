"""Settings of TorchDynamo for one call.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15):

- ``config._config``: its settings. Where a value is a ``ContextVar`` it is set there: the public
  ``config.patch`` takes some µs more, at each forward.
- ``config._make_closure_patcher``: does the same as ``config.patch`` in a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from torch._dynamo import config

__all__ = ["known", "with_settings"]


def known(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some settings that this version of TorchDynamo has."""
    return {name: value for name, value in settings.items() if hasattr(config, name)}


def with_settings(
    function: Callable[..., Any],
    settings: Mapping[str, Any],
    others: Mapping[ContextVar[Any], Any],
    before: Callable[[], object] | None = None,
) -> Callable[..., Any]:
    """A function that runs under settings of TorchDynamo.

    Args:
        function: the function.
        settings: name to value.
        others: variables that have values of their own in the function.
        before: called before each call of it.
    """
    found = {_variable_of(name): value for name, value in settings.items()}
    if not all(isinstance(variable, ContextVar) for variable in found):
        function, found = _with_patch(function, settings), {}
    variables = [*found.items(), *others.items()]

    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        tokens = [(variable, variable.set(value)) for variable, value in variables]
        try:
            return function(*args, **kwargs)
        finally:
            for variable, token in tokens:
                variable.reset(token)

    return call


def _variable_of(name: str) -> Any:
    settings: Any = config._config  # type: ignore[attr-defined] # added at import
    return getattr(settings[name], "user_override", None)


def _with_patch(function: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    change = config._make_closure_patcher(**settings)

    def call(*args: Any, **kwargs: Any) -> Any:
        revert = change()
        try:
            return function(*args, **kwargs)
        finally:
            revert()

    return call
