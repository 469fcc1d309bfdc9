"""``watch``: checks a stretch of a training script, including the loss and the optimizer."""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.nn import Module
from typing_extensions import Unpack

from fxguard.api.instrument import instrument
from fxguard.errors import UsageError
from fxguard.guard.for_users import Guard
from fxguard.guard.guard import GuardedModel
from fxguard.install.instrumented import find_guard, unwrapped
from fxguard.install.remove import remove
from fxguard.options import InstrumentOptions
from fxguard.steps.losses import Losses

__all__ = ["watch"]


Function = TypeVar("Function", bound=Callable[..., Any])


class Watching(contextlib.ContextDecorator, contextlib.AbstractContextManager[Guard]):
    """What ``watch`` returns; it warns if nobody enters it."""

    def __init__(self, model: Module, options: InstrumentOptions) -> None:
        self._given = model, options
        self._entered: contextlib.AbstractContextManager[Guard] | None = None
        caller = sys._getframe(2)
        place = caller.f_code.co_filename, caller.f_lineno, caller.f_globals
        self._not_entered = weakref.finalize(self, _warn_of_no_block, *place)

    def __enter__(self) -> Guard:
        self._not_entered.detach()
        if self._entered is not None:
            raise UsageError("this watch has begun already: call fxguard.watch once for each block")
        model, options = self._given
        self._entered = _watched(model, **options)
        return self._entered.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        assert self._entered is not None
        return self._entered.__exit__(*error)

    def __call__(self, function: Function) -> Function:
        """Watch each call of a function."""
        self._not_entered.detach()
        return super().__call__(function)

    def _recreate_cm(self) -> Watching:
        return Watching(*self._given)


def _warn_of_no_block(file: str, line: int, known: dict[str, Any]) -> None:
    warnings.warn_explicit(
        "fxguard.watch was called without `with`, so nothing is checked: write "
        "`with fxguard.watch(model):` and put the training loop into that block",
        RuntimeWarning,
        file,
        line,
        known.get("__name__", "<unknown>"),
        known.setdefault("__warningregistry__", {}),
    )


def watch(model: Module, **options: Unpack[InstrumentOptions]) -> Watching:
    """Watch whole training steps: forward, loss, backward, optimizer.

    Put it in a ``with`` block around the loop. It also checks what the block computes from the
    model's outputs, in the thread that calls the model and up to ``backward()``, and the model's
    weights after each step of an optimizer of ``torch.optim`` that holds them. Quiet faults of the
    training, such as gradients that nobody sets to 0, are printed in a line each.

    Args:
        model: any ``nn.Module``, possibly compiled or wrapped in DistributedDataParallel. An
            instrumented model keeps its guard; any other has a guard for this block.
        options: options of :func:`instrument`, for a model that is not instrumented yet.

    Returns:
        What to put behind ``with``; the block gets the model's :class:`Guard`.

    Warns:
        RuntimeWarning: when it was called without a ``with``, so that nothing is checked; and when
            a block ends in which no forward of the model ran.

    Raises:
        FxguardError: when the arguments cannot work, or the model is watched already.

    Example:
        >>> with fxguard.watch(model):
        ...     for batch, target in loader:
        ...         loss = (model(batch) - target).pow(2).mean().log()
        ...         loss.backward()  # raises fxguard.NonFiniteError: log made inf (train.py:3)
        ...         optimizer.step()
    """
    return Watching(model, options)


@contextlib.contextmanager
def _watched(model: Module, **options: Unpack[InstrumentOptions]) -> Iterator[Guard]:
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
    assert isinstance(guard, GuardedModel)
    if guard.whole_step is not None:
        raise UsageError(f"this {type(inner).__name__} is watched already")
    losses = Losses()
    guard.watch_steps(losses)
    calls = guard.recorder.next_number
    try:
        yield guard
        if guard.recorder.next_number == calls:
            _warn_of_no_forward(type(inner).__name__)
    finally:
        guard.stop_watching_steps()
        losses.close()
        if is_ours:
            remove(inner)


def _warn_of_no_forward(name: str) -> None:
    """Say that nothing was checked: a script may call methods that run parts of the model."""
    warnings.warn(
        f"this block of fxguard.watch ran no forward of {name}, so its operations were not "
        "checked; if the script calls other methods or parts of it, `fxguard run` checks those",
        RuntimeWarning,
        stacklevel=5,
    )
