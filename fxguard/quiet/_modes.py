"""A training that goes on in evaluation mode."""

from __future__ import annotations

import linecache

import torch
from torch import nn
from torch.nn import Module

from fxguard.quiet._training import MANY, Rule, Step, Training
from fxguard.source.lines import Place
from fxguard.source.own_classes import own_files

__all__ = ["DROPOUTS", "EvaluationInTraining"]

DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class EvaluationInTraining(Rule):
    """Finds dropout and batch norm that are in ``eval()`` in all steps, or in all later ones.

    A model that is in ``eval()`` from the first step on may be meant to be. It is not if it was
    evaluated before that, or if the script never calls ``eval()``, as with ``from_pretrained``.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._in_training = self._in_evaluation = 0  # steps; the latter since the last one of these
        self._idle: list[str] = []
        self._place: Place | None = None  # of the last backward
        self._was_evaluated = False  # before the first step
        self._trains: bool | None = None  # the model, as its last backward ended

    def called(self) -> None:
        """Called when the model has run, in evaluation mode itself."""
        if not self.training.steps and not torch.is_grad_enabled():
            self._was_evaluated = True

    def backward_comes(self, place: Place | None) -> None:
        self._place = place

    def gradients_came(self) -> None:
        model = self.training.model()
        if model is not None:
            self._trains = model.training

    def before(self, step: Step) -> None:
        if self._trains is None or not step.is_learning:
            return
        if self._trains:
            self._in_training, self._in_evaluation = self._in_training + 1, 0
        else:
            self._in_evaluation += 1
            if self._in_evaluation == MANY:
                self._idle = _idle_in(self.training.model())
                if self._in_training:
                    self._tell()
        self._trains = None

    def ends(self) -> None:
        if self._in_training or self._in_evaluation < MANY:
            return
        if self._was_evaluated or not _calls_eval():
            self._tell()

    def _tell(self) -> None:
        if not self._idle:
            return
        since = f"since step {self._in_training + 1}" if self._in_training else "in every step"
        before = f"; step {self._in_training} was the last in train()" if self._in_training else ""
        does = "dropout drops nothing"
        if any("Norm" in name for name in self._idle):
            does = "batch norm uses its running statistics and does not update them"
        self.training.found(
            "evaluation mode in training",
            f"the model is trained in eval() {since}, with {' and '.join(self._idle)}",
            place=self._place,
            evidence=f"{self._in_evaluation} steps{before}; {does}",
            advice="call model.train() after each evaluation, before training goes on"
            if self._in_training
            else "call model.train() before the training",
        )


def _calls_eval() -> bool:
    """Whether the user's own files call ``eval()``."""
    return any(".eval()" in line for file in own_files() for line in linecache.getlines(file))


def _idle_in(model: Module | None) -> list[str]:
    """The kinds of modules that compute something else in evaluation, if all are in that mode."""
    modules = [] if model is None else list(model.modules())
    if any(each.training for each in modules):
        return []  # parts are in eval() on purpose
    return sorted({type(each).__name__ for each in modules if _differs(each)})


def _differs(module: Module) -> bool:
    """Whether a module computes something else in evaluation, and is trained."""
    if isinstance(module, DROPOUTS):
        return module.p > 0
    if isinstance(module, NORMS):
        weight = module.weight
        return module.track_running_stats and (weight is None or weight.requires_grad)
    return False
