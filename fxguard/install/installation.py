"""A guard in front of a model's methods: installed, removed, copied with the model."""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule
from torch.nn import Module

from fxguard.capture.dynamo import Entry
from fxguard.errors import UsageError
from fxguard.install._pickled import REDUCE, reduce_plain
from fxguard.install.instrumented import GUARD, INSTALLED, Installed
from fxguard.install.methods import Methods
from fxguard.install.stand_in import stand_in_for

__all__ = ["Installation"]


class Installation:
    """The replacements for the methods of one model, which is not kept alive.

    Only one thread may call :meth:`put` and :meth:`take_away`, while no other one calls the model.

    Attributes:
        own_methods: while installed, methods that were attributes of the model itself, not of its
            class. Such a method may keep its model alive.
    """

    def __init__(self, model: Module, methods: Methods) -> None:
        self._model = weakref.ref(model)
        self.methods = methods
        self.own_methods: dict[str, Any] = {}
        self._wrappers: dict[str, Any] = {}  # the replacement functions, by method
        self._known: dict[str, Callable[[], Any]] = {}  # own methods when last installed

    @property
    def model(self) -> Module:
        """The model, which somebody holds who calls this."""
        model = self._model()
        assert model is not None
        return model

    def put(self, guard: Installed) -> bool:
        """Put a guard in front of the methods; returns whether any method has changed."""
        model = self.model
        self.methods.before_install(model)
        changed = False
        for name in self.methods.names:
            own = model.__dict__.get(name)
            if not self._is_known(name, own):
                self._wrappers.pop(name, None)
                self._known[name] = _reference_to(own)
                changed = True
            if name not in self._wrappers:
                self._wrappers[name] = stand_in_for(getattr(model, name), name)
            if own is not None:
                self.own_methods[name] = own
        self._put_in_front(guard)
        self.methods.after_install(model)
        return changed

    def _put_in_front(self, guard: Installed) -> None:
        model = self.model
        for name in self.methods.names:
            # A bound method: libraries such as accelerate take it apart and put it together again.
            object.__setattr__(model, name, types.MethodType(self._wrappers[name], model))
        object.__setattr__(model, GUARD, guard)
        object.__setattr__(model, REDUCE, types.MethodType(reduce_plain, model))
        INSTALLED.add(guard)

    def take_away(self) -> None:
        """Restore the model's own methods.

        Raises:
            FxguardError: when somebody has replaced a method since; nothing is changed then.
        """
        model = self.model
        self.methods.before_uninstall(model)
        for name, wrapper in self._wrappers.items():
            if getattr(model.__dict__.get(name), "__func__", None) is not wrapper:
                raise UsageError(
                    f"the {name} of this {type(model).__name__} was replaced after it had "
                    "been instrumented; put fxguard's back first"
                )
        for name in self._wrappers:
            if name in self.own_methods:
                model.__dict__[name] = self.own_methods[name]
            else:
                del model.__dict__[name]
        for name in self.own_methods:
            del self._wrappers[name]
        self.own_methods.clear()
        INSTALLED.discard(model.__dict__.pop(GUARD))
        del model.__dict__[REDUCE]
        self.methods.after_uninstall(model)

    def original(self, method: str) -> Callable[..., Any]:
        """One of the model's methods without the guard."""
        model = self.model
        if method in self.own_methods:
            return self.own_methods[method]  # type: ignore[no-any-return]
        if GUARD not in model.__dict__:
            return getattr(model, method)  # type: ignore[no-any-return]
        return _of_class(model, method)

    def entry(self, method: str) -> Entry:
        """The same as a function that keeps no model alive, where there is one."""
        original = self.original(method)
        if isinstance(original, types.MethodType) and original.__self__ is self._model():
            return Entry(original.__func__, takes_model=True)
        return Entry(original, takes_model=False)

    def stands_in_for_copy(
        self, guard: Installed, plain: Installation, memo: dict[int, Any]
    ) -> None:
        """Take over the replacements from the model that this installation's model is a copy of.

        Args:
            guard: the guard of the copy.
            plain: the installation of the original.
            memo: that of the copying.
        """
        self._wrappers = plain._wrappers.copy()
        self.own_methods = copy.deepcopy(plain.own_methods, memo)
        self._known = {
            name: _reference_to(self.own_methods.get(name)) for name in self.methods.names
        }
        if isinstance(self.model, GraphModule):  # torch makes the copy of its graph, not of these
            self._put_in_front(guard)

    def _is_known(self, name: str, own: Any) -> bool:
        """Whether a model's own method, None for none, is what it was when last installed."""
        known = self._known.get(name)
        if own is None or known is None:
            return own is None and known is _no_own
        return known() is own


def _of_class(model: Module, method: str) -> Callable[..., Any]:
    found = inspect.getattr_static(type(model), method)
    # A static method takes no model, and neither does a function written in C.
    return found.__get__(model) if hasattr(found, "__get__") else found  # type: ignore[no-any-return]


def _no_own() -> None:
    return None


def _reference_to(own: Any) -> Callable[[], Any]:
    """A weak reference to a model's own method, if that can be: it may hold its model."""
    if own is None:
        return _no_own
    try:
        return weakref.ref(own)
    except TypeError:  # an object with slots
        return lambda: own
