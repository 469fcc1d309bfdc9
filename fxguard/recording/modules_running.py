"""Which module of a model runs, by hooks on all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

__all__ = ["ModulesRunning"]


class ModulesRunning:
    """Hooks on the modules of a model, from now until :meth:`end`.

    A TorchScript module takes none: what it runs is of the module around it.

    Args:
        model: whose modules.
    """

    def __init__(self, model: Module) -> None:
        self._running = [""]
        self._hooks = [
            hook
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
            for hook in (
                module.register_forward_pre_hook(lambda *_, name=name: self._enter(name)),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]

    @property
    def innermost(self) -> str:
        """The name of the module that runs inside all others; "" for the model itself."""
        return self._running[-1]

    def end(self) -> None:
        """Let the model go."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, name: str) -> None:
        self._running.append(name)

    def _leave(self, *_: Any) -> None:
        self._running.pop()
