"""A reference to a guarded model that does not keep the model alive.

What fxguard keeps of a model is kept by others too: by TorchDynamo's cache, by the autograd graph
of an output, by a user who keeps the guard. None of them may keep the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch.nn import Module

__all__ = ["ModelReference", "reference_to"]

# Gives the model; None if there is none, or if it is gone.
ModelReference = Callable[[], Module | None]


def reference_to(model: Module | None) -> ModelReference:
    """A weak reference to a model; one to nothing if there is no model."""
    return _no_model if model is None else weakref.ref(model)


def _no_model() -> None:
    return None
