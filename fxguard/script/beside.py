"""Looks at what a script computes beside its models, and keeps what is bad until it matters."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fxguard.batch.active import ActiveForward
from fxguard.batch.batch import Batch
from fxguard.batch.keys import Key
from fxguard.batch.loss import BACKWARDS, VIEWS
from fxguard.batch.observer import add_evidence, operation_of
from fxguard.errors import FxguardError
from fxguard.forgiving import theirs
from fxguard.graph import nodes
from fxguard.graph.operations import is_move, read_call
from fxguard.measure.native import abs_min_max
from fxguard.records import Role
from fxguard.script.records import UNKNOWN, Record, Records
from fxguard.source.held_tensors import held_name
from fxguard.torch_names import DisableTorchFunction

__all__ = ["Beside"]

CLOSELY = 2  # times that an operation at one place is looked at closely
MOST_BAD = 4096  # values in the batch of what is bad

# What hands a number to Python.
READS = frozenset(
    {
        *("__array__", "__bool__", "__complex__", "__float__", "__format__", "__index__"),
        *("__int__", "__repr__", "item", "numpy", "tolist"),
    }
)


# Called with the batch of what is bad, and the tensors by which that matters now.
Matters = Callable[[Batch, list[Tensor]], object]


class Beside:
    """What one thread of a script computes, apart from its guarded models.

    Args:
        script_read: called when the script has read numbers of bad tensors.
        backward_begins: called when a backward is about to begin with bad tensors.
        gradient_bad: called when a backward that began with these tensors made a bad gradient.
        others_read: called when a model or a loss is about to read bad tensors.

    Attributes:
        pauses: whether nothing is looked at, such as while an optimizer makes a step.
        has_no_model: whether what the script does with a bad number matters, and not what a model
            or its loss does.
    """

    def __init__(
        self,
        script_read: Matters,
        backward_begins: Matters,
        gradient_bad: Callable[[list[Tensor]], object],
        others_read: Matters,
    ) -> None:
        self._script_read = script_read
        self._others_read = others_read
        self._gradient_bad = gradient_bad
        self._backward_begins = backward_begins
        self.pauses = False
        self.has_no_model = True
        self._records = Records()
        self._forward: ActiveForward | None = None  # of what is bad; None as long as nothing is
        self._keys: dict[int, tuple[Record, Key]] = {}  # by id of the record
        self._asked_at = 0  # so many events there have to be for another judgment
        self._times: dict[Any, int] = {}  # by code and instruction

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run an operation of the script."""
        if self.pauses:
            return func(*args, **(kwargs or {}))
        if func in BACKWARDS:
            return self._differentiate(func, args, kwargs or {})
        result = func(*args, **kwargs) if kwargs else func(*args)
        try:
            self._look(func, args, kwargs, result)
        except FxguardError:
            raise
        except theirs():  # a tensor may object to any question
            self.pauses = True
        return result

    def _look(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> None:
        """Look at what an operation has made, or handed to Python."""
        if type(result) is Tensor:
            self._made(func, args, kwargs, result, None)
        elif isinstance(result, (tuple, list)):
            for position, each in enumerate(result):
                if type(each) is Tensor:
                    self._made(func, args, kwargs, each, position)
        elif func is Tensor.__setitem__:
            if type(args[0]) is Tensor:
                self._made(func, args, kwargs, args[0], None)
        elif self._forward is None or not self.has_no_model:
            return
        elif getattr(func, "__name__", "") in READS:
            events = len(self._forward.batch.events)
            if events >= self._asked_at:
                self._asked_at = 2 * events  # a script may read intended infinities all the time
                self._reaches(args, self._script_read)

    def _differentiate(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a backward, and look at what it makes."""
        roots = [x for x in nodes.leaves(args[:1] or kwargs) if isinstance(x, Tensor)]
        if self.has_no_model and self._forward is not None:
            self._reaches(roots, self._backward_begins)
        result = func(*args, **kwargs)
        if self.has_no_model and not self.pauses and self._records.has_bad_gradient():
            with DisableTorchFunction():
                self._gradient_bad(roots)
        return result

    def handed_on(self, values: Any) -> None:
        """A model, or a loss that is followed, is about to read these arguments."""
        if self._forward is not None:
            self._reaches(nodes.leaves(values), self._others_read)

    def leaves(self) -> list[Tensor]:
        """The leaves of autograd that the script has read."""
        return self._records.leaves()

    @property
    def count(self) -> int:
        """How many operations were looked at."""
        return self._records.count

    def _reaches(self, values: Iterable[Any], matters: Matters) -> None:
        """Some of these tensors may be bad, and now that matters."""
        assert self._forward is not None
        live = self._forward.batch.live
        bad = [x for x in values if isinstance(x, Tensor) and live.key_of(x) is not None]
        if not bad:
            return
        before, self.pauses = self.pauses, True
        try:
            matters(self._forward.batch, bad)
        finally:
            self.pauses = before

    def _made(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Any,
        result: Tensor,
        path: int | None,
    ) -> None:
        """Note what an operation has made, or written to."""
        pair = abs_min_max(result)
        if pair is None or not result.is_floating_point():
            return
        if getattr(func, "__name__", "") == "__get__" and func not in VIEWS:
            return  # such as a gradient
        self._records.add(func, args, kwargs, result, path, pair, sys._getframe(4))
        if not math.isfinite(pair[1]):
            self._turned_bad(func, args, kwargs or {}, result)

    @torch.compiler.disable
    def _turned_bad(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, result: Tensor
    ) -> None:
        """Look closer at an operation that made something bad, or handed it on."""
        if self._forward is None:
            self._forward = ActiveForward(Batch(0), {}, {}, None)
        batch = self._forward.batch
        if len(batch.values) > MOST_BAD:
            return
        with DisableTorchFunction():
            record = self._records.of(result)
            if record is None:  # it was called by nobody's code
                return
            call = read_call(func, args, kwargs)
            known = batch.live.key_of(call.first)
            if known is not None and is_move(call, call.first, result):
                batch.live.remember(result, known)
                self._keys[id(record)] = record, known
                return
            inputs = []
            for position, (keyword, tensor) in enumerate(call.reads):
                label = f"input[{position if keyword is None else keyword}]"
                if tensor is result:  # it was written, and held something else before
                    before = record.args[0] if record.args else None
                    if type(before) is Record:
                        inputs.append((label, self._key_of_record(before)))
                elif tensor.is_floating_point():
                    inputs.append((label, self._key_of(tensor, label)))
            key = batch.measure(result, Role.MADE, call.kind)
            if not call.written and self._is_first_at(record):
                add_evidence(batch, call, func, result, [((), key)])
            self._keys[id(record)] = record, key
            operation = operation_of(batch, call, record.place, inputs, [("output", key)])
            batch.events.append(operation)

    def _is_first_at(self, record: Record) -> bool:
        """Whether this is one of the first times that an operation turned bad at its place."""
        times = self._times[record[1:3]] = self._times.get(record[1:3], 0) + 1
        return times <= CLOSELY

    def _key_of(self, tensor: Tensor, label: str) -> Key:
        """The value that a tensor holds in the batch of what is bad."""
        assert self._forward is not None
        batch = self._forward.batch
        key = batch.live.key_of(tensor)
        if key is None and (record := self._records.of(tensor)) is not None:
            key = self._key_of_record(record)
            batch.live.remember(tensor, key)
        if key is None:
            role, name = held_name(tensor) or (Role.INPUT, label)
            key = batch.value_of(tensor, name, role)
        return key

    def _key_of_record(self, record: Record) -> Key:
        """The value of an operation that ran before; it and what led to it get into the batch."""
        assert self._forward is not None
        if id(record) in self._keys:
            return self._keys[id(record)][1]
        batch = self._forward.batch
        tensors: dict[int, Key] = {}

        def stand_in(value: Any) -> Any:
            if type(value) in (tuple, list):
                return type(value)([stand_in(each) for each in value])
            if type(value) is not Record and value is not UNKNOWN:
                return value
            made = torch.empty(0, device="meta")
            if type(value) is Record:
                tensors[id(made)] = self._key_of_record(value)
            return made

        args = stand_in(record.args)
        kwargs = {name: stand_in(each) for name, each in record.kwargs.items()}
        call = read_call(record.func, args, kwargs)
        inputs = [
            (f"input[{position if keyword is None else keyword}]", tensors[id(tensor)])
            for position, (keyword, tensor) in enumerate(call.reads)
            if id(tensor) in tensors
        ]
        key = batch.measured_before(call.kind, record.pair)
        self._keys[id(record)] = record, key
        batch.events.append(operation_of(batch, call, record.place, inputs, [("output", key)]))
        return key
