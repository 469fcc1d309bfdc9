"""``torch.autograd.backward``, which no torch function mode sees called.

While losses are followed a function stands in its place that looks at what the backward begins
with. ``loss.backward()`` is seen by the mode itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxguard.capture import following

__all__ = ["stand_in"]


def stand_in() -> Callable[[], None]:
    """Put the function there, and return what takes it away."""
    torchs = torch.autograd.backward
    ours = torch.autograd.backward = following.stand_in_for(torchs)

    def take_away() -> None:
        # Another tool may have put its own in our place, and calls ours.
        if torch.autograd.backward is ours:
            torch.autograd.backward = torchs

    return take_away
