"""``watch``: checks a stretch of a training script, including the loss and the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.nn import Module
from typing_extensions import Unpack

from fxguard.errors import UsageError
from fxguard.guard.guard import Guard
from fxguard.guard.instrument import instrument, remove
from fxguard.guard.instrumented import find_guard, unwrapped
from fxguard.guard.losses import Losses
from fxguard.guard.options import InstrumentOptions

__all__ = ["watch"]


@contextlib.contextmanager
def watch(model: Module, **options: Unpack[InstrumentOptions]) -> Iterator[Guard]:
    """Watch whole training steps: forward, loss, backward, optimizer.

    Put it in a ``with`` block around the loop. It also checks what the block computes from the
    model's outputs, in the thread that calls the model and up to ``backward()``, and the model's
    weights after each step of an optimizer of ``torch.optim`` that holds them.

    Args:
        model: any ``nn.Module``, possibly compiled or wrapped in DistributedDataParallel. An
            instrumented model keeps its guard; any other has a guard for this block.
        options: options of :func:`instrument`, for a model that is not instrumented yet.

    Yields:
        The model's :class:`Guard`.

    Raises:
        FxguardError: when the arguments cannot work, or the model is watched already.

    Example:
        >>> with fxguard.watch(model):
        ...     for batch, target in loader:
        ...         loss = (model(batch) - target).pow(2).mean().log()
        ...         loss.backward()  # raises fxguard.NonFiniteError: log made inf (train.py:3)
        ...         optimizer.step()
    """
    if not isinstance(model, Module):
        raise UsageError(
            f"watch needs a torch.nn.Module, got {type(model).__name__}; of a function, watch what "
            "fxguard.instrument makes of it"
        )
    inner = unwrapped(model)
    is_ours = find_guard(inner) is None
    if is_ours:
        instrument(inner, **options)
    elif options:
        raise UsageError(f"this {type(inner).__name__} is instrumented already, with its options")
    guard = find_guard(inner)
    assert isinstance(guard, Guard)
    if guard.whole_step is not None:
        raise UsageError(f"this {type(inner).__name__} is watched already")
    losses = Losses()
    guard.watch_steps(losses)
    try:
        yield guard
    finally:
        guard.stop_watching_steps()
        losses.close()
        if is_ours:
            remove(inner)
