"""Which tensors are differences that look like variances: ``sq - mean ** 2``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxguard.graph.poles import plain

__all__ = ["Differences", "is_rounded_away"]

ROUNDINGS = 64  # of the larger term, that add up in an average


class Differences:
    """Notes operations as they run, and knows differences between a tensor and a square.

    Tensors are known by identity: they must live as long as this object does.
    """

    def __init__(self) -> None:
        self._squares: set[int] = set()
        self._found: dict[int, Tensor] = {}  # the square that was subtracted

    def square_in(self, tensor: Tensor) -> Tensor | None:
        """The square that was subtracted to make a tensor; None if that is no such difference."""
        return self._found.get(id(tensor))

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
        self._squares.add(key) if is_square else self._squares.discard(key)
        before = self._found.get(first) if is_passed else None
        self._found.pop(key, None)
        if is_minus_square or is_minus_product:
            self._found[key] = given[1] if is_minus_square else given[1].detach().square()
        elif before is not None:
            self._found[key] = before


def is_rounded_away(square: Tensor, index: Sequence[int], number: float) -> bool:
    """Whether a number is no more than what roundings leave of the terms of a difference.

    Args:
        square: one of the terms.
        index: of the number in the difference.
        number: the number.
    """
    if not square.is_floating_point() or len(index) != square.dim():
        return False
    largest = abs(float(square.detach()[tuple(index)]))
    return abs(number) <= ROUNDINGS * torch.finfo(square.dtype).eps * largest
