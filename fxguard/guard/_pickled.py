"""A guarded model is pickled as the plain model: the loaded model knows nothing of fxguard.

Python looks for ``__reduce_ex__`` on the object itself first. The guard puts one there, which calls
that of the class and marks the state in the result. When a marked state is pickled, the guard's
attributes are left out; when it is deep-copied, they are copied, and the copy is guarded as well.
"""

from __future__ import annotations

import copy
from typing import Any

from torch.nn import Module

from fxguard.guard.instrumented import GUARD

__all__ = ["REDUCE", "reduce_plain"]

REDUCE = "__reduce_ex__"


class State(dict[str, Any]):
    """The attributes of a guarded model, on their way to a copy of it."""

    def __reduce__(self) -> Any:
        guard = self[GUARD]
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
    return (callee, tuple(map(_marked, args)), *map(_marked, rest))


def _marked(value: Any) -> Any:
    if isinstance(value, dict) and GUARD in value:
        return State(value)
    if isinstance(value, tuple):  # attributes and slots
        return tuple(map(_marked, value))
    return value
