"""``python -m fxguard``, for torchrun: ``torchrun --nproc_per_node 8 -m fxguard run train.py``."""

import sys

from fxguard.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
