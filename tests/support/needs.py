"""What some tests need and not every machine has: skipped without it, except in CI, which fails.

And the version of torch, for the few that find in torch itself what they expect of fxguard.
"""

from __future__ import annotations

import importlib
import os
import shutil
from typing import Any, NoReturn

import pytest
import torch

__all__ = [
    "CLAMP_STOPS_AT_BOUNDS",
    "OF_PYTHON_3_13_0",
    "TORCH",
    "do_without",
    "needs",
    "needs_program",
]

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

# Since torch 2.15 no gradient goes through `clamp` where its operand is just the bound, and stories
# that need one are healthy.
CLAMP_STOPS_AT_BOUNDS = TORCH >= (2, 15)

# TorchDynamo warns of that release of Python at every capture.
OF_PYTHON_3_13_0 = "Guards may run slower on Python 3.13.0"


def needs(module: str) -> Any:
    """The module of an optional dependency."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        do_without(f"{module} cannot be imported: {error}")


def needs_program(*names: str) -> str:
    """The path of the first of these programs that is there."""
    paths = filter(None, map(shutil.which, names))
    return next(paths, None) or do_without(f"no program is called {' or '.join(names)}")


def do_without(reason: str) -> NoReturn:
    """Skip the test or the file that asks, and fail it where everything has to be there."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI needs all extras: {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)
