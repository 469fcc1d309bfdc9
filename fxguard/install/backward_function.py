"""``torch.autograd.backward`` replaced by a function that calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["stand_in"]


def stand_in(make: Callable[[Any], Any]) -> Callable[[], None]:
    """Install a replacement, and return a function that removes it.

    Args:
        make: is given the function that is there, and returns the one that takes its place.
    """
    before = torch.autograd.backward
    ours = torch.autograd.backward = make(before)

    def take_away() -> None:
        # Another tool may have replaced ours with its own function, which calls ours.
        if torch.autograd.backward is ours:
            torch.autograd.backward = before

    return take_away
