"""Run an unmodified training script with its models instrumented: ``fxguard run``."""

from __future__ import annotations

import runpy
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.nn import Module

from fxguard.errors import FxguardError
from fxguard.guard import instrument, remove
from fxguard.instrumented import find_guard, unwrapped

__all__ = ["guarding_outermost_modules", "run_module", "run_script"]


def run_script(path: Path, args: list[str]) -> None:
    """Run a file as ``python path args`` would."""
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(path), run_name="__main__")


def run_module(name: str, args: list[str]) -> None:
    """Run a module as ``python -m name args`` would."""
    sys.argv = [name, *args]
    sys.path.insert(0, "")
    runpy.run_module(name, run_name="__main__", alter_sys=True)


@contextmanager
def guarding_outermost_modules(**options: Any) -> Iterator[list[Module]]:
    """Instrument every outermost module at its first call, before it runs.

    Yields:
        The modules that were instrumented so far.
    """
    guarded: list[Module] = []
    refused: set[int] = set()
    local = threading.local()
    # Module hooks would come too late: `_call_impl` has read `self.forward` by then.
    original: Callable[..., Any] = Module.__call__

    def call(module: Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(local, "inside", False):
            return original(module, *args, **kwargs)
        local.inside = True
        try:
            target = unwrapped(module)
            if find_guard(target) is None and id(target) not in refused:
                _guard(target, guarded, refused, options)
            return original(module, *args, **kwargs)
        finally:
            local.inside = False

    Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield guarded
    finally:
        Module.__call__ = original  # type: ignore[method-assign]


def _guard(target: Module, guarded: list[Module], refused: set[int], options: Any) -> None:
    # A part that was called on its own before is watched as a part from now on.
    for part in target.modules():
        if find_guard(part) is not None:
            remove(part)
            guarded.remove(part)
    try:
        guarded.append(instrument(target, **options))
    except FxguardError as error:
        refused.add(id(target))
        warnings.warn(f"{type(target).__name__} is not checked: {error}", stacklevel=3)
