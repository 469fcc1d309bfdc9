"""Settings from the command line of pytest."""

from __future__ import annotations

__all__ = ["update"]

update = False  # whether to write profiles: ``--fxguard-update``
