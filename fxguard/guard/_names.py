"""The names of a model's modules, weights and buffers, by identity."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from fxguard.guard._hooks import dictionaries_of
from fxguard.ranks.fsdp import is_sharded
from fxguard.records import Role

__all__ = ["Names"]


class Names:
    """The names in one model, as of the last reading.

    Threads may read the names while another thread updates them: a name that stays is never absent.

    Args:
        model: the model.
        on_read: called after each reading.

    Attributes:
        modules: ``id(module)`` to qualified name, without the model itself.
        tensors: ``id(parameter or buffer)`` to its role and its qualified name.
        weights_stay: whether weights are still there when a report is made; FSDP frees them.
        hooks: the dictionaries with the hooks of each submodule.
    """

    def __init__(self, model: Module, on_read: Callable[[], None]) -> None:
        self.model = model
        self.on_read = on_read
        self.modules: dict[int, str] = {}
        self.tensors: dict[int, tuple[Role, str]] = {}
        self.weights_stay = True
        self.hooks: list[Mapping[str, Any]] = []
        self._known: list[Module] = []  # the model and all its submodules
        self._contents: list[Any] = []  # what those held; empty if that cannot be determined
        self._lock = threading.Lock()

    def read(self) -> None:
        """Bring the names up to date."""
        if self._are_the_same():
            return
        modules = {id(module): name for name, module in self.model.named_modules()}
        del modules[id(self.model)]  # the root's frame is made when the batch ends
        tensors = {id(p): (Role.WEIGHT, name) for name, p in self.model.named_parameters()}
        tensors |= {id(buffer): (Role.BUFFER, name) for name, buffer in self.model.named_buffers()}
        with self._lock:
            self.hooks = dictionaries_of(self.model)
            self.weights_stay = not is_sharded(self.model)
            _replace(self.modules, modules)
            _replace(self.tensors, tensors)
            self._known = list(self.model.modules())
            self._contents = _contents(self._known)
        self.on_read()

    def _are_the_same(self) -> bool:
        """Whether every module still holds the same objects under the same names.

        A tensor with the identity of an earlier one that is gone has replaced it, under the same
        name.
        """
        with self._lock:
            return bool(self._contents) and _contents(self._known) == self._contents

    def module_at(self, name: str) -> Module | None:
        """The submodule that now has a qualified name; None if there is none."""
        found: Any = self.model
        for part in name.split("."):
            held = getattr(found, "_modules", None)
            found = held.get(part) if isinstance(held, dict) else None  # not in scripted ones
        return found if isinstance(found, Module) else None

    def tensors_by_name(self) -> dict[tuple[Role, str], Tensor]:
        """Role and qualified name to each weight and buffer that the model has now."""
        weights = {(Role.WEIGHT, name): weight for name, weight in self.model.named_parameters()}
        buffers = {(Role.BUFFER, name): buffer for name, buffer in self.model.named_buffers()}
        return {**weights, **buffers}


HOLDS = ("_parameters", "_buffers", "_modules")


def _contents(modules: Iterable[Module]) -> list[Any]:
    """What modules hold, as names and identities; empty if one of them does not tell."""
    contents: list[Any] = []
    for module in modules:
        attributes = module.__dict__
        for kind in HOLDS:
            held = attributes.get(kind)
            if not isinstance(held, dict):  # as of a scripted module
                return []
            if held:
                contents.append(kind)
                contents += held
                contents += map(id, held.values())
    return contents


def _replace(old: dict[int, Any], new: dict[int, Any]) -> None:
    old.update(new)
    for gone in old.keys() - new.keys():
        del old[gone]
