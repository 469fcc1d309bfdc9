"""The network check as a command: ``torchrun --nproc_per_node 2 -m fxguard.netcheck``."""

from __future__ import annotations

import os
import sys

__all__: list[str] = []

# Of what cannot be reached torch prints pages of C++ frames, between the lines that say what it is.
# It reads this variable when it is imported.
if __name__ == "__main__" and "TORCH_DISTRIBUTED_DEBUG" not in os.environ:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

from fxguard.ranks.netcheck import main

if __name__ == "__main__":
    sys.exit(main())
