"""Torch warns where a compiled module is called and a global hook stands: it calls the hook twice.

While losses are followed such hooks are fxguard's, and a second call does them no harm. The warning
sends users to look for hooks that they never made, and ``python -W error`` ends a healthy training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

__all__ = ["silence"]

MESSAGE = r"Using `torch\.compile\(module\)` when there are global hooks on modules"


def silence() -> Callable[[], None]:
    """Keep the warning silent, and return what lets it be heard again."""
    warnings.filterwarnings("ignore", message=MESSAGE, category=UserWarning)
    ours = warnings.filters[0]

    def restore() -> None:
        if ours in warnings.filters:
            warnings.filters.remove(ours)  # type: ignore[attr-defined] # it is a list

    return restore
