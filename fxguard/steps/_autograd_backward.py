"""``torch.autograd.backward``, whose calls no torch function mode sees.

While losses are followed, a function replaces it and looks at the tensors where the backward
begins. The mode itself sees ``loss.backward()``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxguard.capture import following

__all__ = ["stand_in"]


def stand_in() -> Callable[[], None]:
    """Install the replacement, and return a function that removes it."""
    torchs = torch.autograd.backward
    ours = torch.autograd.backward = following.stand_in_for(torchs)

    def take_away() -> None:
        # Another tool may have replaced ours with its own function, which calls ours.
        if torch.autograd.backward is ours:
            torch.autograd.backward = torchs

    return take_away
