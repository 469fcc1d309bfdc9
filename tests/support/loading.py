"""Python files that no package holds, as modules: TorchDynamo asks a function for its module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).resolve().parents[2] / "docs"


def module_of(path: Path, name: str = "") -> ModuleType:
    """The module that a file holds.

    Args:
        path: of the file.
        name: of the module; that of the file where it is not given.
    """
    name = name or path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def the_gallery() -> ModuleType:
    """docs/famous_nans.py."""
    return module_of(DOCS / "famous_nans.py")
