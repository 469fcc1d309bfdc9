"""``remove``: the model is exactly what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fxguard.capture import dynamo
from fxguard.errors import UsageError
from fxguard.install.functions import FunctionModule
from fxguard.install.instrumented import find_installed

__all__ = ["remove"]

Model = TypeVar("Model", bound=Callable[..., Any])


def remove(model: Model) -> Model:
    """Undo :func:`instrument`: the model is exactly what it was.

    If it was not instrumented, undo :func:`keep_float32`.

    Returns:
        The same object; for an instrumented function, the original function.

    Raises:
        FxguardError: when the model has nothing of fxguard on it.
    """
    module: Any = model
    found = find_installed(module)
    if found is None:
        raise UsageError(f"this {type(model).__name__} is not instrumented")
    found.uninstall()
    dynamo.compile_again(module)
    return module.function if isinstance(module, FunctionModule) else model  # type: ignore[return-value]
