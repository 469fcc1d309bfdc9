"""The program: ``python tests/support/golden --help``."""

from __future__ import annotations

import sys
from pathlib import Path

# `support` is that of the checkout that is looked at; this package is itself, whichever it is.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from golden.command import main  # noqa: E402

sys.path.pop(0)

if __name__ == "__main__":
    sys.exit(main())
