"""Looks at what a script computes beside its models, and keeps what is bad until it matters."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxguard.batch.active import ActiveForward
from fxguard.batch.batch import Batch
from fxguard.batch.events import UncapturedOperation
from fxguard.batch.forget import keep_only
from fxguard.batch.keys import Key
from fxguard.batch.loss import BACKWARDS
from fxguard.batch.observer import add_evidence, operation_of, rows_read
from fxguard.errors import FxguardError
from fxguard.forgiving import theirs
from fxguard.graph import nodes
from fxguard.graph.operations import is_move, read_call
from fxguard.measure.at_hand import name_of_dtype
from fxguard.records import Role
from fxguard.script.because_of import OF_NO_NUMBER, is_bad, raised_because_of
from fxguard.script.blank import Blanks, is_blank
from fxguard.script.noted import Leaves
from fxguard.script.operations import (
    MOST_DEPTH,
    UNKNOWN,
    Record,
    is_record,
    kind_of_code,
    operations_with,
    pair_of,
    place_of,
)
from fxguard.script.transforms import Transforms
from fxguard.source.held_tensors import held_name
from fxguard.torch_names import DisableTorchFunction

__all__ = ["Beside", "Handed"]

CLOSELY = 32  # times that an operation at one place is looked at closely
OF_BAD = 2  # the same if it was given what is bad
MOST_LOOKS = 128
MOST_VALUES = 256
MOST_REPETITIONS = 3  # of a backward: a bad gradient that is not explained stays bad
MOST_RAISED = 32  # exceptions that are looked into: a script may try again and again
MOST_READ = 8  # bad values that one loss has read
MOST_NUMBERS = 256  # that are not finite and were handed to Python
MOST_DERIVED = 64  # integers that are known to come of bad numbers

# What hands a number to Python.
READS = frozenset(
    {
        *("__array__", "__bool__", "__complex__", "__float__", "__format__", "__index__"),
        *("__int__", "__repr__", "item", "numpy", "tolist"),
    }
)

# What asks whether numbers are finite.
ASKS = frozenset({"isfinite", "isinf", "isnan", "isneginf", "isposinf", "isreal"})

# Called with the batch of what is bad, and the values in it that matter now.
Matters = Callable[[Batch, list[Key]], object]


def _nobody(func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return func(*args, **(kwargs or {}))


class Handed(NamedTuple):
    """Bad tensors that somebody has read. It keeps none of them alive."""

    func: Callable[..., Any]
    references: list[weakref.ref[Tensor]]
    keys: list[Key]  # in the batch of what is bad, of those that it knows
    when: int  # how many operations were looked at until then

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are still there."""
        return [tensor for each in self.references if (tensor := each()) is not None]


class Beside:
    """What one thread of a script computes, apart from its guarded models.

    Args:
        script_read: called when the script has read numbers of bad tensors.
        backward_begins: called when a backward is about to begin with bad tensors.
        gradient_bad: called when a backward made a bad gradient, with the tensors that it began
            with, and the gradient that it was given there, or None.
        raised: called when an operation has raised because of bad tensors, with its error.
        is_output: whether a guarded model has returned a tensor.
        is_gradient: whether it is the gradient of a weight that an optimizer steps.

    Attributes:
        operations: runs each operation.
        has_no_model: whether what the script does with a bad number matters, and not what a model
            or its loss does.
        handed: the last bad tensors whose numbers Python was given, or that the script has asked
            whether they are finite.
    """

    def __init__(
        self,
        script_read: Matters,
        backward_begins: Matters,
        gradient_bad: Callable[[list[Tensor], Tensor | None], object],
        raised: Callable[[Exception, Handed], object],
        is_output: Callable[[Tensor], bool],
        is_gradient: Callable[[Tensor], bool],
    ) -> None:
        self._script_read = script_read
        self._backward_begins = backward_begins
        self._gradient_bad = gradient_bad
        self._raised = raised
        self._is_output, self._is_gradient = is_output, is_gradient
        self._gradients: set[Key] = set()  # that were bad
        self.has_no_model = True
        self._objected = 0
        self.handed: Handed | None = None
        self._derived: list[tuple[weakref.ref[Tensor], Handed]] = []  # integers of bad numbers
        self._numbers: dict[int, tuple[float, Handed]] = {}  # that Python was given, by id
        self._exceptions = MOST_RAISED  # that are left
        self._leaves: Leaves = {}
        self.operations = operations_with(self, self._leaves)
        self._transforms = Transforms(self.operations.of)
        self.otherwise: Callable[..., Any] = _nobody  # runs what may belong to a loss
        self.tidy: Callable[[BaseException], object] = str  # is given what goes on to the script
        self._forward: ActiveForward | None = None  # of what is bad; None as long as nothing is
        self._blanks: Blanks | None = None  # all that is bad, as long as they are
        self._most_values = MOST_VALUES  # in its batch, before those that are gone are forgotten
        self._keys: dict[int, tuple[Record, Key]] = {}  # by id of the record
        self._read: list[Key] = []  # by the model that was called last
        self._read_in_loss: list[Key] = []  # since the last backward, the first ones
        self._turned = 0  # how often something was bad
        self._asked_at = 0  # so often it has to have been for another judgment
        self._times: dict[Any, int] = {}  # by code and instruction
        self._repetitions = MOST_REPETITIONS  # of backward passes that are left

    # What is called of an operation that has run: see `Hooks`.

    kind_of = staticmethod(kind_of_code)
    pair_of = staticmethod(pair_of)

    def other(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> None:
        """Something was bad before, and this operation has made no floating-point numbers."""
        if not self._is_well_again():
            self.hands_on(func, args, result)

    def inside(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run an operation inside a transform of ``torch.func``."""
        if func is torch.autograd.grad:
            result = self._transforms.differentiate(func, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        try:
            with DisableTorchFunction():
                self._transforms.look(func, args, kwargs or {}, result)
                if self._transforms.has_bad:
                    self._begin()
        except theirs() as error:  # a tensor may object to any question
            self.objected(error)
        return result

    def raised(
        self, error: BaseException, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """An operation has raised that belongs to no loss."""
        if isinstance(error, Exception):
            self.has_raised(error, func, args, kwargs)
        self.tidy(error)

    def objected(self, error: BaseException) -> None:
        """An error came while an operation was looked at."""
        if isinstance(error, FxguardError):
            raise error
        try:
            raise error
        except theirs():  # a tensor may object to any question
            self._objected += 1

    def hands_on(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any = None) -> None:
        """Note what an operation has handed to Python, or made that is no floating-point number.

        Args:
            func: what ran.
            args: its arguments.
            result: what it made, a tensor or numbers.
        """
        name = getattr(func, "__name__", "")
        is_number = type(result) is Tensor and result.dtype is not torch.bool
        if not is_number and name not in READS and name not in ASKS:
            return
        with DisableTorchFunction():
            found = self._bad_read(func, args)
        if found is None:
            return
        if is_number:
            self._derived[MOST_DERIVED:] = []
            self._derived.insert(0, (weakref.ref(result), found))
            return
        self.handed = found
        self._keep_numbers(result, found)
        if name in READS and self._turned >= self._asked_at:
            self._reaches(args, self._script_read)

    def _keep_numbers(self, result: Any, read: Handed) -> None:
        """Keep the numbers that Python was given and that are not finite, to know them again."""
        for number in nodes.leaves(result):
            is_bad_number = type(number) is float and not math.isfinite(number)
            if is_bad_number and len(self._numbers) < MOST_NUMBERS:
                self._numbers[id(number)] = number, read

    def read_of(self, numbers: Iterable[Any]) -> Handed | None:
        """What the first of these numbers was read of that Python was given."""
        known = (self._numbers.get(id(number)) for number in numbers)
        return next((found[1] for found in known if found is not None), None)

    def _bad_read(self, func: Callable[..., Any], values: Any) -> Handed | None:
        """The bad tensors among some arguments, and those that their integers come of."""
        references: list[weakref.ref[Tensor]] = []
        keys: list[Key] = []
        for each in nodes.leaves(values):
            if type(each) is int and each in OF_NO_NUMBER and self.handed is not None:
                of: Handed | None = self.handed
            elif not isinstance(each, Tensor):
                continue
            else:
                of = next((of for made, of in self._derived if made() is each), None)
            if of is not None:
                references += of.references
                keys += of.keys
            elif (each.is_floating_point() or each.is_complex()) and is_bad(each):
                references.append(weakref.ref(each))
                if self._forward is not None:
                    keys += self._bad_among([each])
        if not references:
            return None
        self._blanks = None
        return Handed(func, references, keys, self.operations.count)

    def has_raised(
        self, error: Exception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """An operation has raised, beside a model or in the loss of one."""
        if self.pauses or not self._exceptions or isinstance(error, FxguardError):
            return
        try:
            with DisableTorchFunction():
                read = self._bad_read(func, (args, kwargs))
                if read is None or func in BACKWARDS:
                    return
                bad = {id(each) for each in read.tensors}
                bad |= {id(made()) for made, of in self._derived}
                if raised_because_of(bad, func, args, kwargs or {}):
                    self._exceptions -= 1
                    self._raised(error, read)
        except theirs():  # a tensor may object to any question
            self._objected += 1

    def ends_of(self, tensors: list[Tensor], keys: list[Key]) -> tuple[Batch, list[Key]]:
        """Bad tensors that somebody has read, as values of the batch of what is bad."""
        return self._begin(), keys or [self._key_of(each, "input[0]") for each in tensors]

    def apart(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a backward, and look at what it makes."""
        kwargs = kwargs or {}
        roots = [x for x in nodes.leaves(args[:1] or kwargs) if isinstance(x, Tensor)]
        gradient = args[1] if len(args) > 1 else kwargs.get("gradient")
        if func is torch.autograd.grad:
            begin = args[:1] or kwargs.get("outputs")
            roots = [x for x in nodes.leaves(begin) if isinstance(x, Tensor)]
            given = nodes.leaves(args[2:3] or kwargs.get("grad_outputs"))
            gradient = next((x for x in given if isinstance(x, Tensor)), None)
        if self.has_no_model and self._forward is not None:
            self._reaches(roots, self._backward_begins)
        result = func(*args, **kwargs)
        if self.has_no_model and self._repetitions and self._has_bad_gradient(result):
            self._repetitions -= 1
            with DisableTorchFunction():
                self._gradient_bad(roots, gradient)
        return result

    def _has_bad_gradient(self, returned: Any) -> bool:
        """Whether a leaf has a gradient that is not finite, or the backward returned one."""
        if any(isinstance(x, Tensor) and is_bad(x) for x in nodes.leaves(returned)):
            return True
        for key, reference in list(self._leaves.items()):
            leaf = reference()
            if leaf is None:
                del self._leaves[key]
            elif leaf.grad is not None and is_bad(leaf.grad):
                return True
        return False

    def model_reads(self, values: Any) -> None:
        """A model is about to read these arguments."""
        self._read = self._bad_handed(values)

    def handed_on(self, values: Any) -> None:
        """A loss that is followed is about to read these arguments."""
        if len(self._read_in_loss) < MOST_READ:
            self._read_in_loss += self._bad_handed(values)

    def _bad_handed(self, values: Any) -> list[Key]:
        """What is bad among arguments that matter now."""
        if self._forward is None or self._is_well_again():
            return []
        found = self._bad_among(nodes.leaves(values))
        if found:
            self._blanks = None
        return found

    def loss_is_over(self) -> None:
        """What a loss has read before matters no more."""
        self._read_in_loss = []

    def take_read(self, *, by_loss: bool) -> tuple[Batch, list[Key]] | None:
        """What a model has read, or its loss, in the batch of what is bad; once."""
        if by_loss:
            read, self._read_in_loss = self._read_in_loss, []
        else:
            read, self._read = self._read, []
        return (self._forward.batch, read) if self._forward is not None and read else None

    def leaves(self) -> list[Tensor]:
        """The leaves of autograd that the script has read."""
        return [leaf for each in self._leaves.values() if (leaf := each()) is not None]

    @property
    def pauses(self) -> bool:
        """Whether nothing is looked at, such as while an optimizer makes a step."""
        return self.operations.pauses

    @pauses.setter
    def pauses(self, pauses: bool) -> None:
        self.operations.pauses = pauses

    @property
    def unseen(self) -> int:
        """How many could not be, because a tensor objected, or its numbers cannot be read."""
        return self._objected + self.operations.unread

    @property
    def count(self) -> int:
        """How many operations were looked at."""
        return self.operations.count + self._transforms.count

    def _bad_among(self, values: Iterable[Any]) -> list[Key]:
        """The values of the batch of what is bad that some tensors hold."""
        assert self._forward is not None
        live = self._forward.batch.live
        found = []
        with DisableTorchFunction():
            for each in values:
                if not isinstance(each, Tensor):
                    continue
                key = live.key_of(each)
                if key is None and self._transforms.of(each) is not None and is_bad(each):
                    key = self._key_of(each, "")
                if key is not None:
                    found.append(key)
        return found

    def _reaches(self, values: Iterable[Any], matters: Matters) -> None:
        """Some of these tensors may be bad, and now that matters."""
        assert self._forward is not None
        if bad := self._bad_among(values):
            self._blanks = None
            self._asked_at = 2 * self._turned  # intended infinities may be read all the time
            if self.has_no_model or not self._come_of_gradients(bad):
                matters(self._forward.batch, bad)

    def _come_of_gradients(self, keys: Iterable[Key]) -> bool:
        """Whether all that led to some values is gradients, which the guard of a model judges."""
        assert self._forward is not None
        made = {}
        for event in self._forward.batch.events:
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
    def turned_bad(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, result: Tensor
    ) -> None:
        """Look closer at an operation that made something bad, or handed it on."""
        kwargs = kwargs or {}
        batch = self._begin(func, result)
        self._turned += 1
        if len(batch.values) > self._most_values:
            self._forget(batch)
        with DisableTorchFunction():
            record = self.operations.of(result)
            if record is None:  # it was called by nobody's code
                return
            call = read_call(func, args, kwargs)
            known = batch.live.key_of(call.first)
            if known is not None and is_move(call, call.first, result):
                batch.live.remember(result, known)
                self._keys[id(record)] = record, known
                return
            inputs = []
            for label, tensor in rows_read(call):
                key = (
                    self._key_before(result, record)
                    if tensor is result
                    else self._key_of(tensor, label)
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

    def _forget(self, batch: Batch) -> None:
        """Forget what leads to no tensor that is bad and alive."""
        alive = {
            key for _, key in batch.live.alive() if not math.isfinite(batch.pairs[key.value][1])
        }
        handed = [of for _, of in (*self._derived, *self._numbers.values())]
        handed += [] if self.handed is None else [self.handed]
        renamed = keep_only(
            batch,
            alive | {*self._read, *self._read_in_loss, *(key for of in handed for key in of.keys)},
        )
        self._read = [renamed[key] for key in self._read]
        self._read_in_loss = [renamed[key] for key in self._read_in_loss]
        self._gradients = {renamed[key] for key in self._gradients if key in renamed}
        for keys in {id(of.keys): of.keys for of in handed}.values():
            keys[:] = [renamed[key] for key in keys]
        self._keys = {
            each: (record, renamed[key])
            for each, (record, key) in self._keys.items()
            if key in renamed
        }
        self._most_values = 2 * len(batch.values) + MOST_VALUES

    def _begin(self, func: Callable[..., Any] = _nobody, made: Tensor | None = None) -> Batch:
        """The batch of what is bad, which begins when something is.

        Args:
            func: what has made something bad.
            made: what it has made.
        """
        if made is None or not is_blank(func):
            self._blanks = None
        elif self._forward is None:
            self._blanks = Blanks()
        if self._blanks is not None and made is not None:
            self._blanks.add(made)
        if self._forward is None:
            batch, self.operations.has_bad = Batch(0), True
            batch.holds_all = False
            self._forward = ActiveForward(batch, {}, {}, None)
        return self._forward.batch

    def _is_well_again(self) -> bool:
        """Whether nothing is bad any more: only memory without contents was, which is gone."""
        if self._blanks is None or self._blanks.are_any():
            return False
        self._forward, self._blanks, self.operations.has_bad = None, None, False
        self._most_values, self._turned, self._asked_at = MOST_VALUES, 0, 0
        self._keys, self._times, self._gradients = {}, {}, set()
        return True

    def _record_of(self, tensor: Tensor) -> Record | None:
        """The record of what a tensor holds, whoever has made it."""
        return self.operations.of(tensor) or self._transforms.of(tensor)

    def _is_first_at(self, record: Record, *, of_bad: bool) -> bool:
        """Whether this is one of the first times that an operation turned bad at its place."""
        place = record.code, record.last, of_bad
        times = self._times[place] = self._times.get(place, 0) + 1
        return times <= (OF_BAD if of_bad else CLOSELY)

    def _key_before(self, written: Tensor, record: Record) -> Key | None:
        """The value that a tensor held before the operation of a record wrote to it."""
        assert self._forward is not None
        before: Any = record.args[0] if record.args else None
        if is_record(before):
            return self._key_of_record(before)
        return self._forward.batch.live.origin_of(written)

    def _key_of(self, tensor: Tensor, label: str) -> Key:
        """The value that a tensor holds in the batch of what is bad."""
        assert self._forward is not None
        batch = self._forward.batch
        key = batch.live.key_of(tensor)
        if key is None and (record := self._record_of(tensor)) is not None:
            key = self._key_of_record(record)
            batch.live.remember(tensor, key)
        if key is None:
            role, name = held_name(tensor) or (Role.INPUT, label)
            key = batch.value_of(tensor, name, role)
            if self._is_output(tensor):
                batch.masks.add(key)
            if role is Role.INPUT and self._is_gradient(tensor):
                self._gradients.add(key)
        return key

    def _key_of_record(self, record: Record, depth: int = MOST_DEPTH) -> Key:
        """The value of an operation that ran before; it and what led to it get into the batch.

        Args:
            record: of the operation.
            depth: how many operations that led to it are gone back, one after the other.
        """
        assert self._forward is not None
        if id(record) in self._keys:
            return self._keys[id(record)][1]
        batch = self._forward.batch
        tensors: dict[int, Key] = {}

        def stand_in(value: Any) -> Any:
            if type(value) in (tuple, list):
                return type(value)([stand_in(each) for each in value])
            if not is_record(value) and value is not UNKNOWN:
                return value
            made = torch.empty(0, device="meta")
            if is_record(value) and depth:
                tensors[id(made)] = self._key_of_record(value, depth - 1)
            return made

        args = stand_in(record.args)
        kwargs = {name: stand_in(each) for name, each in record.kwargs.items()}
        call = read_call(record.func, args, kwargs)
        read = rows_read(call)
        inputs = [(label, tensors[id(x)]) for label, x in read if id(x) in tensors]
        key = batch.measured_before(call.kind, name_of_dtype(record.dtype), record.pair)
        self._keys[id(record)] = record, key
        batch.events.append(operation_of(batch, call, place_of(record), inputs, [("output", key)]))
        return key
