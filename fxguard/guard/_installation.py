"""A guard in front of a model's methods: installed, removed, copied with the model."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule
from torch.nn import Module

from fxguard.errors import UsageError
from fxguard.guard._pickled import REDUCE, reduce_plain
from fxguard.guard._stand_in import stand_in_for
from fxguard.guard.instrumented import GUARD, INSTALLED, Installed
from fxguard.guard.plugins import Methods

__all__ = ["Installation"]


class Installation:
    """The replacements for the methods of one model.

    Only one thread may call :meth:`put` and :meth:`take_away`, while no other one calls the model.

    Attributes:
        own_methods: methods that were attributes of the model itself, not of its class.
    """

    def __init__(self, model: Module, methods: Methods) -> None:
        self.model = model
        self.methods = methods
        self.own_methods: dict[str, Any] = {}
        self._wrappers: dict[str, Any] = {}  # the replacement functions, by method

    def put(self, guard: Installed) -> bool:
        """Put a guard in front of the methods; returns whether any method has changed."""
        self.methods.before_install(self.model)
        changed = False
        for name in self.methods.names:
            own = self.model.__dict__.get(name)
            if name not in self._wrappers or own is not self.own_methods.get(name):
                self._wrappers[name] = stand_in_for(getattr(self.model, name), name)
                changed = True
                if own is not None:
                    self.own_methods[name] = own
                else:
                    self.own_methods.pop(name, None)
        self._put_in_front(guard)
        self.methods.after_install(self.model)
        return changed

    def _put_in_front(self, guard: Installed) -> None:
        for name in self.methods.names:
            # A bound method: libraries such as accelerate take it apart and put it together again.
            method = types.MethodType(self._wrappers[name], self.model)
            object.__setattr__(self.model, name, method)
        object.__setattr__(self.model, GUARD, guard)
        object.__setattr__(self.model, REDUCE, types.MethodType(reduce_plain, self.model))
        INSTALLED.add(guard)

    def take_away(self) -> None:
        """Restore the model's own methods.

        Raises:
            FxguardError: when somebody has replaced a method since; nothing is changed then.
        """
        self.methods.before_uninstall(self.model)
        for name, wrapper in self._wrappers.items():
            if getattr(self.model.__dict__.get(name), "__func__", None) is not wrapper:
                raise UsageError(
                    f"the {name} of this {type(self.model).__name__} was replaced after it had "
                    "been instrumented; put fxguard's back first"
                )
        for name in self._wrappers:
            if name in self.own_methods:
                self.model.__dict__[name] = self.own_methods[name]
            else:
                del self.model.__dict__[name]
        INSTALLED.discard(self.model.__dict__.pop(GUARD))
        del self.model.__dict__[REDUCE]
        self.methods.after_uninstall(self.model)

    def original(self, method: str) -> Callable[..., Any]:
        """One of the model's methods without the guard."""
        if method in self.own_methods:
            return self.own_methods[method]  # type: ignore[no-any-return]
        found = inspect.getattr_static(type(self.model), method)
        # A static method takes no model, and neither does a function written in C.
        return found.__get__(self.model) if hasattr(found, "__get__") else found  # type: ignore[no-any-return]

    def stands_in_for_copy(
        self, guard: Installed, plain: Installation, memo: dict[int, Any]
    ) -> None:
        """Take over the replacements from the model that this installation's model is a copy of.

        Args:
            guard: the guard of the copy.
            plain: the installation of the original.
            memo: that of the copying.
        """
        self._wrappers = plain._wrappers
        self.own_methods = copy.deepcopy(plain.own_methods, memo)
        if isinstance(self.model, GraphModule):  # torch makes the copy of its graph, not of these
            self._put_in_front(guard)
