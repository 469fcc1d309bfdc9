"""The names of a model's modules, weights and buffers, by identity."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from fxguard.errors import UsageError
from fxguard.install._hooks import hooked_parts
from fxguard.ranks.fsdp import is_sharded
from fxguard.records import Role

__all__ = ["Names"]


class Names:
    """The names in one model, as of the last reading.

    Threads may read the names while another thread updates them: a name that stays is never absent.

    Args:
        model: the model, which is not kept alive, and neither are its parts.
        on_read: called after each reading.

    Attributes:
        modules: ``id(module)`` to qualified name, without the model itself.
        tensors: ``id(parameter or buffer)`` to its role and its qualified name.
        changes: how often they were found changed.
        hooked: the submodules that can have hooks.
        weights_stay: whether weights are still there when a report is made; FSDP frees them.
    """

    def __init__(self, model: Module, on_read: Callable[[], None]) -> None:
        self._model = weakref.ref(model)
        self.on_read = on_read
        self.modules: dict[int, str] = {}
        self.tensors: dict[int, tuple[Role, str]] = {}
        self.weights_stay = True
        self.changes = 0
        self.hooked: list[weakref.ref[Module]] = []
        self._known: list[weakref.ref[Module]] = []  # the model and all its submodules
        self._contents: list[Any] = []  # what those held; empty if that cannot be determined
        self._elements = 0  # of all weights
        self._lock = threading.Lock()

    def read(self) -> None:
        """Bring the names up to date."""
        if self._are_the_same():
            return
        model = self.model
        modules = {id(module): name for name, module in model.named_modules()}
        del modules[id(model)]  # the root's frame is made when the batch ends
        weights = dict(model.named_parameters())
        tensors = {id(weight): (Role.WEIGHT, name) for name, weight in weights.items()}
        tensors |= {id(buffer): (Role.BUFFER, name) for name, buffer in model.named_buffers()}
        with self._lock:
            self.changes += 1
            self.hooked = list(map(weakref.ref, hooked_parts(model)))
            self.weights_stay = not is_sharded(model)
            _replace(self.modules, modules)
            _replace(self.tensors, tensors)
            self._known = list(map(weakref.ref, model.modules()))
            self._contents = _contents(model.modules())
            self._elements = sum(map(_size_of, model.parameters()))
        self._leave_with(weight for weight in weights.values() if type(weight) is Tensor)
        self.on_read()

    def _leave_with(self, lent: Iterable[Tensor]) -> None:
        """Forget the names of weights that ``functional_call`` has lent, as soon as they are gone.

        Others may have their identities then, such as a loss that is computed of the model.
        """
        names = weakref.ref(self)

        def gone(identity: int) -> None:
            if (here := names()) is not None:
                here._contents = []  # read again at the next call
                here.tensors.pop(identity, None)

        for weight in lent:
            weakref.finalize(weight, gone, id(weight)).atexit = False

    def _are_the_same(self) -> bool:
        """Whether every module still holds the same objects under the same names.

        A tensor with the identity of an earlier one that is gone has replaced it, under the same
        name.
        """
        with self._lock:
            known = [module for each in self._known if (module := each()) is not None]
            return bool(self._contents) and _contents(known) == self._contents

    @property
    def model(self) -> Module:
        """The model.

        Raises:
            FxguardError: when it is gone.
        """
        model = self._model()
        if model is None:
            raise UsageError("the model is gone: nothing but this guard refers to it")
        return model

    def count_weights(self) -> int:
        """How many elements the weights of the model have, or had when it was last seen."""
        model = self._model()
        return self._elements if model is None else sum(map(_size_of, model.parameters()))

    def module_at(self, name: str) -> Module | None:
        """The submodule that now has a qualified name; None if there is none. "" is the model."""
        found: Any = self.model
        for part in name.split(".") if name else ():
            held = getattr(found, "_modules", None)
            found = held.get(part) if isinstance(held, dict) else None  # not in scripted ones
        return found if isinstance(found, Module) else None

    def tensors_by_name(self) -> dict[tuple[Role, str], Tensor]:
        """Role and qualified name to each weight and buffer that the model has now."""
        model = self.model
        weights = {(Role.WEIGHT, name): weight for name, weight in model.named_parameters()}
        buffers = {(Role.BUFFER, name): buffer for name, buffer in model.named_buffers()}
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


def _size_of(weight: Tensor) -> int:
    """How many elements a weight has; 1 where that is not known yet."""
    return 1 if is_lazy(weight) else weight.numel()


def _replace(old: dict[int, Any], new: dict[int, Any]) -> None:
    old.update(new)
    for gone in old.keys() - new.keys():
        del old[gone]
