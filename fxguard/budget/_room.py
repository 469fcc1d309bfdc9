"""Whether the float64 run still has memory, and the first sample of a batch where it has not."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from fxguard import trees
from fxguard.errors import UsageError
from fxguard.measure import free_memory

__all__ = ["NoRoom", "Room", "first_sample"]

KEPT = 12  # bytes of an element: in float64, as autograd saves it, and its own error in float32
STEP = 2**26  # bytes: so often free memory is asked for
LEAST = 2**28  # bytes that stay free


class NoRoom(UsageError):  # noqa: N818 - a reason, as NotJudged is
    """Memory does not suffice."""


class Room:
    """Counts what the float64 run keeps until its backward."""

    def __init__(self) -> None:
        self.kept = 0
        self._asked = 0

    def take(self, tensor: Tensor) -> None:
        """Count a result.

        Raises:
            NoRoom: when hardly any memory is left.
        """
        self.kept += tensor.numel() * KEPT
        if self.kept - self._asked < STEP:
            return
        self._asked = self.kept
        free = free_memory.free_bytes(tensor.device)
        if free is not None and free < max(LEAST, self.kept // 8):
            raise NoRoom("there is no error budget: the float64 run does not fit into memory")


def first_sample(inputs: Any) -> tuple[Any, int]:
    """The first sample of a batch, and how many there are; 1 if that is not known.

    The batch is the first size that most tensors have in common.

    Example:
        >>> first_sample(((torch.ones(8, 3),), {"mask": torch.ones(8, 3, 3)}))[1]
        8
    """
    tensors = [x for x in trees.tree_leaves(inputs) if isinstance(x, Tensor) and x.dim()]
    found = Counter(x.shape[0] for x in tensors).most_common(1)
    batch = found[0][0] if found else 1

    def first(x: Any) -> Any:
        is_batch = isinstance(x, Tensor) and x.dim() and x.shape[0] == batch
        return x[:1] if is_batch else x

    return (trees.tree_map(first, inputs), batch) if batch > 1 else (inputs, 1)
