"""What a script's autograd functions compute in a backward, which no torch function mode sees.

The engine calls them while the mode is off the stack: it is inside ``loss.backward()``. While
losses are followed, a function replaces the method that the engine calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.autograd.function import BackwardCFunction

from fxguard.capture import following

__all__ = ["stand_in"]


def stand_in() -> Callable[[], None]:
    """Install the replacement, and return a function that removes it."""
    torchs: Callable[..., Any] = BackwardCFunction.apply

    @functools.wraps(torchs)
    def apply(node: Any, *gradients: Any) -> Any:
        beside = following.beside_of_backward(node)
        if beside is None:
            return torchs(node, *gradients)
        return beside.in_own_backward(torchs, node, gradients)

    BackwardCFunction.apply = apply  # type: ignore[method-assign]

    def take_away() -> None:
        # Another tool may have replaced ours with its own function, which calls ours.
        if BackwardCFunction.apply is apply:
            BackwardCFunction.apply = torchs  # type: ignore[method-assign]

    return take_away
