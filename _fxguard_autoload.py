"""What ``import torch`` calls, wherever fxguard is installed: the entry point ``torch.backends``.

It stands beside the package, so that neither fxguard nor anything else is imported before the
variable ``FXGUARD`` asks for it. torch turns an exception in here into a failed import of torch.
"""

from __future__ import annotations

import os
import sys

__all__ = ["start"]


_was_called = False


def start() -> None:
    """Watch this process, where the variable FXGUARD says so."""
    global _was_called
    # Where two installations name this entry point, torch comes here twice.
    if _was_called or not os.environ.get("FXGUARD"):
        return
    _was_called = True
    try:
        from fxguard.cli.autoload import arm

        arm()
    except Exception as error:
        print(f"fxguard: FXGUARD is set and has no effect: {error}", file=sys.stderr)
