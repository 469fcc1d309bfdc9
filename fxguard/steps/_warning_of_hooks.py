"""Silences a warning of torch's: a compiled module calls a global hook twice.

While losses are followed, such hooks are fxguard's, and a second call does no harm. The warning
would make users look for hooks that they never made, and with ``python -W error`` it would end a
healthy training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

__all__ = ["silence"]

MESSAGE = r"Using `torch\.compile\(module\)` when there are global hooks on modules"


def silence() -> Callable[[], None]:
    """Silence the warning, and return a function that restores it."""
    warnings.filterwarnings("ignore", message=MESSAGE, category=UserWarning)
    ours = warnings.filters[0]

    def restore() -> None:
        if ours in warnings.filters:
            warnings.filters.remove(ours)  # type: ignore[attr-defined] # it is a list

    return restore
