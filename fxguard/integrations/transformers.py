"""transformers' ``Trainer``: a callback, and the Trainer's ``--debug underflow_overflow``."""

from __future__ import annotations

import contextlib
from typing import Any

import transformers.trainer
from torch.nn import Module
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import Unpack

from fxguard.api.instrument import guarded, instrument
from fxguard.debug_utils import DebugUnderflowOverflow
from fxguard.install.instrumented import find_guard
from fxguard.options import InstrumentOptions
from fxguard.steps.losses import Losses

__all__ = ["FxguardCallback", "use_for_debug_option"]

NAMES = vars(transformers.trainer)  # where the Trainer looks for the class


class FxguardCallback(TrainerCallback):
    """Guards the model of a ``Trainer``, in training, evaluation and prediction.

    In training, the whole step is checked: a loss that the Trainer computes from the model's
    outputs, the backward, and the optimizer's step.

    A report counts calls of the model as batches, including those of evaluation, and gives the
    number of optimizer steps that were finished before. Works with ``torch_compile=True``, mixed
    precision, gradient accumulation and gradient checkpointing. The model stays instrumented
    afterwards; :func:`fxguard.remove` undoes that.

    Args:
        options: options of :func:`fxguard.instrument`.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[FxguardCallback()])
        >>> trainer.train()  # raises fxguard.NonFiniteError at the first inf or NaN
    """

    def __init__(self, **options: Unpack[InstrumentOptions]) -> None:
        self.options = options
        self.losses: Losses | None = None  # while the Trainer trains

    def guard(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Module | None = None,
        **others: Any,
    ) -> None:
        """Instrument the model if needed, and tell the guard how far training is."""
        if model is None:
            return
        if find_guard(model) is None:
            instrument(model, **self.options)
        guarded(model).optimizer_step = state.global_step

    on_init_end = guard  # before the model is compiled or wrapped
    on_step_begin = guard
    on_step_end = guard

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Instrument the model if needed, and watch whole steps from now on."""
        self.guard(args, state, control, **given)  # a new model, or a callback added late
        self.on_train_end(**given)  # an earlier training may have raised
        model = given.get("model")
        if model is not None:
            self.losses = Losses()
            guarded(model).watch_steps(self.losses)

    def on_train_end(self, *args: Any, model: Module | None = None, **others: Any) -> None:
        """Watch only the model again."""
        if model is not None and self.losses is not None:
            guarded(model).stop_watching_steps()
            self.losses.close()
            self.losses = None


class _Replaced(contextlib.AbstractContextManager["_Replaced"]):
    """Until exited, makes the Trainer's option use fxguard's class."""

    def __init__(self) -> None:
        self.original = NAMES["DebugUnderflowOverflow"]
        NAMES["DebugUnderflowOverflow"] = _guard_once

    def __exit__(self, *exception: object) -> None:
        NAMES["DebugUnderflowOverflow"] = self.original


def use_for_debug_option() -> contextlib.AbstractContextManager[Any]:
    """Let the Trainer's ``--debug underflow_overflow`` use fxguard's ``DebugUnderflowOverflow``.

    Returns:
        A context manager; after its exit, the Trainer uses its own class again.

    Example:
        >>> use_for_debug_option()  # once, at the top of a training script
        >>> with use_for_debug_option():  # or for a while
        ...     trainer.train()
    """
    return _Replaced()


def _guard_once(model: Module, **options: Any) -> DebugUnderflowOverflow | None:
    # The Trainer makes one at each call of `train`.
    return DebugUnderflowOverflow(model, **options) if find_guard(model) is None else None
