"""Lightning: a callback that guards the steps of a ``LightningModule``, their losses included."""

from __future__ import annotations

import types
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from fxguard.guard.guard import Guard, guard_of, remove
from fxguard.guard.instrumented import check_can_instrument, find_guard
from fxguard.guard.options import Options

__all__ = ["FxguardCallback"]

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class _StepGuard(Guard):
    """What is a batch here is a step: Lightning calls those, and not ``forward``."""

    methods = STEPS
    kept_for_uninstall = (*Guard.kept_for_uninstall, "compiled", "guarded")

    def install(self) -> None:
        """Put the guard in front of the steps, and below the compiler where there is one."""
        own = self.model.__dict__
        compiler: Any = own.get("_compiler_ctx")  # Lightning's, of a module that was compiled
        self.compiled = {name: own.pop(name) for name in STEPS} if compiler else {}
        super().install()
        self.guarded = {name: own[name] for name in self.compiled}
        for name, step in self.guarded.items():
            own[name] = compiler["dynamo_ctx"](step)
        # TorchDynamo does not get through `log`, which computes nothing. A method: that of a copy
        # of the model logs for the copy.
        kind: Any = type(self.model)
        log = torch.compiler.disable(kind.log)
        own["log"] = types.MethodType(log, self.model)

    def uninstall(self) -> None:
        """Take it away again."""
        own = self.model.__dict__
        own.update(self.guarded)
        super().uninstall()
        own.update(self.compiled)
        del own["log"]


class FxguardCallback(Callback):
    """Guards a ``LightningModule`` while a ``Trainer`` fits, validates, tests or predicts.

    Everything that ``training_step`` and the other steps compute is checked, the loss included;
    one step is one batch. A report also gives ``trainer.global_step``. Works with precision
    plugins, with ``torch.compile`` and with strategies for several processes. When the Trainer
    has finished, the module is what it was.

    Args:
        options: those of :func:`fxguard.instrument`.

    Example:
        >>> trainer = lightning.pytorch.Trainer(callbacks=[FxguardCallback()])
        >>> trainer.fit(module, data)  # raises fxguard.NonFiniteError at the first inf or NaN
    """

    def __init__(self, **options: Any) -> None:
        self.options = Options(**options)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Guard the module, before it is moved, wrapped and compiled."""
        check_can_instrument(pl_module)
        _StepGuard(pl_module, self.options).install()
        self._set_step(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the module as it was."""
        if find_guard(pl_module) is not None:
            remove(pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Lightning tears nothing down after an exception."""
        self.teardown(trainer, pl_module, "")

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Say how far training is."""
        self._set_step(trainer, pl_module)

    def _set_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        guard_of(pl_module).optimizer_step = trainer.global_step
