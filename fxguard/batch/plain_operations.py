"""Operations that read tensors and make one, and do nothing else: most of those in a loss.

Such an operation is written down in brief: what ran, where, and the values that it read and made.
Its event is made of that when somebody asks for the events of the batch.

Under ``fxguard run`` C does the same (``fxguard/measure/_losses.h``), and calls what is here where
an operation turns out to be another one.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fxguard.batch.active import ActiveForward
from fxguard.batch.batch import Batch
from fxguard.batch.events import Event, UncapturedOperation
from fxguard.batch.keys import BETWEEN_GRAPHS, Key
from fxguard.batch.observer import Begun, operation_of, rows_read
from fxguard.batch.tape import MADE, Tape
from fxguard.batch.tape_graph import Made, Noted, filled
from fxguard.graph.operations import (
    WRITES,
    has_effects,
    is_custom,
    is_move,
    name_of,
    read_call,
)
from fxguard.graph.random_state import RandomState
from fxguard.graph.tables import CASTS, ENTRIES, MOVES, NOT_OPERATIONS, RUN_FUNCTIONS
from fxguard.measure import native
from fxguard.measure.at_hand import name_of_dtype, version_of
from fxguard.plan.plan import Value
from fxguard.records import Role
from fxguard.source.lines import Place, calling_line
from fxguard.torch_names import DisableTorchFunction, is_any_autocast_on

__all__ = ["Brief", "LossBatch", "Reads", "TurnedBad", "is_plain", "observe_plain", "reads_of"]

_TENSORS = frozenset({Tensor, Parameter})
_NESTED = frozenset({tuple, list})
_LITERALS = frozenset(
    {
        *(bool, int, float, complex, str, NoneType, EllipsisType, torch.Size),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
_OTHERWISE = NOT_OPERATIONS | RUN_FUNCTIONS | ENTRIES
_MOVES = MOVES | CASTS
_DRAWS = frozenset({"bernoulli", "multinomial", "poisson"})  # of those that write nothing


class _Unread(NamedTuple):
    """In the place of a tensor that holds no floating-point numbers."""


_UNREAD = _Unread()


@dataclass(slots=True, eq=False)
class Reads:
    """The tensors that an operation is about to read, by identity.

    Attributes:
        tensors: each of them.
        versions: how often each was written.
        labels: of those with floating-point numbers: keyword or position.
        count: of floating-point tensors without a keyword.
    """

    tensors: dict[int, Tensor] = field(default_factory=dict)
    versions: dict[int, int | None] = field(default_factory=dict)
    labels: dict[int, str | int] = field(default_factory=dict)
    count: int = 0

    def add(self, values: Iterable[Any], keyword: str | None = None) -> bool:
        """Add the tensors among some arguments; returns whether all others are literals."""
        for each in values:
            kind = type(each)
            if kind in _TENSORS:
                self.tensors[id(each)] = each
                self.versions[id(each)] = each._version
                if each.is_floating_point():
                    self.labels.setdefault(id(each), keyword or self.count)
                    self.count += keyword is None
                elif each.is_complex():
                    return False
            elif kind in _NESTED:
                if not self.add(each, keyword):
                    return False
            elif kind not in _LITERALS:
                return False
        return True

    def are_as_before(self) -> bool:
        """Whether none of them was written."""
        versions = self.versions
        return all(tensor._version == versions[key] for key, tensor in self.tensors.items())


class Brief(NamedTuple):
    """An operation that has run, with the keys of values in the place of tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: str
    calls: tuple[str, ...]
    place: Place | None
    made: Key | list[tuple[int, Key]]  # of several results, with their places in it

    @property
    def kind(self) -> str:
        """What ran, as its event names it."""
        return name_of(self.func)

    @property
    def outputs(self) -> list[tuple[str, Key]]:
        """The values that it made, each with its label."""
        if type(self.made) is Key:
            return [("output", self.made)]
        return [(f"output[{place}]", key) for place, key in self.made]  # type: ignore[misc]

    def as_event(self) -> UncapturedOperation:
        """The same as the event of a batch."""
        keys: dict[int, Key] = {}

        def stand_in(value: Any) -> Any:
            if type(value) is Key:
                made = torch.empty(0, device="meta")
                keys[id(made)] = value
                return made
            if type(value) is _Unread:
                return torch.empty(0, dtype=torch.int64, device="meta")
            if type(value) in _NESTED:
                return type(value)([stand_in(each) for each in value])
            return value

        with DisableTorchFunction():
            args = stand_in(self.args)
            kwargs = {name: stand_in(each) for name, each in self.kwargs.items()}
            call = read_call(self.func, args, kwargs)
            inputs = [(label, keys[id(tensor)]) for label, tensor in rows_read(call)]
        return operation_of(self, call, self.place, inputs, self.outputs)


# An operation, its line, and whether it is NaN.
TurnsBad = tuple[str, Place | None, bool]
TurnedBad = Counter[TurnsBad]

USUAL = 64  # times


class _Operand(NamedTuple):
    value: Value
    tensor: weakref.ref[Tensor]
    version: int | None


class LossBatch(Batch):
    """A batch whose plain operations become events when somebody asks for its events.

    Args:
        number: its number.
        turned_bad: how often an operation has made something bad at its line, in this loss and in
            those before it.
    """

    def __init__(self, number: int, turned_bad: TurnedBad) -> None:
        self._events: list[Event | Brief] = []
        self._has_brief = False
        self._turned_bad = turned_bad
        self._looked_at: set[TurnsBad] = set()  # of those that often do, in this loss
        self._operands: dict[int, _Operand] = {}  # by the index of the value
        super().__init__(number)

    def measure(self, tensor: Tensor, role: Role, name: str, *, waits: bool = True) -> Key:
        key = super().measure(tensor, role, name, waits=waits)
        if role is Role.INPUT:
            version = version_of(tensor)
            self._operands[key.value] = _Operand(
                self.values[key.value], weakref.ref(tensor), version
            )
        return key

    def operand(self, key: Key) -> Tensor | None:
        """What an operation was given that nothing observed has made.

        None for another value, or if the tensor is gone, or was written since.
        """
        found = self._operands.get(key.value) if key.is_between_graphs else None
        if found is None or self.values[key.value] is not found.value:  # some are forgotten
            return None
        tensor = found.tensor()
        return None if tensor is None or version_of(tensor) != found.version else tensor

    def is_usual(self, kind: str, place: Place | None, *, is_nan: bool) -> bool:
        """Whether it is usual that an operation turns bad there: a mask, most likely.

        The first one in a loss is looked at all the same.
        """
        here = kind, place, is_nan
        self._turned_bad[here] += 1
        if self._turned_bad[here] <= USUAL:
            return False
        if here not in self._looked_at:
            self._looked_at.add(here)
            return False
        return True

    def look_anew(self) -> None:
        """What is computed from now on is another loss."""
        self._looked_at.clear()

    @property  # type: ignore[override]
    def events(self) -> list[Event]:
        if self._has_brief:
            self._has_brief = False
            self._events[:] = [x.as_event() if type(x) is Brief else x for x in self._events]
        return self._events  # type: ignore[return-value]

    @events.setter
    def events(self, events: list[Event]) -> None:
        self._events, self._has_brief = events, False  # type: ignore[assignment]

    @property
    def brief_events(self) -> Sequence[Event | Brief]:
        """The events, some of them in brief: nothing is made of these."""
        return self._events

    @property
    def event_count(self) -> int:
        return len(self._events)

    def add(self, event: Event) -> None:
        self._events.append(event)

    def forget_events(self) -> None:
        """Forget all events: nothing that is kept came of them."""
        self._events, self._has_brief = [], False

    def has_made(self, tensor: Tensor, kind: str, pair: tuple[float, float]) -> Key:
        """Add a tensor that an operation has made, with its magnitudes."""
        index = len(self.values)
        dtype = name_of_dtype(tensor.dtype)
        self.values.append(_value(kind, dtype, index, tensor.requires_grad))
        self.pairs.append(pair)
        self.autocast = self.autocast or is_any_autocast_on()
        key = Key(BETWEEN_GRAPHS, index)
        self.live.remember(tensor, key)
        return key

    def ran(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: Place | None,
        made: Key,
    ) -> None:
        """Add a plain operation, with the keys of values in the place of tensors."""
        self._has_brief = True
        self._events.append(Brief(func, args, kwargs, self.module, self.calls, place, made))


@functools.lru_cache(maxsize=4096)  # a loop makes the same values again and again
def _value(kind: str, dtype: str, index: int, needs_gradient: bool) -> Value:
    return Value(Role.MADE, kind, dtype, index, needs_gradient=needs_gradient)


@functools.lru_cache(maxsize=4096)
def is_plain(func: Any) -> bool:
    """Whether an operation of torch may be one that only reads its arguments, and draws nothing."""
    return name_of(func) not in _OTHERWISE and not has_effects(func)


def reads_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reads | None:
    """What a plain operation reads; None where its arguments are not all tensors and literals."""
    if not args or not WRITES.isdisjoint(kwargs) or native.is_observed():
        return None
    reads = Reads()
    try:
        is_all = reads.add(args)
        for name, value in kwargs.items():
            is_all = is_all and reads.add((value,), name)
    except RuntimeError:  # nobody counts how often an inference tensor is written
        return None
    return reads if is_all else None


def observe_plain(
    forward: ActiveForward,
    tape: Tape,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reads: Reads,
) -> Any:
    """Run a plain operation of a loss, and write it down in brief.

    Args:
        forward: that of the loss.
        tape: notes it in case of a bad gradient.
        func: what runs.
        args: its arguments.
        kwargs: likewise.
        reads: what it reads.
    """
    batch, keys = forward.batch, dict[int, Any]()
    assert isinstance(batch, LossBatch)
    for identity, label in reads.labels.items():
        tensor = reads.tensors[identity]
        key = batch.live.key_of(tensor)
        if key is None or key.value in batch.details:
            key = forward.key_of(tensor, f"input[{label}]")
        keys[identity] = key
    try:
        result = func(*args, **kwargs)
    except Exception as error:
        _has_raised(forward, tape, func, args, kwargs, reads.versions, keys, error)
        raise
    pair, is_number = None, True
    if type(result) is Tensor and not result.is_inference() and reads.are_as_before():
        is_number = result.is_floating_point() or result.is_complex()
        pair = native.abs_min_max(result) if is_number else None
    if is_number and (pair is None or not math.isfinite(pair[1])):
        _look_closely(forward, tape, func, args, kwargs, reads.versions, keys, result)
        return result
    place = calling_line(1)
    tape.ran(func, args, kwargs, reads.versions, reads.tensors, result, place, batch.module)
    if pair is None:
        return result
    first, kind = args[0], name_of(func)
    if kind in _MOVES and id(first) in keys and _is_moved(first, result):
        batch.live.remember(result, keys[id(first)])
        return result
    if len(keys) < len(reads.tensors):
        keys = dict.fromkeys(reads.tensors, _UNREAD) | keys
    made = batch.has_made(result, kind, pair)
    batch.ran(func, filled(args, keys), filled(kwargs, keys) if kwargs else {}, place, made)
    return result


def _look_closely(
    forward: ActiveForward,
    tape: Tape,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    versions: dict[int, int | None],
    keys: Mapping[int, Key],
    result: Any,
) -> None:
    """Write an operation down in full that has made something bad, or is not plain after all.

    Args:
        forward: that of the loss.
        tape: notes it in case of a bad gradient.
        func: what ran.
        args: its arguments.
        kwargs: likewise.
        versions: how often each tensor among them had been written, by identity.
        keys: of the values that it has read, likewise.
        result: what it returned.
    """
    batch = forward.batch
    assert isinstance(batch, LossBatch)
    begun = _begun(batch, func, args, kwargs, keys)
    begun.tape, begun.noted = tape, tape.before(func, args, kwargs, batch.module)
    begun.noted.versions = versions
    pair = native.abs_min_max(result) if type(result) is Tensor else None
    if pair is None or is_move(begun.call, begun.call.first, result):
        begun.has_returned(result)
        return
    place, kind = calling_line(1), begun.call.kind
    if not batch.is_usual(kind, place, is_nan=math.isnan(pair[1])):
        begun.has_returned(result)
        return
    with DisableTorchFunction():
        tape.after(begun.noted, result, place)
    made = [("output", batch.has_made(result, kind, pair))]
    batch.add(operation_of(batch, begun.call, place, begun.inputs, made))


def _has_raised(
    forward: ActiveForward,
    tape: Tape,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    versions: dict[int, int | None],
    keys: Mapping[int, Key],
    error: Exception,
) -> None:
    """The same of an operation that has raised."""
    _begun(forward.batch, func, args, kwargs, keys).has_raised(error)


def _begun(
    batch: Batch,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    keys: Mapping[int, Key],
) -> Begun:
    """The same operation, to be written down in full."""
    call = read_call(func, args, kwargs)
    inputs = [(label, keys[id(tensor)]) for label, tensor in rows_read(call)]
    return Begun(batch, func, call, inputs)


def _is_moved(before: Tensor, after: Tensor) -> bool:
    """Whether an operation that may move elements has handed on all of a tensor's, as they were."""
    return before.dtype == after.dtype and (after.numel() > 0 or before.numel() == 0)


def _kind_of(func: Any) -> tuple[str, bool, bool] | None:
    """What C has to know of an operation that it may run.

    Returns:
        Its name, whether it may move elements, and whether it draws random numbers, which is the
        only thing that it may do besides reading its arguments. None for all others.
    """
    kind = name_of(func)
    draws = kind in _DRAWS and not is_custom(func)
    return (kind, kind in _MOVES, draws) if draws or is_plain(func) else None


if native.bind_losses is not None:
    native.bind_losses(
        *(Key, Brief, Noted, Made),
        *(_value, name_of_dtype, _kind_of, is_any_autocast_on, _look_closely, _has_raised),
        *(RandomState.now, _UNREAD, _LITERALS, WRITES, MADE),
    )
