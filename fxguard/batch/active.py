"""The forward that runs in this thread: its batch, its names, and its observer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun
from fxguard.batch.keys import Key
from fxguard.batch.tape import Tape
from fxguard.graph.wide_form import is_float
from fxguard.records import Role
from fxguard.torch_names import DisableTorchFunction

__all__ = ["ActiveForward", "Call", "FusedModule", "Layers", "current", "here", "is_any"]


@dataclass(frozen=True, slots=True)
class FusedModule:
    """A module that may run fused kernels, and is therefore observed at the ATen level."""

    module: Module
    observation: contextlib.ExitStack  # closing it ends the observation


class ActiveForward:
    """A guarded forward that is running.

    Args:
        batch: the batch that it reports to.
        names: id of a module to its qualified name.
        tensors: id of a parameter or buffer to its role and qualified name.
        observer: the mode that sees the torch functions between graphs, if any.
        refresh: brings ``names`` and ``tensors`` up to date.
        module_at: gives the module that now has a name; None if there is none.
        weights_stay: whether weights stay as they are until a report is made.
        tape: notes the operations between graphs, in case of a bad gradient; None if none is
            expected.
    """

    def __init__(
        self,
        batch: Batch,
        names: Mapping[int, str],
        tensors: Mapping[int, tuple[Role, str]],
        observer: TorchFunctionMode | None,
        refresh: Callable[[], None] = lambda: None,
        module_at: Callable[[str], Module | None] = lambda name: None,
        weights_stay: bool = True,
        tape: Tape | None = None,
    ) -> None:
        self.batch = batch
        self.tape = tape
        self.names = names
        self.tensors = tensors
        self._refresh = refresh
        self._is_fresh = False
        self.module_at = module_at
        self.observer = observer
        self.weights_stay = weights_stay
        self.fused: FusedModule | None = None  # the outermost one that is running
        self.capturing: object = None  # what is known of the captures in this forward

    def read_names(self) -> None:
        """Bring the names up to date, once for each batch with operations between graphs."""
        if not self._is_fresh:
            self._is_fresh = True
            self._refresh()

    def name_of(self, module: Module) -> str | None:
        """The name of a module that begins outside every graph; None if the model does not have it.

        Checking whether it is still in its old place costs less than searching all modules.
        """
        name = self.names.get(id(module))
        if not self._is_fresh and (name is None or self.module_at(name) is not module):
            self.read_names()
            name = self.names.get(id(module))
        return name

    def _role_of(self, tensor: Tensor, label: str) -> tuple[Role, str]:
        """The role and the name of a tensor.

        As for modules, looking into its old place is faster than reading all names.
        """
        found = self.tensors.get(id(tensor))
        if not self._is_fresh and (found is None or not self._is_at(found[1], tensor)):
            self.read_names()
            found = self.tensors.get(id(tensor))
        return (Role.INPUT, label) if found is None else found

    def _is_at(self, name: str, tensor: Tensor) -> bool:
        module, _, own_name = name.rpartition(".")
        holder = self.module_at(module)
        if holder is None:
            return False
        held = vars(holder)
        return any(held[kind].get(own_name) is tensor for kind in ("_parameters", "_buffers"))

    def leave_fused(self) -> None:
        """Stop observing ATen operations, if that was begun."""
        if self.fused is not None:
            self.fused.observation.close()  # may be called again after an interrupt
            self.fused = None

    def measure_now(self, tensors: Iterable[Any]) -> None:
        """Measure floating-point tensors that a graph is about to read: it may write them."""
        for number, tensor in enumerate(tensors):
            if is_float(tensor):
                with DisableTorchFunction():
                    self.key_of(tensor, f"input[{number}]")

    def key_of(self, tensor: Tensor, label: str) -> Key:
        """The value that a tensor holds: that of a weight or buffer if it is one."""
        if self.batch.arrivals is None:
            known = self.batch.live.key_of(tensor)
            if known is not None and known.value not in self.batch.details:
                return known  # most of them
        role, name = self._role_of(tensor, label)
        if role is Role.WEIGHT and self.weights_stay:
            return self.batch.live.key_of(tensor) or self.batch.weight(tensor, name)
        key = self.batch.value_of(tensor, name, role)
        if role is Role.INPUT and key.is_between_graphs and key.value in self.batch.details:
            self.batch.name_given(key, tensor)
        return key


class Layers(Protocol):
    """Hears of the modules of a model whose layers are captured one by one."""

    running: Module | None  # the layer that runs

    def begins(self, module: Module) -> None:
        """A module is about to run."""

    def returned(self, module: Module) -> None:
        """A module has returned."""


class Call(Protocol):
    """A call of a guarded model that has no forward as long as there is nothing to note."""

    def as_forward(self) -> ActiveForward:
        """The forward, which begins now if it has not begun."""

    def is_of(self, guard: object) -> bool:
        """Whether it is a call of the model that a guard guards."""

    def graph_ran(self, run: GraphRun, outputs: Sequence[Any] | None) -> None:
        """Called when a graph of the model has run; without outputs if it raised."""


class _Here(threading.local):
    forward: ActiveForward | None = None
    layers: Layers | None = None
    call: Call | None = None


# Each guarded forward sets these when it begins, and restores them when it ends.
here = _Here()


def is_any() -> bool:
    """Whether a guarded model runs in this thread."""
    return here.forward is not None or here.call is not None


def current() -> ActiveForward | None:
    """The guarded forward that runs in this thread."""
    if here.forward is None and here.call is not None:
        return here.call.as_forward()
    return here.forward
