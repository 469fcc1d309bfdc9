"""The user's name for a tensor that the model was given: that in the model's signature."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ModelCall"]

DEPTH = 8  # of nested containers, since one may contain itself


@dataclass(slots=True)  # not frozen, which takes twice as long to make, at each call
class ModelCall:
    """One running call of a guarded model. It is not changed."""

    owner: str  # the model's class, "Linear"
    method: str  # "forward"
    original: Callable[[str], Callable[..., Any]]  # returns a method without the guard
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def name_of(self, tensor: object) -> str | None:
        """The signature's name for a tensor of this call; None if it is not among the arguments.

        Example:
            >>> original = functools.partial(getattr, model)
            >>> ModelCall("Model", "forward", original, (), {"batch": {"x": x}}).name_of(x)
            "argument `batch['x']` of Model.forward"
        """
        for name, value in self._arguments():
            for path, item in _leaves(name, value, DEPTH):
                if item is tensor:
                    return f"argument `{path}` of {self.owner}.{self.method}"
        return None

    def _arguments(self) -> Iterator[tuple[str, Any]]:
        try:
            signature = inspect.signature(self.original(self.method))
            bound = signature.bind(*self.args, **self.kwargs)
        except (TypeError, ValueError):  # the arguments do not fit the signature
            yield "args", self.args
            yield from self.kwargs.items()
        else:
            yield from bound.arguments.items()


def _leaves(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Every item in nested containers, with the expression that leads to it."""
    yield path, value
    if depth == 0:
        return
    items: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        items = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        items = [(f"{path}.{name}", item) for name, item in zip(value._fields, value, strict=False)]
    elif isinstance(value, (list, tuple)):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        items = [(f"{path}.{name}", getattr(value, name, None)) for name in names]
    for name, item in items:
        yield from _leaves(name, item, depth - 1)
