"""Looks at what a script computes beside its models, and keeps what is bad until it matters."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from fxguard.batch.batch import Batch
from fxguard.batch.keys import Key
from fxguard.batch.loss import BACKWARDS
from fxguard.errors import FxguardError
from fxguard.forgiving import theirs
from fxguard.graph import nodes
from fxguard.script.bad_values import BadValues, Found
from fxguard.script.because_of import OF_NO_NUMBER, is_bad, raised_because_of
from fxguard.script.in_front import Arrival, InFront
from fxguard.script.late import LateOperations, LatePair, later
from fxguard.script.noted import Leaves, leaves_before
from fxguard.script.operations import (
    PlainRecord,
    Record,
    kind_of_code,
    operations_with,
    pair_of,
)
from fxguard.script.reachable import tensors_within_reach
from fxguard.script.tangents import Derived
from fxguard.script.transforms import Differentiated, Transforms
from fxguard.torch_names import DisableTorchFunction

__all__ = ["Beside", "Handed"]

MOST_REPETITIONS = 3  # of a backward: a bad gradient that is not explained stays bad
MOST_RAISED = 32  # exceptions that are looked into: a script may try again and again
MOST_WALKS = 64  # through all that a model may read, while something is bad
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


class _InBackward(TorchFunctionMode):
    """Runs the operations of an autograd function's own backward."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._run(func, args, kwargs)


class Handed(NamedTuple):
    """Bad tensors that somebody has read. It keeps none of them alive."""

    func: Callable[..., Any]
    references: list[weakref.ref[Tensor]]
    found: Found  # the same as far as they were seen to be made
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
        gradient_bad: called when a backward made a bad gradient, with the nodes of autograd that
            it began with, and the gradients there.
        raised: called when an operation has raised because of bad tensors, with its error.
        is_output: whether a guarded model has returned a tensor.
        is_gradient: whether it is the gradient of a weight that an optimizer steps.

    Attributes:
        operations: runs each operation.
        has_no_model: whether what the script does with a bad number matters, and not what a model
            or its loss does.
        backwards: how many backward passes have begun.
        handed: the last bad tensors whose numbers Python was given, or that the script has asked
            whether they are finite.
    """

    def __init__(
        self,
        script_read: Matters,
        backward_begins: Matters,
        gradient_bad: Callable[[Sequence[Arrival]], object],
        gradient_inside_bad: Callable[[PlainRecord, Differentiated | Derived], object],
        raised: Callable[[Exception, Handed], object],
        is_output: Callable[[Tensor], bool],
        is_gradient: Callable[[Tensor], bool],
    ) -> None:
        self._script_read = script_read
        self._backward_begins = backward_begins
        self._gradient_bad = gradient_bad
        self._gradient_inside_bad = gradient_inside_bad
        self._raised = raised
        self.has_no_model = True
        self._objected = 0
        self.backwards = 0
        self.handed: Handed | None = None
        self._derived: list[tuple[weakref.ref[Tensor], Handed]] = []  # integers of bad numbers
        self._numbers: dict[int, tuple[float, Handed]] = {}  # that Python was given, by id
        self._exceptions = MOST_RAISED  # that are left
        self._walks = MOST_WALKS  # likewise
        self._leaves: Leaves = {}
        self.operations = operations_with(self, self._leaves)
        self._transforms = Transforms(
            self.operations.of, self._ended, self._inside_turned_bad, self._differentiated
        )
        self.otherwise: Callable[..., Any] = _nobody  # runs what may belong to a loss
        self.tidy: Callable[[BaseException], object] = str  # is given what goes on to the script
        self._bad = BadValues(
            self.operations, self._transforms, is_output, is_gradient, self._keys_held
        )
        self._late = LateOperations(self.operations.of)
        self._derived_later: list[tuple[weakref.ref[Tensor], Handed]] = []  # that may be such
        self._read = Found()  # by the model that was called last
        self._read_in_loss = Found()  # since the last backward, the first ones
        self._made_in_backward = Found()  # by an autograd function of the script, in the last one
        self._made_by = ""  # that function
        self._asked_at = 0  # so often something has to have been bad for another judgment
        self._repetitions = MOST_REPETITIONS  # of backward passes that are left
        self._repetitions_inside = MOST_REPETITIONS  # of those inside transforms
        self._in_front = InFront()

    # What is called of an operation that has run: see `Hooks`.

    kind_of = staticmethod(kind_of_code)

    def pair_of(self, tensor: Tensor) -> tuple[float, float] | LatePair | None:
        """The smallest and the largest magnitude of a tensor, or what has them later."""
        late = later(tensor)
        return pair_of(tensor) if late is None else late

    def waits(self, record: Record, args: tuple[Any, ...], kwargs: Any, result: Tensor) -> None:
        """An operation has made something whose numbers are on a device."""
        self.operations.awaits = True
        with DisableTorchFunction():
            is_full = self._late.add(record, args, kwargs or {}, result)
        if is_full:
            self._settle()

    def _ended(self, record: Record) -> Record:
        """A record of something bad, without what led to it, which is kept elsewhere."""
        self._settle()
        return self._bad.ended(record)

    def _settle(self) -> None:
        """Wait for the numbers that are on a device."""
        if self.operations.awaits:
            self.operations.awaits = False
            with DisableTorchFunction():
                for late in self._late.settle():
                    self._bad.add_late(late)
                for made, read in self._derived_later:
                    if any(not math.isfinite(each.pair[1]) for each in read.found.records):
                        self._derived.insert(0, (made, read))
                del self._derived[MOST_DERIVED:]
            self._derived_later = []

    def turned_bad(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, result: Tensor
    ) -> None:
        """An operation has made something bad, or handed it on."""
        self._settle()
        self._bad.add(func, args, kwargs, result)

    def other(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> None:
        """An operation has made no floating-point numbers, and something bad may be there."""
        name = getattr(func, "__name__", "")
        if name in READS or name in ASKS:
            self._settle()
        elif self.operations.awaits and type(result) is Tensor and result.dtype is not torch.bool:
            self._derive_later(func, args, result)
        if self._bad.are_any and not self._is_well_again():
            self.hands_on(func, args, result)

    def _derive_later(self, func: Callable[..., Any], args: tuple[Any, ...], made: Tensor) -> None:
        """Note integers that may come of bad numbers."""
        with DisableTorchFunction():
            records = self._late.among(args)
            tensors = [weakref.ref(x) for x in nodes.leaves(args) if isinstance(x, Tensor)]
        if records:
            read = Handed(func, tensors, Found([], records), self.operations.count)
            self._derived_later.append((weakref.ref(made), read))
            del self._derived_later[:-MOST_DERIVED]

    def _is_well_again(self) -> bool:
        if self._bad.are_well_again():
            self._asked_at = 0
            return True
        return False

    def inside(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run an operation inside a transform of ``torch.func``."""
        if func is torch.autograd.grad:
            result = self._transforms.differentiate(func, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        self.look_inside(func, args, kwargs, result)
        return result

    def look_inside(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> None:
        """Look at what an operation has made inside a transform."""
        try:
            with DisableTorchFunction():
                self._transforms.look(func, args, kwargs or {}, result)
                if self._transforms.has_bad:
                    self._bad.begin()
        except theirs() as error:  # a tensor may object to any question
            self.objected(error)

    def _inside_turned_bad(
        self, record: PlainRecord, args: Any, kwargs: Any, result: Tensor
    ) -> None:
        """An operation inside a transform has made something bad of what was not."""
        try:
            self._bad.add_inside(record, args, kwargs, result)
        except theirs() as error:  # it may not run again, or map over samples of samples
            self.objected(error)

    def leads_from(self, record: PlainRecord) -> bool:
        """Whether something bad that was read was led back to a record."""
        return self._bad.leads_from(record)

    def _differentiated(self, made: PlainRecord, how: Differentiated | Derived) -> None:
        """A backward inside a transform has made something bad, or a derivative of forward mode."""
        if self._repetitions_inside and not self.pauses:
            self._repetitions_inside -= 1
            try:
                self._gradient_inside_bad(made, how)
            except theirs() as error:  # a graph may know little of its operations
                self.objected(error)

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
        if name in READS and self._bad.times >= self._asked_at:
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
        self._settle()
        references: list[weakref.ref[Tensor]] = []
        found = Found()
        for each in nodes.leaves(values):
            if type(each) is int and each in OF_NO_NUMBER and self.handed is not None:
                of: Handed | None = self.handed
            elif not isinstance(each, Tensor):
                continue
            else:
                of = next((of for made, of in self._derived if made() is each), None)
            if of is not None:
                references += of.references
                found.add(of.found)
            elif (each.is_floating_point() or each.is_complex()) and is_bad(each):
                references.append(weakref.ref(each))
                found.add(self._bad.find([each]))
        if not references:
            return None
        self._bad.matter()
        return Handed(func, references, found, self.operations.count)

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

    def ends_of(self, tensors: list[Tensor], found: Found) -> tuple[Batch, list[Key]]:
        """Bad tensors that somebody has read, as values of the batch of what is bad."""
        batch, keys = self._bad.batch, self._bad.keys_of(found)
        return batch, keys or [self._bad.key_of(each, "input[0]") for each in tensors]

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
        self._reaches(roots, self._backward_begins)
        self.backwards += func is Tensor.backward
        self._made_in_backward = Found()
        result = func(*args, **kwargs)
        made = [root.grad_fn for root in roots if root.grad_fn is not None]
        if self._has_to_tell(result):
            self._tell_of_gradient([Arrival(node, gradient) for node in made])
        return result

    def in_own_backward(
        self, run: Callable[..., Any], node: Any, gradients: tuple[Any, ...]
    ) -> Any:
        """Run the backward of an autograd function of the script, and look at its operations.

        Args:
            run: runs it.
            node: its node.
            gradients: those of its results.
        """
        if self.pauses:
            return run(node, *gradients)
        with _InBackward(self.operations.run):
            made = run(node, *gradients)
        if self._bad.are_any and not self._made_in_backward:
            with DisableTorchFunction():
                if not any(isinstance(x, Tensor) and is_bad(x) for x in gradients):
                    self._made_in_backward = self._bad.find(nodes.leaves(made))
                    self._made_by = type(node)._forward_cls.__name__
                    self._leaves |= leaves_before(node)
        return made

    def take_made_in_backward(self, kind: str = "") -> tuple[Batch, list[Key]] | None:
        """What the script's autograd functions made in their own backward, and is bad; once.

        Args:
            kind: the name of the function; "" for any.
        """
        if kind and kind != self._made_by:
            return None
        self._settle()
        found, self._made_in_backward = self._made_in_backward, Found()
        keys = self._bad.keys_of(found)
        if keys:
            self._bad.matter()
        return (self._bad.batch, keys) if keys else None

    def backward_begins(self, roots: Sequence[Tensor], unseen: Sequence[Tensor]) -> None:
        """A backward is about to begin with these tensors, of a loss or after it.

        Args:
            roots: those tensors.
            unseen: those of them that no loss has seen made, such as what a transform made.
        """
        if unseen and not self.pauses:
            self._reaches(unseen, self._backward_begins)
        self._made_in_backward = Found()
        self._in_front.take()
        if self._leaves:
            self._in_front.listen(roots)

    def backward_ended(self, returned: Any) -> None:
        """It has ended, and returned this."""
        arrived = self._in_front.take()
        # Others are bad because of something else.
        if arrived and self._has_to_tell(returned) and (healthy := _healthy(arrived)):
            self._tell_of_gradient(healthy)

    def take_arrived(self) -> list[Arrival]:
        """Where healthy gradients have come to what the script computed, in this backward; once."""
        return _healthy(self._in_front.take())

    def _has_to_tell(self, returned: Any) -> bool:
        """Whether a backward made a bad gradient, and another repetition is due."""
        return bool(self._repetitions) and self._has_bad_gradient(returned)

    def _tell_of_gradient(self, began: Sequence[Arrival]) -> None:
        """Say what made it, of a backward that began, or came to the script's operations, there."""
        self._repetitions -= 1
        with DisableTorchFunction():
            self._gradient_bad(began)

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

    def model_reads(self, model: Module, values: Any) -> None:
        """A model is about to read these arguments, and what else is within its reach."""
        self._read = self._bad_handed(values)
        if self._bad.are_any and self._walks:
            self._walks -= 1
            self._read.add(self._bad_handed(tensors_within_reach(model, nodes.leaves(values))))
        if self._leaves:
            self._in_front.listen(nodes.leaves(values))

    def graph_reads(self, tensors: Sequence[Tensor]) -> None:
        """A model has read these tensors, which gradients may reach."""
        if self._leaves:
            self._in_front.listen(tensors)

    def handed_on(self, values: Any) -> None:
        """A loss that is followed is about to read these arguments."""
        read = self._read_in_loss
        if len(read.keys) + len(read.records) < MOST_READ:
            read.add(self._bad_handed(values))
        if self._leaves:
            self._in_front.listen(nodes.leaves(values))

    def _bad_handed(self, values: Any) -> Found:
        """What is bad among arguments that matter now, and what may be."""
        found = Found()
        if self._bad.are_any and not self._is_well_again():
            found = self._bad.find(nodes.leaves(values))
            if found:
                self._bad.matter()
        found.records.extend(self._late.among(values))
        return found

    def loss_is_over(self) -> None:
        """What a loss has read before matters no more."""
        self._read_in_loss = Found()

    def take_read(self, *, by_loss: bool) -> tuple[Batch, list[Key]] | None:
        """What a model has read, or its loss, in the batch of what is bad; once."""
        self._settle()
        if by_loss:
            read, self._read_in_loss = self._read_in_loss, Found()
        else:
            read, self._read = self._read, Found()
        keys = self._bad.keys_of(read)
        return (self._bad.batch, keys) if keys else None

    def written(self, tensors: Iterable[Tensor]) -> tuple[Batch, list[Key]] | None:
        """What has written bad tensors, in the batch of what is bad; None if that is not known."""
        self._settle()
        if keys := self._bad.keys_of(self._bad.written(tensors)):
            self._bad.matter()
            return self._bad.batch, keys
        return None

    def _keys_held(self) -> Iterator[list[Key]]:
        """The lists of bad values that somebody has read."""
        yield self._made_in_backward.keys
        yield self._read.keys
        yield self._read_in_loss.keys
        handed = [of for _, of in (*self._derived, *self._numbers.values())]
        for each in handed if self.handed is None else [*handed, self.handed]:
            yield each.found.keys

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

    def _reaches(self, values: Iterable[Any], matters: Matters) -> None:
        """Some of these tensors may be bad, and now that matters."""
        self._settle()
        if bad := self._bad.keys_of(self._bad.find(values)):
            self._bad.matter()
            self._asked_at = 2 * self._bad.times  # intended infinities may be read all the time
            if self.has_no_model or not self._bad.come_of_gradients(bad):
                matters(self._bad.batch, bad)


def _healthy(arrived: Iterable[Arrival]) -> list[Arrival]:
    return [each for each in arrived if each.gradient is None or not is_bad(each.gradient)]
