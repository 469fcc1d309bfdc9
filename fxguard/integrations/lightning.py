"""Lightning: a callback that guards the steps of a ``LightningModule``, their losses included."""

from __future__ import annotations

import types
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn import Module
from typing_extensions import Unpack

from fxguard.api.instrument import guard_of
from fxguard.api.listening import guard_with_tools
from fxguard.guard.guard import GuardedModel
from fxguard.install.instrumented import check_can_instrument, find_guard
from fxguard.install.methods import Methods
from fxguard.install.remove import remove
from fxguard.options import InstrumentOptions, Options
from fxguard.steps.losses import Losses

__all__ = ["FxguardCallback"]

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class _Steps(Methods):
    """Each step is a batch, because Lightning calls the steps and not ``forward``."""

    names = STEPS

    def __init__(self) -> None:
        self.compiled: dict[str, Any] = {}  # the steps as Lightning's compiler made them
        self.guarded: dict[str, Any] = {}  # the guard's functions that were compiled instead

    def before_install(self, model: Module) -> None:
        """Remove the compiler, if there is one: the guard goes below it."""
        own = model.__dict__
        compiler: Any = own.get("_compiler_ctx")  # set by Lightning on a compiled module
        self.compiled = {name: own.pop(name) for name in STEPS} if compiler else {}

    def after_install(self, model: Module) -> None:
        """Put the compiler back, and keep ``log`` out of the graphs."""
        own = model.__dict__
        compiler: Any = own.get("_compiler_ctx")
        self.guarded = {name: own[name] for name in self.compiled}
        for name, step in self.guarded.items():
            own[name] = compiler["dynamo_ctx"](step)
        # TorchDynamo cannot trace `log`, which computes nothing. It has to be a method, so that the
        # one of a copied model logs for the copy.
        kind: Any = type(model)
        own["log"] = types.MethodType(torch.compiler.disable(kind.log), model)

    def before_uninstall(self, model: Module) -> None:
        """Remove the compiler again."""
        model.__dict__.update(self.guarded)

    def after_uninstall(self, model: Module) -> None:
        """Restore the steps and ``log``."""
        model.__dict__.update(self.compiled)
        del model.__dict__["log"]
        self.compiled, self.guarded = {}, {}  # they keep the model alive


class FxguardCallback(Callback):
    """Guards a ``LightningModule`` while a ``Trainer`` fits, validates, tests or predicts.

    Everything that ``training_step`` and the other steps compute is checked, including the loss. In
    training, the backward and the optimizer's step are checked as well. One step is one batch. A
    report also gives ``trainer.global_step``. Works with precision plugins, with ``torch.compile``
    and with strategies for several processes. When the Trainer has finished, the module is
    restored.

    Args:
        options: options of :func:`fxguard.instrument`.

    Example:
        >>> trainer = lightning.pytorch.Trainer(callbacks=[FxguardCallback()])
        >>> trainer.fit(module, data)  # raises fxguard.NonFiniteError at the first inf or NaN
    """

    def __init__(self, **options: Unpack[InstrumentOptions]) -> None:
        self.options = Options(**options)
        self.losses: Losses | None = None  # while the Trainer fits

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Guard the module, before it is moved, wrapped and compiled."""
        check_can_instrument(pl_module)
        guard = guard_with_tools(pl_module, self.options, methods=_Steps())
        guard.install()
        if stage == "fit":
            self.losses = Losses()
            guard.watch_steps(self.losses)
        self._set_step(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the module."""
        guard = find_guard(pl_module)
        if self.losses is not None:
            if isinstance(guard, GuardedModel):
                guard.stop_watching_steps()
            self.losses.close()
            self.losses = None
        if guard is not None:
            remove(pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restore the module after an exception, because Lightning then calls no ``teardown``."""
        self.teardown(trainer, pl_module, "")

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Tell the guard how far training is."""
        self._set_step(trainer, pl_module)

    def _set_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        guard_of(pl_module).optimizer_step = trainer.global_step
