"""The lines of a script that write weights or gradients after a backward.

Nothing is measured, and no tensor is kept: only which lines wrote which tensor.
"""

from __future__ import annotations

import os.path
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxguard.graph import nodes
from fxguard.graph.operations import name_of
from fxguard.source.lines import Place, calling_line
from fxguard.torch_names import DisableTorchFunction

__all__ = ["LateWrite", "LateWrites"]

MOST = 2**14  # tensors; more are not noted
MOST_LINES = 4  # of one tensor

_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SETTERS = {
    Tensor.data.__set__: "data",  # type: ignore[attr-defined]
    Tensor.grad.__set__: "grad",  # type: ignore[union-attr]
}
_IN_PLACE = frozenset(
    ["__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__imod__", "__setitem__"]
)


@dataclass(frozen=True, slots=True)
class LateWrite:
    """A write into one tensor."""

    kind: str  # "mul_"
    place: Place  # the user's line

    def __str__(self) -> str:
        file, line = self.place
        return f"{self.kind} ({os.path.basename(file)}:{line})"


class LateWrites:
    """Writes into tensors since the end of a backward, in one thread."""

    def __init__(self) -> None:
        # By the id of a tensor: it may be another one's by now, unless the tensor is older.
        self._by_id: dict[int, tuple[LateWrite, ...]] = {}
        # Assignments to `grad`, by the weight's id.
        self._of_gradients: dict[int, tuple[LateWrite, ...]] = {}
        self._aliases: dict[int, weakref.ref[Tensor]] = {}  # id of `weight.data` to the weight

    def note(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note a call that has returned, if it writes."""
        if func == _DATA:
            self._aliases[id(result)] = weakref.ref(args[0])
            return
        name = getattr(func, "__name__", "")
        if name == "__set__":
            attribute = _SETTERS.get(func, "")
            if attribute:
                by = self._of_gradients if attribute == "grad" else self._by_id
                self._add(by, args[0], f"the assignment to `{attribute}`")
        elif name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            for each in nodes.leaves(args[:1]):
                if isinstance(each, Tensor):
                    self._add(self._by_id, self._base_of(each), name_of(func))

    def of_weight(self, weight: Tensor) -> tuple[LateWrite, ...]:
        """The writes into a weight that was there before the backward, in order."""
        return self._by_id.get(id(weight), ())

    def of_gradient(self, weight: Tensor) -> tuple[LateWrite, ...]:
        """The writes into the gradient of a weight."""
        return (
            *self._of_gradients.get(id(weight), ()),
            *(() if weight.grad is None else self._by_id.get(id(weight.grad), ())),
        )

    def _add(self, known: dict[int, tuple[LateWrite, ...]], tensor: Tensor, kind: str) -> None:
        place = calling_line()
        before = known.get(id(tensor), ())
        if place is None or len(known) >= MOST or len(before) >= MOST_LINES:
            return
        write = LateWrite(kind.removeprefix("_foreach_"), place)
        if write not in before:
            known[id(tensor)] = (*before, write)

    def _base_of(self, tensor: Tensor) -> Tensor:
        """The weight of which a tensor is the `data`."""
        reference = self._aliases.pop(id(tensor), None)
        weight = None if reference is None else reference()
        if weight is None:
            return tensor
        with DisableTorchFunction():  # the id may belong to another tensor by now
            return weight if nodes.memory_of(weight) == nodes.memory_of(tensor) else tensor
