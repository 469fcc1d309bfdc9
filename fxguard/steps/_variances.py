"""Which tensors are differences that look like variances: ``sq - mean ** 2``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fxguard.graph.poles import plain

__all__ = ["Differences"]


class Differences:
    """Notes operations as they run, and knows differences between a tensor and a square.

    Tensors are known by identity: they must live as long as this object does.
    """

    def __init__(self) -> None:
        self._squares: set[int] = set()
        self._found: set[int] = set()

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._found

    def note(
        self,
        kind: str,
        given: Sequence[Tensor],
        numbers: Sequence[Any],
        named: Mapping[str, Any],
        made: Tensor,
    ) -> None:
        """Note one operation that has run.

        Args:
            kind: the operation, ``sub`` or ``sub_``.
            given: the tensors that it read, in order.
            numbers: the other arguments, in order.
            named: arguments by name.
            made: its result, or what it wrote.
        """
        name, key = plain(kind), id(made)
        first, second = [*map(id, given), 0, 0][:2]
        is_same = len(given) > 1 and given[-1] is given[-2]
        is_power = name == "pow" and len(given) == 1 and 2 in numbers
        is_square = name == "square" or is_power or (name == "mul" and len(given) == 2 and is_same)
        is_minus_square = name == "sub" and second in self._squares and first not in self._squares
        is_minus_product = name == "addcmul" and is_same and named.get("value", 1) == -1
        is_passed = name == "add" and len(given) == 1 and first in self._found  # an eps
        for known, belongs in (
            (self._squares, is_square),
            (self._found, is_minus_square or is_minus_product or is_passed),
        ):
            known.add(key) if belongs else known.discard(key)
