"""``torch.autograd.backward``, which no torch function mode sees called.

While losses are followed a function stands in its place that looks at what the backward begins
with. ``loss.backward()`` is seen by the mode itself.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from fxguard.capture import following

__all__ = ["AutogradBackward"]


class AutogradBackward:
    """Stands in for the function while somebody needs it. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._needed = 0
        self._torchs: Any = None  # torch's own, while another stands in its place
        self._stand_in: Any = None

    def replace(self) -> None:
        """One more needs it."""
        with self._lock:
            self._needed += 1
            if self._needed == 1:
                self._torchs = torch.autograd.backward
                self._stand_in = following.stand_in_for(self._torchs)
                torch.autograd.backward = self._stand_in

    def restore(self) -> None:
        """One less does."""
        with self._lock:
            self._needed -= 1
            # Another tool may have put its own in our place, and calls ours.
            if not self._needed and torch.autograd.backward is self._stand_in:
                torch.autograd.backward = self._torchs
