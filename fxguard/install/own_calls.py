"""Classes of modules with a ``__call__`` of their own, which ``Module.__call__`` does not see."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn import Module

__all__ = ["OwnCalls"]

# Makes the function that replaces a ``__call__``.
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class OwnCalls:
    """Replaces each ``__call__`` that a class of modules defines, also of classes to come.

    torch's own classes call ``Module.__call__``, or are not models.

    Args:
        wrap: see :data:`Wrap`.
    """

    def __init__(self, wrap: Wrap) -> None:
        self.wrap = wrap
        self._replaced: list[tuple[type, Any, Any]] = []  # class, its function, and ours

    def begin(self) -> None:
        """Replace them in all classes, and from now on in each new one."""
        for kind in _subclasses(Module, set()):
            self._replace_in(kind)
        Module.__init_subclass__ = classmethod(self._hook())  # type: ignore[assignment]

    def end(self) -> None:
        """Put them back, where nobody has replaced ours since."""
        if "__init_subclass__" in vars(Module):
            del Module.__init_subclass__
        for kind, original, ours in reversed(self._replaced):
            if vars(kind).get("__call__") is ours:
                kind.__call__ = original  # type: ignore[method-assign, operator]
        self._replaced.clear()

    def _hook(self) -> Callable[..., None]:
        def init_subclass(kind: type, **given: Any) -> None:
            super(Module, kind).__init_subclass__(**given)  # type: ignore[misc] # kind is one
            self._replace_in(kind)

        return init_subclass

    def _replace_in(self, kind: type) -> None:
        original = vars(kind).get("__call__")
        if not isinstance(original, types.FunctionType) or _is_of_torch(kind):
            return
        ours = functools.wraps(original)(self.wrap(original))
        kind.__call__ = ours  # type: ignore[method-assign, operator]
        self._replaced.append((kind, original, ours))


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _subclasses(kind: type, seen: set[type]) -> Iterator[type]:
    classes: list[type] = type.__subclasses__(kind)
    for each in classes:
        if each not in seen:
            seen.add(each)
            yield each
            yield from _subclasses(each, seen)
