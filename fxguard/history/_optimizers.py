"""The optimizers of a script that step weights of one model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import Optimizer

from fxguard.history._open_step import OpenStep
from fxguard.history._weights import WeightsOfOptimizer
from fxguard.steps.step_hooks import StepHooks

__all__ = ["Optimizers"]


class Optimizers:
    """Notes what optimizers do, from the first step of each on.

    Args:
        step: the step that runs.
        model: gives the model; None while it has not run, or when it is gone.
        stepped: called behind each step of weights of the model.
    """

    def __init__(
        self, step: OpenStep, model: Callable[[], Module | None], stepped: Callable[[], object]
    ) -> None:
        self._step, self._model, self._stepped = step, model, stepped
        self._known: weakref.WeakKeyDictionary[Optimizer, WeightsOfOptimizer]
        self._known = weakref.WeakKeyDictionary()
        self._copies: dict[str, Tensor] = {}  # of weights behind the last step of any, by name
        self._hooks = StepHooks(self._before, self._after)

    def backward_ended(self) -> None:
        """Keep what a backward has made of gradients."""
        for weights in self._known.values():
            weights.backward_ended()

    def close(self) -> None:
        """Hear of no further step."""
        self._hooks.close()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        weights = self._weights_of(optimizer)
        if weights is not None:
            weights.before()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        weights = self._weights_of(optimizer)
        if weights is not None:
            weights.after(optimizer)
            self._copies.update(weights.copies)
            self._stepped()

    def _weights_of(self, optimizer: Optimizer) -> WeightsOfOptimizer | None:
        """The weights of the model that an optimizer steps; None for none, as in a mere part."""
        found = self._known.get(optimizer)
        if found is None or not found.is_of(optimizer):
            model = self._model()
            if model is None:
                return None
            names = {id(x): name for name, x in model.named_parameters()}
            found = self._known[optimizer] = WeightsOfOptimizer(
                self._step, optimizer, names, self._copies
            )
        return found if found.is_of_model else None
