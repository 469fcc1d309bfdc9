"""The three functions around a guard: ``instrument``, ``remove``, ``guard_of``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.nn import Module

from fxguard.capture import dynamo
from fxguard.errors import UsageError
from fxguard.guard.functions import FunctionModule, module_of
from fxguard.guard.guard import Guard
from fxguard.guard.instrumented import check_can_instrument, find_guard, find_installed
from fxguard.guard.options import Options
from fxguard.report.report import Report

__all__ = ["guard_of", "instrument", "remove"]

Model = TypeVar("Model", bound=Callable[..., Any])


def instrument(
    model: Model,
    *,
    max_frames_to_save: int = 21,
    trace_batch_nums: Iterable[int] = (),
    abort_after_batch_num: int | None = None,
    on_detect: str | Callable[[Report], Any] = "raise",
    granularity: str = "op",
    strict: bool = False,
    ignore: Iterable[str] = (),
    replay: bool = False,
    backward: bool = True,
    loss_scale: float | Callable[[], float] | None = None,
    underflow: float | None = None,
    reproduce_to: str | os.PathLike[str] | None = None,
    reproduce_ranges_only: bool = False,
    sync_ranks: bool = False,
    trace_to: str | os.PathLike[str] | None = None,
) -> Model:
    """Check every operation of a model for inf and NaN, in forward and backward, in place.

    The model keeps its class, its parameters and its ``state_dict`` keys. Its outputs and
    gradients stay what they were. ``torch.compile`` it afterwards if you like.

    Args:
        model: any ``nn.Module``. It is changed in place (its ``forward`` is wrapped). Or a
            function, a method or a ``functools.partial``, which is left as it is: what is returned
            is called in its place, and ``@fxguard.instrument`` above a function does that.
        max_frames_to_save: how many frames a report shows, the first bad one included.
        trace_batch_nums: batches, counted from 0, whose every frame is printed, or written where
            ``trace_to`` is given, with those of its backward. Detection is off when any is given.
        abort_after_batch_num: raise :class:`BatchLimitReached` when this batch has finished.
        on_detect: ``"raise"`` writes the report to stderr and raises; ``"warn"`` writes it and
            warns, once for each origin, and goes on. Both tell the logger ``fxguard``. A callable
            is given each :class:`Report`, and nothing is printed.
        granularity: ``"op"`` shows frames of operations and modules, ``"module"`` of modules.
        strict: also raise on bad values that reach no output, such as a ``log(0)`` that a
            ``where`` discards.
        ignore: globs of modules (``"decoder.*"``) or of operations in them
            (``"*.SelfAttention:log"``) that are no cause for a report.
        replay: measure only what leaves each captured graph, and when that turns bad run the
            graph again, with its inputs and random state, every operation checked. Cheaper; bad
            values that reach no output of a graph are not seen then.
        backward: also look at the gradient of each weight when a backward has ended. Where one is
            bad, the graph and its backward run again, and the report names the operation whose
            backward made the first bad gradient. Without grad mode nothing is kept.
        loss_scale: what the script multiplies its loss by, where it skips the steps that this
            makes infinite: a number, or a function that returns the present one. A bad gradient
            that disappears without it is a note. A ``GradScaler`` is found without being named.
        underflow: report an operation, too, that makes as large a share of its elements 0 of those
            that are not 0 in float64 on the same operands: ``0.5`` for a half. Batch 0, every
            100th batch and traced ones run once more for that, in eager mode. A gradient that is 0
            throughout because float16 holds nothing so small is a detection then, and no warning.
            None looks for no underflow.
        reproduce_to: a folder into which the operation that a report blames is written as a test
            that fails, ``test_<operation>.py``, with the slice of its operands that it takes; once
            for each first origin, before the exception. It is what :meth:`Report.reproduce` does.
        reproduce_ranges_only: write random numbers of the same ranges there, and none of the
            model's.
        sync_ranks: with several processes (``torch.distributed``), let all of them know at the
            end of each batch what any of them found, and raise together. Each rank has to call
            the model equally often.
        trace_to: a folder in which a file keeps every frame of the traced batches, and of a batch
            in which something was found (once for each first origin);
            :func:`fxguard.load_trace` reads it.

    Returns:
        The same object; of a function, a module that looks like it and calls it.

    Raises:
        FxguardError: when the arguments cannot work; the model is unchanged then.

    Example:
        >>> model = fxguard.instrument(model)
        >>> loss = model(**batch).loss  # raises fxguard.NonFiniteError at the first inf or NaN
    """
    options = Options(
        max_frames_to_save=max_frames_to_save,
        trace_batch_nums=trace_batch_nums,
        abort_after_batch_num=abort_after_batch_num,
        on_detect=on_detect,
        granularity=granularity,
        strict=strict,
        ignore=ignore,
        replay=replay,
        backward=backward,
        loss_scale=loss_scale,
        underflow=underflow,
        reproduce_to=reproduce_to,
        reproduce_ranges_only=reproduce_ranges_only,
        sync_ranks=sync_ranks,
        trace_to=trace_to,
    )
    module: Any = model if isinstance(model, Module) else module_of(model)
    check_can_instrument(module)
    Guard(module, options).install()
    dynamo.compile_again(module)
    return module  # type: ignore[no-any-return]


def remove(model: Model) -> Model:
    """Undo :func:`instrument`: the model is exactly what it was.

    Where it was not instrumented, undo :func:`keep_float32`.

    Returns:
        The same object; of a function that was instrumented, the function.

    Raises:
        FxguardError: when nothing of fxguard is on the model.
    """
    module: Any = model
    found = find_installed(module)
    if found is None:
        raise UsageError(f"this {type(model).__name__} is not instrumented")
    found.uninstall()
    dynamo.compile_again(module)
    return module.function if isinstance(module, FunctionModule) else model  # type: ignore[return-value]


def guard_of(model: Callable[..., Any]) -> Guard:
    """The :class:`Guard` of an instrumented model, also through ``torch.compile``'s wrapper.

    Raises:
        FxguardError: when the model is not instrumented.
    """
    found = find_guard(getattr(model, "_orig_mod", model))
    if not isinstance(found, Guard):
        raise UsageError(f"this {type(model).__name__} is not instrumented")
    return found
