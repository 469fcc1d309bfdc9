"""The values of a script that are not finite, with what led to them, in a batch of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from fxguard import trees
from fxguard.batch.active import ActiveForward
from fxguard.batch.batch import Batch
from fxguard.batch.events import UncapturedOperation
from fxguard.batch.forget import keep_only
from fxguard.batch.keys import Key
from fxguard.batch.observer import add_evidence, operation_of, rows_read
from fxguard.graph.nodes import leaves
from fxguard.graph.operations import Call, is_move, read_call
from fxguard.measure.at_hand import name_of_dtype, version_of
from fxguard.measure.func_levels import Sample, levels_left, without_levels
from fxguard.records import Role
from fxguard.script.because_of import is_bad
from fxguard.script.blank import Blanks, is_blank
from fxguard.script.late import Late, later
from fxguard.script.noted import flat
from fxguard.script.operations import (
    MOST_DEPTH,
    UNKNOWN,
    Operations,
    PlainRecord,
    Record,
    is_record,
    pair_of,
    place_of,
)
from fxguard.script.transforms import Transforms
from fxguard.source.held_tensors import held_name
from fxguard.torch_names import DisableTorchFunction

__all__ = ["BadValues", "Found"]

CLOSELY = 32  # times that an operation at one place is looked at closely
OF_BAD = 2  # the same if it was given what is bad
OFTEN = 64  # times that it is noted before somebody reads it
MOST_LOOKS = 128
MOST_VALUES = 256
OWN_REFERENCES = 3  # of a record that nobody else holds, while it is asked for them


@dataclass(frozen=True)
class Found:
    """What is bad, or may be once a device has told its numbers. It keeps no tensor alive."""

    keys: list[Key] = field(default_factory=list)  # in the batch of what is bad
    records: list[Record] = field(default_factory=list)  # of what is not there yet

    def __bool__(self) -> bool:
        return bool(self.keys or self.records)

    def add(self, other: Found) -> None:
        """Add what was found elsewhere."""
        self.keys.extend(other.keys)
        self.records.extend(other.records)


class BadValues:
    """What is bad in one thread of a script.

    Args:
        operations: has the records of what was made.
        transforms: has those of what ``torch.func`` has made.
        is_output: whether a guarded model has returned a tensor.
        is_gradient: whether it is the gradient of a weight that an optimizer steps.
        needed: gives the lists of values that somebody waits to hear of. They are kept, and named
            anew in their lists.

    Attributes:
        times: how often something was bad.
    """

    def __init__(
        self,
        operations: Operations,
        transforms: Transforms,
        is_output: Callable[[Tensor], bool],
        is_gradient: Callable[[Tensor], bool],
        needed: Callable[[], Iterable[list[Key]]],
    ) -> None:
        self._operations, self._transforms = operations, transforms
        self._is_output, self._is_gradient, self._needed = is_output, is_gradient, needed
        self._forward: ActiveForward | None = None  # None as long as nothing is bad
        self._blanks: Blanks | None = None  # all that is bad, as long as they are
        self._gradients: set[Key] = set()  # that were bad
        self._most = MOST_VALUES  # in its batch, before those that are gone are forgotten
        self._keys: dict[int, tuple[Record, Key]] = {}  # by id of the record
        self._times: dict[Any, int] = {}  # by code and instruction
        self.times = 0

    @property
    def are_any(self) -> bool:
        """Whether something was bad."""
        return self._forward is not None

    @property
    def batch(self) -> Batch:
        """What led to them. It begins when it is first asked for."""
        return self._opened().batch

    def _opened(self) -> ActiveForward:
        if self._forward is None:
            batch, self._operations.has_bad = Batch(0), True
            batch.holds_all = False
            self._forward = ActiveForward(batch, {}, {}, None)
        return self._forward

    def begin(self) -> None:
        """Something is bad from now on, which no operation of the script has made."""
        self._blanks = None
        self._opened()

    def matter(self) -> None:
        """Somebody has read one: from now on, memory without contents is like any other."""
        self._blanks = None

    def are_well_again(self) -> bool:
        """Whether nothing is bad any more: only memory without contents was, which is gone."""
        if self._blanks is None or self._blanks.are_any():
            return False
        self._forward, self._blanks, self._operations.has_bad = None, None, False
        self._most, self.times = MOST_VALUES, 0
        self._keys, self._times, self._gradients = {}, {}, set()
        return True

    def find(self, values: Iterable[Any]) -> Found:
        """What is bad among some tensors. Nothing is led back for that."""
        found = Found()
        if not self.are_any:
            return found
        live = self.batch.live
        with DisableTorchFunction():
            for each in values:
                if not isinstance(each, Tensor):
                    continue
                if (key := live.key_of(each)) is not None:
                    found.keys.append(key)
                elif (record := self._operations.of(each)) is not None:
                    if not math.isfinite(record.pair[1]):
                        found.records.append(record)
                elif self._transforms.of(each) is not None and is_bad(each):
                    found.keys.append(self.key_of(each, ""))
        return found

    def written(self, tensors: Iterable[Tensor]) -> Found:
        """What was written to some tensors, or to their memory: to ``weight.data``, too.

        It has the range that the tensor has now, which may have been given other memory.
        """
        found = Found()
        for each in tensors if self.are_any else ():
            late, record, live = later(each), self._operations.of(each), self.batch.live
            now = repr(pair_of(each) if late is None else late.pair)  # NaN is not equal to itself
            keys = [key for key in (live.key_of(each), live.origin_of(each)) if key is not None]
            same = (key for key in keys if repr(self.batch.pairs[key.value]) == now)
            if record is not None and repr(record.pair) == now:
                found.records.append(record)
            elif (key := next(same, None)) is not None:
                found.keys.append(key)
        return found

    def keys_of(self, found: Found) -> list[Key]:
        """The values in the batch of what was found and is bad; what led to them is there, too."""
        bad = (record for record in found.records if not math.isfinite(record.pair[1]))
        return [*found.keys, *map(self._key_of_record, bad)] if self.are_any else []

    def come_of_gradients(self, keys: Iterable[Key]) -> bool:
        """Whether all that led to some values is gradients, which the guard of a model judges."""
        made = {}
        for event in self.batch.events:
            if isinstance(event, UncapturedOperation):
                made.update({key: event for _, key in event.outputs})
        todo, seen = list(keys), set(keys)
        while todo:
            key = todo.pop()
            read = [each for _, each in made[key].inputs] if key in made else []
            if not read and key not in self._gradients:
                return False
            todo += [each for each in read if each not in seen]
            seen.update(read)
        return True

    @torch.compiler.disable
    def add(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, result: Tensor
    ) -> None:
        """Look closer at an operation that made something bad, or handed it on."""
        batch = self._begin(func, result)
        with DisableTorchFunction():
            record = self._operations.of(result)
            # What was called by nobody's code has none; and what leads to it leads on from it.
            if record is None or self._waits(record, args, self._operations.of):
                return
            call = read_call(func, args, kwargs or {})
            known = batch.live.key_of(call.first)
            if known is None and result is call.first and not call.written:
                known = self._key_of_given(result, "input[0]")  # as `float` gives what is float32
            if known is not None and is_move(call, call.first, result):
                batch.live.remember(result, known)
                self._keys[id(record)] = record, known
                return
            inputs = []
            for label, tensor in rows_read(call):
                key = (
                    self._key_before(result, record)
                    if tensor is result
                    else self.key_of(tensor, label)
                )
                if key is not None:
                    inputs.append((label, key))
            of_bad = any(not math.isfinite(batch.pairs[key.value][1]) for _, key in inputs)
            if self._is_first_at(record, of_bad=of_bad):
                key = batch.measure(result, Role.MADE, call.kind)
                if not call.written:
                    add_evidence(batch, call, func, result, [((), key)], MOST_LOOKS)
            else:
                key = batch.measured_before(call.kind, name_of_dtype(record.dtype), record.pair)
                batch.live.remember(result, key)
            self._keys[id(record)] = record, key
            operation = operation_of(batch, call, place_of(record), inputs, [("output", key)])
            batch.events.append(operation)

    @torch.compiler.disable
    def add_late(self, late: Late) -> None:
        """The same of an operation whose numbers were known only later."""
        record, tensor = late.record, late.tensor
        if is_blank(record.func) and (tensor is None or version_of(tensor) != late.version):
            return  # it was written, or is gone
        batch = self._begin(record.func, tensor)
        with DisableTorchFunction():
            if self._waits(record, late.args, late.record_of):
                return
            call = read_call(record.func, late.args, late.kwargs)
            if tensor is not None and tensor is call.first and not call.written:
                key = batch.live.key_of(tensor) or self._key_of_given(tensor, "input[0]")
                self._keys[id(record)] = record, key
                return
            inputs = []
            for label, read in rows_read(call):
                if (known := late.record_of(read)) is not None:
                    inputs.append((label, self._key_of_record(known)))
                elif late.is_as_it_was(read):
                    inputs.append((label, self.key_of(read, label)))
            of_bad = any(not math.isfinite(batch.pairs[key.value][1]) for _, key in inputs)
            made = None if call.written else late.as_it_was()
            if made is not None and self._is_first_at(record, of_bad=of_bad):
                key = batch.measure(made, Role.MADE, call.kind)
                add_evidence(batch, call, record.func, made, [((), key)], MOST_LOOKS)
            else:
                key = batch.measured_before(call.kind, name_of_dtype(record.dtype), record.pair)
            if tensor is None:
                tensor = late.made  # others may be in its memory, such as a weight
            elif self._operations.of(tensor) is not record:
                tensor = None
            batch.live.remember(tensor, key)
            self._keys[id(record)] = record, key
            operation = operation_of(batch, call, place_of(record), inputs, [("output", key)])
            batch.events.append(operation)

    @torch.compiler.disable
    def add_inside(self, record: PlainRecord, args: Any, kwargs: Any, result: Tensor) -> None:
        """The same of an operation inside a transform: of the first bad sample that it maps over.

        Raises:
            ValueError: if there are samples of samples.
        """
        batch = self._begin()
        if not self._is_first_at(record, of_bad=False):
            return
        sample = Sample(result)
        with levels_left():
            given = trees.tree_map_only(Tensor, sample.of, args)
            named = trees.tree_map_only(Tensor, sample.of, kwargs)
            call = read_call(record.func, given, named)
            if call.written:
                return
            _, inputs = self._call_of(record, MOST_DEPTH)
            key = batch.measure(without_levels(result), Role.MADE, call.kind)
            add_evidence(batch, call, record.func, sample.of(result), [((), key)], MOST_LOOKS)
            self._keys[id(record)] = record, key
            operation = operation_of(batch, call, place_of(record), inputs, [("output", key)])
            batch.events.append(operation)

    def _begin(self, func: Callable[..., Any] | None = None, made: Tensor | None = None) -> Batch:
        """The batch, in which something more is bad.

        Args:
            func: what has made it.
            made: what it has made.
        """
        if func is None or made is None or not is_blank(func):
            self._blanks = None
        elif self._forward is None:
            self._blanks = Blanks()
        if self._blanks is not None and made is not None:
            self._blanks.add(made)
        self.times += 1
        if len(self.batch.values) > self._most:
            self._forget(self.batch)
        return self.batch

    def _forget(self, batch: Batch) -> None:
        """Forget what leads to no tensor that is bad and alive."""
        alive = {
            key for _, key in batch.live.alive() if not math.isfinite(batch.pairs[key.value][1])
        }
        # What was noted later may lead back to a record of what is gone.
        for record, key in self._keys.values():
            if getrefcount(record) > OWN_REFERENCES:
                alive.add(key)
        needed = {id(keys): keys for keys in self._needed()}
        renamed = keep_only(batch, alive.union(*needed.values()))
        for keys in needed.values():
            keys[:] = [renamed[key] for key in keys]
        self._gradients = {renamed[key] for key in self._gradients if key in renamed}
        self._keys = {
            each: (record, renamed[key])
            for each, (record, key) in self._keys.items()
            if key in renamed
        }
        self._most = 2 * len(batch.values) + MOST_VALUES

    def _is_first_at(self, record: Record, *, of_bad: bool) -> bool:
        """Whether this is one of the first times that an operation turned bad at its place."""
        place = record.code, record.last, of_bad, math.isnan(record.pair[1])
        times = self._times[place] = self._times.get(place, 0) + 1
        return times <= (OF_BAD if of_bad else CLOSELY)

    def _waits(
        self, record: Record, args: tuple[Any, ...], known: Callable[[Tensor], Record | None]
    ) -> bool:
        """Whether so much has turned bad at the place of a record that another one waits.

        It waits until somebody reads it. Intended infinities are made all the time. It knows what
        led to it, except what a transform has made.

        Args:
            record: the record.
            args: what it was given.
            known: gives the record of an argument.
        """
        if not record.depth:  # it knows nothing of what led to it
            return False
        place = record.code, record.last
        times = self._times[place] = self._times.get(place, 0) + 1
        if times <= OFTEN or not self._transforms.count:
            return times > OFTEN
        tensors = (each for each in leaves(args) if isinstance(each, Tensor))
        return all(known(each) or self._transforms.of(each) is None for each in tensors)

    def ended(self, record: Record) -> Record:
        """A record of the same value, without what led to it: that is in the batch from now on."""
        key = self._key_of_record(record)
        made = PlainRecord.begins(record)
        self._keys[id(made)] = made, key
        return made

    def leads_from(self, record: Record) -> bool:
        """Whether something bad was led back to a record."""
        return id(record) in self._keys

    def _key_before(self, written: Tensor, record: Record) -> Key | None:
        """The value that a tensor held before the operation of a record wrote to it."""
        before: Any = record.args[0] if record.args else None
        if is_record(before):
            return self._key_of_record(before)
        return self.batch.live.origin_of(written)

    def key_of(self, tensor: Tensor, label: str) -> Key:
        """The value that a tensor holds.

        Args:
            tensor: the tensor.
            label: how it is called if it has no other name.
        """
        batch = self.batch
        key = batch.live.key_of(tensor)
        if key is None and (record := self._record_of(tensor)) is not None:
            key = self._key_of_record(record)
            batch.live.remember(tensor, key)
        return self._key_of_given(tensor, label) if key is None else key

    def _key_of_given(self, tensor: Tensor, label: str) -> Key:
        """The value of a tensor that nothing of the script has made."""
        role, name = held_name(tensor) or (Role.INPUT, label)
        key = self.batch.value_of(tensor, name, role)
        if self._is_output(tensor):
            self.batch.masks.add(key)
        if role is Role.INPUT and self._is_gradient(tensor):
            self._gradients.add(key)
        return key

    def _record_of(self, tensor: Tensor) -> Record | None:
        """The record of what a tensor holds, whoever has made it."""
        return self._operations.of(tensor) or self._transforms.of(tensor)

    def _key_of_record(self, record: Record) -> Key:
        """The value of an operation that ran before; it and what led to it get into the batch."""
        todo = [record]
        while todo:  # all that was bad, without recursion
            bad = [
                each
                for each in flat((todo[-1].args, todo[-1].kwargs))
                if is_record(each)
                and id(each) not in self._keys
                and not math.isfinite(each.pair[1])
            ]
            if bad:
                todo += bad
            else:
                self._noted_key(todo.pop(), MOST_DEPTH)
        return self._keys[id(record)][1]

    def _noted_key(self, record: Record, depth: int) -> Key:
        """The same, with as many operations that led to it as that, one after the other."""
        if id(record) in self._keys:
            return self._keys[id(record)][1]
        batch, (call, inputs) = self.batch, self._call_of(record, depth)
        key = batch.measured_before(call.kind, name_of_dtype(record.dtype), record.pair)
        self._keys[id(record)] = record, key
        batch.events.append(operation_of(batch, call, place_of(record), inputs, [("output", key)]))
        return key

    def _call_of(self, record: Record, depth: int) -> tuple[Call, list[tuple[str, Key]]]:
        """The call of a record, without numbers, and the values that it read."""
        tensors: dict[int, Key] = {}

        def stand_in(value: Any) -> Any:
            if type(value) in (tuple, list):
                return type(value)([stand_in(each) for each in value])
            if not is_record(value) and value is not UNKNOWN:
                return value
            made = torch.empty(0, device="meta")
            if is_record(value) and depth:
                tensors[id(made)] = self._noted_key(value, depth - 1)
            return made

        args = stand_in(record.args)
        kwargs = {name: stand_in(each) for name, each in record.kwargs.items()}
        call = read_call(record.func, args, kwargs)
        read = rows_read(call)
        return call, [(label, tensors[id(x)]) for label, x in read if id(x) in tensors]
