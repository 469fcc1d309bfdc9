"""What the command line of pytest has said."""

from __future__ import annotations

__all__ = ["update"]

update = False  # whether profiles are written: ``--fxguard-update``
