"""Which models are instrumented, and which cannot be."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.nn import Module

from fxguard.batch.model_reference import ModelReference
from fxguard.capture.dynamo import is_compiled
from fxguard.errors import UsageError

__all__ = [
    "GUARD",
    "INSTALLED",
    "Installed",
    "check_can_instrument",
    "check_kind",
    "find_guard",
    "find_installed",
    "unwrapped",
]

# The attribute of the model that holds its guard. Besides `forward` it is the only one.
GUARD = "_fxguard"


class Installed(Protocol):
    """A guard or a keeper in front of a model, as far as it matters here."""

    reference: ModelReference  # to the model
    checks: bool  # True for a guard; a keeper only keeps operations in float32

    @property
    def keeps(self) -> bool:
        """Whether it keeps operations in float32."""


INSTALLED: weakref.WeakSet[Installed] = weakref.WeakSet()


def find_guard(model: Any) -> Any:
    """The guard of a model, None if it has none."""
    found = find_installed(model)
    return found if found is not None and found.checks else None


def find_installed(model: Any) -> Any:
    """The guard or the keeper in front of a model; None if there is neither."""
    return model.__dict__.get(GUARD) if isinstance(model, Module) else None


def unwrapped(module: Module) -> Module:
    """The user's module inside the wrappers of torch.compile and DistributedDataParallel."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, torch.nn.parallel.DistributedDataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


def check_can_instrument(model: Any) -> None:
    """Raise an error that says what to do if a model cannot be instrumented."""
    check_kind(model)
    for name, module in model.named_modules():
        if find_guard(module) is not None:
            what = f"its submodule {name!r}" if name else f"this {type(model).__name__}"
            raise UsageError(f"{what} is instrumented already; call fxguard.remove on it first")
    for guard in INSTALLED:
        whole = guard.reference()
        if guard.checks and whole is not None and any(part is model for part in whole.modules()):
            raise UsageError(
                f"this {type(model).__name__} is part of a {type(whole).__name__} that is "
                "instrumented already"
            )


def check_kind(model: Any) -> None:
    """Raise an error if a model is of a kind that cannot be instrumented."""
    if not isinstance(model, Module):
        raise UsageError(f"this needs a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.nn.DataParallel):
        raise UsageError(
            "nn.DataParallel copies the model at each forward and cannot be instrumented; "
            "use torch.nn.parallel.DistributedDataParallel"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "a TorchScript module has no Python forward to capture; instrument the module "
            "that it was made from"
        )
    if is_compiled(model):
        raise UsageError(
            "this is the result of torch.compile; instrument the model first, then compile it: "
            "torch.compile(fxguard.instrument(model))"
        )
