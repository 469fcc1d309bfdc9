"""The network check as a command: ``torchrun --nproc_per_node 2 -m fxguard.netcheck``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the network, and return the exit status.

    Args:
        arguments: arguments of the command line; those of this process if not given.
    """
    # For each peer that cannot be reached, torch prints pages of C++ frames between the lines that
    # explain it. Torch reads this variable when it is imported.
    if "TORCH_DISTRIBUTED_DEBUG" not in os.environ:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from fxguard.ranks import netcheck

    return netcheck.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
