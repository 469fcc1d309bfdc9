"""Weights that an optimizer holds, by name."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

from torch import Tensor

__all__ = ["Held"]


class Held(Mapping[str, Tensor]):
    """Those that are alive; a step that looks at none of them pays for none.

    Args:
        weights: by name.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._refs = {name: weakref.ref(weight) for name, weight in weights.items()}

    def __getitem__(self, name: str) -> Tensor:
        weight = self._refs[name]()
        if weight is None:
            raise KeyError(name)
        return weight

    def __iter__(self) -> Iterator[str]:
        return (name for name, ref in self._refs.items() if ref() is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None
