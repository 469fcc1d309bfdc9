"""Runs an unmodified training script as Python itself would: ``fxguard run``."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

__all__ = ["find_module", "run_any", "run_module", "run_script"]


def run_any(module: str | None, rest: list[str]) -> None:
    """Run a module with its arguments; without a module, the script named by the first argument."""
    if module is not None:
        run_module(module, rest)
    else:
        run_script(Path(rest[0]), rest[1:])


def run_script(path: Path, args: list[str]) -> None:
    """Run a file as ``python path args`` would."""
    file = os.path.abspath(path)
    sys.argv = [str(path), *args]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 has it
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    code = loader.source_to_code(Path(file).read_bytes(), file)  # type: ignore[no-untyped-call]
    run_as_main(code, __file__=file, __loader__=loader, __package__=None, __cached__=None)


def run_module(name: str, args: list[str]) -> None:
    """Run a module as ``python -m name args`` would."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    spec = find_module(name)
    assert spec is not None
    assert spec.loader is not None
    sys.argv = [str(spec.origin), *args]
    code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    run_as_main(
        code,
        __file__=spec.origin,
        __loader__=spec.loader,
        __package__=spec.parent,
        __cached__=spec.cached,
        __spec__=spec,
    )


def find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """The module that ``python -m name`` runs: for a package, its ``__main__``."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        return importlib.util.find_spec(f"{name}.__main__")
    return spec


def run_as_main(code: CodeType, **attributes: Any) -> None:
    """Run code as the module ``__main__``, which stays, so that its definitions can be pickled."""
    main = ModuleType("__main__")
    main.__dict__.update(attributes, __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)
