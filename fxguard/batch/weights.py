"""Whether weights and buffers still hold the values of an earlier batch.

Weights are read when a report is made, because unchanged values need no measuring before. A frame
of an earlier batch may show such a number only if the weight has not been written since. A write
leaves one of three traces: autograd's version counter, different memory (``parameter.data =``), or,
if a fused optimizer kernel leaves neither, a step of that optimizer.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fxguard.batch.model_reference import reference_to
from fxguard.batch.step_hooks import remove_hooks
from fxguard.findings import Growth
from fxguard.measure import native, traceable
from fxguard.measure.at_hand import VERSION, has_memory, version_of

__all__ = ["Snapshot", "StandingTensors", "WeightGrowth", "grown", "magnitudes"]

CHANGED = "changed since"  # notes of a row, in place of numbers
UNKNOWN = "not kept"

GROWTH = 1e4  # growth of a weight's magnitude that training does not explain

# For some tensors: versions, None without a counter, and addresses of the elements.
State = tuple[tuple[int | None, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a model's weights and buffers at the end of a batch."""

    plain: tuple[weakref.ref[Tensor], ...]
    state: State  # of plain tensors
    wrapped: tuple[tuple[weakref.ref[Tensor], State], ...]  # subclasses, and the state of parts
    step: object  # identical until an optimizer makes a step


class _Steps:
    """Tracks whether an optimizer of this process has made a step."""

    current: object | None = None  # None after a step

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called when an optimizer has made a step."""
        # TorchDynamo may trace this as part of a compiled optimizer. It reads no value that would
        # make TorchDynamo compile again.
        self.current = None


class StandingTensors:
    """The weights and buffers of one guarded model, which is not kept alive.

    Args:
        model: the model, if there is one.
    """

    def __init__(self, model: Module | None) -> None:
        self._model = reference_to(model)
        self._plain: tuple[weakref.ref[Tensor], ...] = ()
        self._wrapped: tuple[weakref.ref[Tensor], ...] = ()
        self._steps = _Steps()
        self._stop: Callable[[], object] | None = None  # stops watching optimizers
        self._last: Snapshot | None = None

    def read(self) -> None:
        """Read which tensors the model has now, since some may have been replaced."""
        tensors: list[Tensor] = []
        if (model := self._model()) is not None:
            tensors = [*model.parameters(), *model.buffers()]
        is_plain = [type(tensor) in (Tensor, Parameter) for tensor in tensors]
        pairs = list(zip(tensors, is_plain, strict=True))
        self._plain = tuple(weakref.ref(tensor) for tensor, plain in pairs if plain)
        self._wrapped = tuple(weakref.ref(tensor) for tensor, plain in pairs if not plain)

    def snapshot(self) -> Snapshot | None:
        """A snapshot to tell later whether a tensor has changed; None without a model."""
        if self._model() is None:
            return None
        plain = self._plain
        try:
            state = native.state_of(plain) or _state([reference() for reference in plain])
        except AttributeError:  # a tensor is gone, and None has no version
            self.read()
            plain = self._plain
            state = _state([reference() for reference in plain])
        if self._stop is None:
            handle = register_optimizer_step_post_hook(self._steps.after_step)
            self._stop = weakref.finalize(self, remove_hooks, [handle])
        if self._steps.current is None:
            self._steps.current = object()
        step, last = self._steps.current, self._last
        is_last = last is not None and last.step is step and last.plain is plain
        if last is not None and is_last and last.state == state and not self._wrapped:
            return last  # for nearly all batches of a model that is not trained
        wrapped = tuple(
            (reference, _state(_parts(tensor)))
            for reference in self._wrapped
            if (tensor := reference()) is not None
        )
        self._last = last = Snapshot(plain, state, wrapped, step)
        return last

    def close(self) -> None:
        """Stop watching optimizers."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    def step_was_made(self) -> None:
        """Called after a step of an optimizer by whoever may hear of it earlier."""
        self._steps.current = None

    def stepped_since(self, snapshot: Snapshot) -> bool:
        """Whether an optimizer of this process has made a step since a snapshot."""
        return snapshot.step is not self._steps.current

    def changes_since(self, snapshot: Snapshot) -> Callable[[Tensor], str]:
        """Why a weight or buffer may have changed since a snapshot; "" if it has not."""
        stepped = self.stepped_since(snapshot)
        pairs = zip(*snapshot.state, strict=True)
        before = [
            (reference, ((version,), (place,)))
            for reference, (version, place) in zip(snapshot.plain, pairs, strict=True)
        ]
        notes: dict[int, str] = {}
        for reference, state in (*before, *snapshot.wrapped):
            tensor = reference()
            if tensor is None:
                continue
            if _state(_parts(tensor)) != state:
                notes[id(tensor)] = CHANGED
            elif None in state[0] or not state[0] or (stepped and tensor.requires_grad):
                notes[id(tensor)] = UNKNOWN
            else:
                notes[id(tensor)] = ""
        return lambda tensor: notes.get(id(tensor), UNKNOWN)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the elements of a tensor; empty if not known."""
    return [tensor] if type(tensor) in (Tensor, Parameter) else traceable.inside(tensor)


def _state(tensors: Sequence[Any]) -> State:
    try:
        return tuple(map(VERSION, tensors)), tuple(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # a part was made in inference mode, or has no storage
        versions = tuple(map(version_of, tensors))
        return versions, tuple(map(_place, tensors))


def _place(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


@torch.no_grad()
def magnitudes(model: Module) -> dict[str, float]:
    """The largest magnitude of each trained weight, by name; one pass, without copies."""
    trained = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and type(parameter) is Parameter
        and parameter.dtype in traceable.FLOATS
        and parameter.numel()
        and not parameter.is_meta
        and has_memory(parameter)
    }
    # All are started before waiting for the first.
    norms = [torch.linalg.vector_norm(parameter, math.inf) for parameter in trained.values()]
    return dict(zip(trained, map(float, norms), strict=True))


class WeightGrowth:
    """How much larger the weights of one model have become since training began.

    Args:
        model: the model, if there is one.
    """

    def __init__(self, model: Module | None) -> None:
        self._model = reference_to(model)
        # The number of the first training batch, and the magnitudes of weights then.
        self.first: tuple[int, dict[str, float]] | None = None

    @property
    def model(self) -> Module | None:
        """The model, if it is still there."""
        return self._model()

    def note_first(self, batch_number: int) -> None:
        """Note the magnitudes of weights when training begins: once, and not in evaluation."""
        model = self._model()
        if model is None or self.first is not None or not torch.is_grad_enabled():
            return
        self.first = batch_number, {}
        with contextlib.suppress(RuntimeError):  # a missing kernel, or no memory
            self.first = batch_number, magnitudes(model)

    def since_first(self, factor: float = GROWTH) -> tuple[Growth, ...]:
        """Weights that are larger by this factor than in the first training batch."""
        model = self._model()
        if model is None or self.first is None or not any(self.first[1].values()):
            return ()
        batch_number, before = self.first
        try:
            return grown(magnitudes(model), before, batch_number, factor)
        except RuntimeError:  # as above
            return ()


def grown(
    now: Mapping[str, float], before: Mapping[str, float], batch: int, factor: float = GROWTH
) -> tuple[Growth, ...]:
    """The weights that have grown beyond reason, the largest growth first.

    Args:
        now: their magnitudes.
        before: their magnitudes at the end of an earlier batch.
        batch: the number of that earlier batch.
        factor: the least growth.
    """
    growths = [
        Growth(name, largest, before[name], batch)
        for name, largest in now.items()
        if math.isfinite(largest) and 0 < before.get(name, 0.0) < largest / factor
    ]
    return tuple(sorted(growths, key=lambda weight: weight.before / weight.now))
