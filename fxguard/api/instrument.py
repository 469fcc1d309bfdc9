"""``instrument`` puts a guard in front of a model, and ``guard_of`` finds it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.nn import Module

from fxguard.api.listening import guard_with_tools
from fxguard.capture import dynamo
from fxguard.errors import UsageError
from fxguard.guard.for_users import Guard
from fxguard.guard.guard import GuardedModel
from fxguard.install.functions import module_of
from fxguard.install.instrumented import check_can_instrument, find_guard
from fxguard.options import Granularity, OnDetect, Options

__all__ = ["guard_of", "guarded", "instrument"]

Model = TypeVar("Model", bound=Callable[..., Any])


def instrument(
    model: Model,
    *,
    max_frames_to_save: int = 21,
    trace_batch_nums: Iterable[int] = (),
    abort_after_batch_num: int | None = None,
    on_detect: OnDetect = "raise",
    granularity: Granularity = "op",
    strict: bool = False,
    ignore: Iterable[str] = (),
    replay: bool = False,
    full_every: int | None = None,
    backward: bool = True,
    loss_scale: float | Callable[[], float] | None = None,
    underflow: float | None = None,
    reproduce_to: str | os.PathLike[str] | None = None,
    reproduce_ranges_only: bool = False,
    sync_ranks: bool = False,
    trace_to: str | os.PathLike[str] | None = None,
    history: str | os.PathLike[str] | None = None,
    history_weights: bool = False,
    stop_at_event: bool = False,
    recheck: int | None = None,
) -> Model:
    """Check every operation of a model for inf and NaN, in forward and backward, in place.

    The model keeps its class, its parameters and its ``state_dict`` keys. Its outputs and gradients
    do not change. ``torch.compile`` it afterwards if you like.

    Args:
        model: any ``nn.Module``; its ``forward`` is wrapped in place. Or a function, a method or a
            ``functools.partial``, which stays unchanged: call the returned module instead, or
            decorate a function with ``@fxguard.instrument``.
        max_frames_to_save: how many frames a report shows, including the first bad one.
        trace_batch_nums: batches, counted from 0, whose every frame is printed, or written if
            ``trace_to`` is given, including frames of the backward. Detection is off when any is
            given.
        abort_after_batch_num: raise :class:`BatchLimitReached` when this batch has finished.
        on_detect: ``"raise"`` writes the report to stderr and raises; ``"warn"`` writes it and
            warns, once for each origin, and goes on. Both log to ``fxguard``. A callable receives
            each :class:`Report`, and nothing is printed.
        granularity: ``"op"`` shows frames of operations and modules, ``"module"`` only of modules.
        strict: also raise on bad values that reach no output, such as a ``log(0)`` that a
            ``where`` discards.
        ignore: globs of modules (``"decoder.*"``) or of operations in them
            (``"*.SelfAttention:log"``) whose bad values are not reported, nor the bad gradients
            that their backward makes.
        replay: measure only the outputs of each captured graph, and when one turns bad, run the
            graph again with the same inputs and random state and check every operation. This is
            cheaper, but misses bad values that reach no output of a graph.
        full_every: check every operation in each N-th batch: ``100`` for the batches 99, 199 and so
            on. The batches in between are checked as with ``replay``, and so is the first: under a
            compiler the graphs with checks are compiled when the first full batch runs.
        backward: also check the gradient of each weight when a backward has ended. If one is bad,
            the graph and its backward run again, and the report names the operation whose backward
            made the first bad gradient. Without grad mode nothing is kept.
        loss_scale: the factor that the script multiplies its loss by, if it skips steps whose
            gradients become infinite: a number, or a function that returns the current one. A bad
            gradient that disappears without the factor is a note. A ``GradScaler`` is found
            automatically.
        underflow: also report an operation if at least this share of the elements that are not 0 in
            float64, on the same operands, are 0: ``0.5`` for a half. Batch 0, every 100th batch and
            traced batches run once more for this, in eager mode. A gradient that is 0 throughout
            because float16 holds nothing so small is then a detection, not a warning. None switches
            the search off.
        reproduce_to: a folder for failing tests: the operation that a report blames is written as
            ``test_<operation>.py``, with the slice of its operands that is needed; once for each
            first origin, before the exception. This is what :meth:`Report.reproduce` does.
        reproduce_ranges_only: write random numbers of the same ranges there instead of the model's
            own.
        sync_ranks: with several processes (``torch.distributed``), share at the end of each batch
            what any process found, and raise in all of them. Each rank has to call the model
            equally often.
        trace_to: a folder for a file with all frames of the traced batches, and of each batch in
            which something was found (once for each first origin); :func:`fxguard.load_trace` reads
            it.
        history: a folder for the numbers of every training step, from one optimizer's step to the
            next: ranges of operations, losses, gradients, weights, the optimizer's settings and
            states. When the loss or a gradient jumps, a line on stderr says what changed first.
            :func:`fxguard.load_history` reads the folder. It needs ``fxguard[history]``.
        history_weights: when the loss jumps, also run the batch with the weights of each of the
            four steps before. It takes the memory of four copies of the weights.
        stop_at_event: raise :class:`HistoryEvent` at the first event of the history, when the model
            is called next.
        recheck: run each operation of every N-th step a second time on the same operands, forward
            and backward, and compare the bits. What does not repeat is a quiet fault: a processor
            or a memory that makes errors. Such a step takes several times as long.

    Returns:
        The same object; for a function, a module that looks like it and calls it.

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
        full_every=full_every,
        backward=backward,
        loss_scale=loss_scale,
        underflow=underflow,
        reproduce_to=reproduce_to,
        reproduce_ranges_only=reproduce_ranges_only,
        sync_ranks=sync_ranks,
        trace_to=trace_to,
        history=history,
        history_weights=history_weights,
        stop_at_event=stop_at_event,
        recheck=recheck,
    )
    module: Any = model if isinstance(model, Module) else module_of(model)
    check_can_instrument(module)
    guard_with_tools(module, options).install()
    dynamo.compile_again(module)
    return module  # type: ignore[no-any-return]


def guard_of(model: Callable[..., Any]) -> Guard:
    """The :class:`Guard` of an instrumented model, also through ``torch.compile``'s wrapper.

    Raises:
        FxguardError: when the model is not instrumented.
    """
    return guarded(model)


def guarded(model: Callable[..., Any]) -> GuardedModel:
    """The same guard, with what is not for users."""
    found = find_guard(getattr(model, "_orig_mod", model))
    if not isinstance(found, GuardedModel):
        raise UsageError(f"this {type(model).__name__} is not instrumented")
    return found
