"""A guarded model is pickled as the plain model: the loaded model knows nothing of fxguard.

Python looks for ``__reduce_ex__`` on the object itself first. The guard puts one there, which calls
that of the class and marks the state in the result. When a marked state is pickled, the guard's
attributes are left out; when it is deep-copied, they are copied, and the copy is guarded as well.

What a model keeps in float32 changes its results, and a pickle cannot hold it: it is an error.
"""

from __future__ import annotations

import copy
from typing import Any

from torch.nn import Module

from fxguard.errors import UsageError
from fxguard.install.instrumented import GUARD, find_installed

__all__ = ["REDUCE", "reduce_plain"]

REDUCE = "__reduce_ex__"


class State(dict[str, Any]):
    """The attributes of a guarded model, on their way to a copy of it."""

    def __reduce__(self) -> Any:
        guard = self[GUARD]
        if guard.keeps:
            raise _would_be_lost(guard.model)
        own = guard.installation.own_methods
        left_out = {GUARD, REDUCE, *guard.installation.methods.names}
        plain = {name: value for name, value in self.items() if name not in left_out}
        return dict, ({**plain, **own},)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)


def reduce_plain(model: Module, protocol: Any) -> Any:
    """The result of the ``__reduce_ex__`` of a guarded model."""
    reduced = type(model).__reduce_ex__(model, protocol)
    if isinstance(reduced, str):
        return reduced
    callee, args, *rest = reduced
    marked = (callee, tuple(map(_marked, args)), *map(_marked, rest))
    if find_installed(model).keeps and not any(map(_holds_state, (marked[1], *marked[2:]))):
        raise _would_be_lost(model)  # its class packs its attributes in a way of its own
    return marked


def _marked(value: Any) -> Any:
    if isinstance(value, dict) and GUARD in value:
        return State(value)
    if isinstance(value, tuple):  # attributes and slots
        return tuple(map(_marked, value))
    return value


def _holds_state(value: Any) -> bool:
    return isinstance(value, State) or (isinstance(value, tuple) and any(map(_holds_state, value)))


def _would_be_lost(model: Module) -> UsageError:
    return UsageError(
        f"this {type(model).__name__} keeps operations in float32, and a copy of it would not: "
        "save its state_dict, or call fxguard.remove(model) first, and fxguard.keep_float32 on "
        "the loaded model"
    )
