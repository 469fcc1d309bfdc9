"""What a history needs beside torch: pyarrow, an extra."""

from __future__ import annotations

import importlib.util

from fxguard.errors import UsageError

__all__ = ["need_pandas", "need_pyarrow"]


def need_pyarrow() -> None:
    """Refuse where pyarrow is not installed; it is not imported yet.

    Raises:
        UsageError: with the command that installs it.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise UsageError("a history is kept with pyarrow: pip install 'fxguard[history]'")


def need_pandas() -> None:
    """Refuse where pandas is not installed.

    Raises:
        UsageError: with the command that installs it.
    """
    if importlib.util.find_spec("pandas") is None:
        raise UsageError("to_dataframe makes a DataFrame of pandas: pip install pandas")
