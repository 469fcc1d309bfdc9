"""Runs what a script computes, operation by operation, and keeps short records of it.

Making a record has to take less time than a small operation, so C does it
(``fxguard/measure/_operations.h``). The same is here in Python, where there is no C extension. A
record keeps those that led to it, up to a depth, and no tensor.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from types import CodeType, EllipsisType, FrameType, NoneType
from typing import Any, Protocol

import torch
import torch.amp.grad_scaler
from torch import Tensor
from torch.nn import Parameter

from fxguard.batch.loss import BACKWARDS, VIEWS
from fxguard.forgiving import theirs
from fxguard.measure import native
from fxguard.measure.at_hand import own_arithmetic
from fxguard.measure.traceable import abs_min_max
from fxguard.script.noted import NOTED, Leaves, note
from fxguard.source.lines import Place, is_internal
from fxguard.torch_names import func_level

__all__ = [
    "INNER",
    "MOST_DEPTH",
    "NESTED",
    "OF_SCRIPT",
    "PLAIN",
    "UNKNOWN",
    "Hooks",
    "Operations",
    "PlainOperations",
    "PlainRecord",
    "Record",
    "is_record",
    "kind_of_code",
    "operations_with",
    "pair_of",
    "place_of",
]

MOST_KNOWN = 4096  # tensors, before those that are gone are forgotten
MOST_DEPTH = 64  # operations that led to one another and are kept

UNKNOWN = object()  # in the place of a tensor without a record, and of anything that holds memory
PLAIN = frozenset(
    {
        *(bool, int, float, complex, str, NoneType, slice, EllipsisType, torch.Size),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
NESTED = (tuple, list)
GRAPH = "<eval_with_key>"  # how the files of captured graphs are called
OF_SCRIPT, INNER, OF_GRAPH, OF_SCALER = range(4)  # kinds of code
GETTER = type(Tensor.grad.__get__)  # type: ignore[union-attr]
PAIRS_IN_C = native.is_built
NO_VERSION = -1  # of a tensor whose writes nobody counts


class Record(Protocol):
    """One operation that has run."""

    func: Callable[..., Any]
    code: CodeType  # what called it
    last: int  # the place there
    # Its arguments, with a record or `UNKNOWN` in the place of each tensor.
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    later: Any  # has the pair once a device has told it; None where it is known
    depth: int  # how many led to it, one after the other, of those that are kept
    path: int | None  # which of several results this one is; None if it is the only one
    dtype: torch.dtype  # of what it made

    @property
    def pair(self) -> tuple[float, float]:
        """The smallest and the largest magnitude of what it made."""


class HasPair(Protocol):
    """The numbers of a tensor that its device tells later."""

    @property
    def pair(self) -> tuple[float, float]:
        """The smallest and the largest magnitude. The device is waited for."""


class Operations(Protocol):
    """Runs the operations of one thread of a script, and keeps the records of live tensors.

    It stands in the place of a ``__torch_function__``. It keeps no tensor alive.

    Attributes:
        pauses: whether nothing is looked at.
        has_bad: whether something was bad.
        awaits: whether a device has yet to tell numbers.
        is_direct: whether what is called belongs to no loss.
        followed: of a loss, what `Loss.followed` gives and who compiles what runs, so that C need
            not ask of each call; None: ask.
        count: of the operations that were noted.
        unread: of those whose numbers cannot be read, such as those of sparse tensors.
    """

    pauses: bool
    has_bad: bool
    awaits: bool
    is_direct: bool
    followed: tuple[Any, ...] | None
    __self__: Any  # the mode: torch wants a method of it

    @property
    def count(self) -> int: ...

    @property
    def unread(self) -> int: ...

    def __call__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any: ...

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, /) -> Any:
        """Run an operation, and look at it."""

    def of(self, tensor: Tensor, /) -> Record | None:
        """The record of what a tensor holds now; None if nobody has seen it being made."""


class Hooks(Protocol):
    """What is called of an operation that has run."""

    def kind_of(self, code: CodeType) -> int:
        """Whose code it is: ``OF_SCRIPT``, ``INNER``, ``OF_GRAPH``, ``OF_SCALER``."""

    def pair_of(self, tensor: Tensor) -> tuple[float, float] | HasPair | None:
        """The smallest and the largest magnitude of a tensor that C does not read."""

    def waits(self, record: Record, args: tuple[Any, ...], kwargs: Any, result: Tensor) -> None:
        """It has made something whose numbers a device tells later."""

    def turned_bad(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, result: Tensor
    ) -> None:
        """It has made something that is not finite."""

    def other(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> None:
        """It has made no floating-point numbers, and something was bad before, or may have been."""

    def apart(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a backward."""

    def inside(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run an operation inside a transform of ``torch.func``."""

    def raised(
        self, error: BaseException, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """It has raised, outside a loss."""

    def objected(self, error: BaseException) -> None:
        """An error came while it was looked at: raise it, or let the script go on."""

    def otherwise(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation that may belong to a loss."""


def _nothing() -> None:
    """Stands for a reference to a tensor that is gone."""


class PlainRecord:
    """A record in Python."""

    __slots__ = (
        *("_pair", "args", "code", "depth", "dtype", "func", "kwargs", "last", "later", "path"),
        *("reference", "version"),
    )

    def __init__(
        self,
        func: Callable[..., Any],
        code: CodeType,
        last: int,
        args: Any,
        kwargs: dict[str, Any],
        pair: tuple[float, float] | HasPair,
        depth: int,
        path: int | None,
        result: Tensor,
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.code, self.last = code, last
        known = isinstance(pair, tuple)
        self._pair: Any = pair if known else None
        self.later: Any = None if known else pair
        self.depth, self.path, self.dtype = depth, path, result.dtype
        self.reference: Callable[[], Tensor | None] = weakref.ref(result)
        self.version = NO_VERSION if result.is_inference() else result._version

    @classmethod
    def begins(cls, record: Record) -> PlainRecord:
        """A record of the same value, without what led to it. No tensor is known to hold it."""
        made = cls.__new__(cls)
        made.func, made.args, made.kwargs = record.func, (), {}
        made.code, made.last = record.code, record.last
        made._pair, made.later = record.pair, None
        made.depth, made.path, made.dtype = 0, record.path, record.dtype
        made.reference, made.version = _nothing, NO_VERSION
        return made

    @property
    def pair(self) -> tuple[float, float]:
        """The smallest and the largest magnitude of what it made."""
        found: tuple[float, float] = self._pair if self.later is None else self.later.pair
        return found


class PlainOperations:
    """The same in Python."""

    def __init__(self, hooks: Hooks, leaves: Leaves) -> None:
        self._hooks, self._leaves = hooks, leaves
        self.pauses = self.has_bad = self.awaits = self.is_direct = False
        self.followed: tuple[Any, ...] | None = None
        self.__self__: Any = None
        self.count = self.unread = 0
        self._known: dict[int, PlainRecord] = {}  # by id of the tensor
        self._most = MOST_KNOWN
        self._kinds: dict[CodeType, int] = {}

    def __call__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not self.is_direct:
            return self._hooks.otherwise(func, types, args, kwargs)
        try:
            return self.run(func, args, kwargs)
        except BaseException as error:
            self._hooks.raised(error, func, args, kwargs)
            raise

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run an operation, and look at it."""
        if self.pauses:
            return func(*args, **(kwargs or {}))
        if func_level() is not None:
            return self._hooks.inside(func, args, kwargs)
        if func in BACKWARDS:
            return self._hooks.apart(func, args, kwargs)
        result = func(*args, **kwargs) if kwargs else func(*args)
        try:
            self._look(func, args, kwargs, result)
        except theirs() as error:  # a tensor may object to any question
            self._hooks.objected(error)
        return result

    def of(self, tensor: Tensor) -> PlainRecord | None:
        """The record of what a tensor holds now; None if nobody has seen it being made."""
        return self._of(tensor, None)

    def _of(self, tensor: Tensor, written: Tensor | None) -> PlainRecord | None:
        known = self._known.get(id(tensor))
        if known is None or known.reference() is not tensor:
            return None
        if tensor is written or known.version == NO_VERSION or known.version == tensor._version:
            return known
        return None

    def _look(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> None:
        if type(result) is Tensor or _writes_weight(args, result):
            self._note(func, args, kwargs, result, None)
        elif isinstance(result, (tuple, list)) and func is not Tensor.tolist:
            for position, each in enumerate(result):
                if type(each) is Tensor:
                    self._note(func, args, kwargs, each, position)
        elif func is Tensor.__setitem__:
            if type(args[0]) in (Tensor, Parameter):
                self._note(func, args, kwargs, args[0], None)
        elif self.has_bad or self.awaits:
            self._hooks.other(func, args, kwargs, result)

    def _note(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Any,
        result: Tensor,
        path: int | None,
    ) -> None:
        """Note what an operation has made, or written to."""
        if type(func) is GETTER and func not in VIEWS:
            return  # such as a gradient: nothing has made it here
        if not (result.is_floating_point() or result.is_complex()):
            if self.has_bad or self.awaits:
                self._hooks.other(func, args, kwargs, result)
            return
        if (pair := self._hooks.pair_of(result)) is None:
            self.unread += bool(result.numel()) and func_level() is None
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (kind := self._kind_of(frame.f_code)) != OF_SCRIPT:
            frame = None if kind == OF_GRAPH else frame.f_back
        if frame is None:
            return
        needs = result.requires_grad
        depths = [-1]
        read = tuple(self._kept(each, result, depths) for each in args)
        named = {name: self._kept(each, result, depths) for name, each in (kwargs or {}).items()}
        depth = max(depths) + 1
        if depth > MOST_DEPTH and not needs:  # a node of autograd keeps what led to it anyway
            read, depth = without_records(read), 0
        place = frame.f_code, frame.f_lasti
        made = PlainRecord(func, *place, read, named, pair, depth, path, result)
        self.count += 1
        self._known[id(result)] = made
        if len(self._known) > self._most:
            self._forget()
        if needs:
            note(made, args, kwargs, result, self._leaves)
        if not isinstance(pair, tuple):
            self._hooks.waits(made, args, kwargs, result)
        elif not math.isfinite(pair[1]):
            self._hooks.turned_bad(func, args, kwargs, result)

    def _kind_of(self, code: CodeType) -> int:
        kind = self._kinds.get(code)
        if kind is None:
            kind = self._kinds[code] = self._hooks.kind_of(code)
        return kind

    def _kept(self, value: Any, result: Tensor, depths: list[int]) -> Any:
        """What a record keeps of an argument."""
        if isinstance(value, Tensor):
            record = self._of(value, result)
            if record is None:
                return UNKNOWN
            depths.append(record.depth)
            return record
        if type(value) in NESTED:
            return type(value)([self._kept(each, result, depths) for each in value])
        return value if type(value) in PLAIN else UNKNOWN

    def _forget(self) -> None:
        """Forget tensors that are gone."""
        gone = [key for key, each in self._known.items() if each.reference() is None]
        for key in gone:
            del self._known[key]
        self._most = 2 * len(self._known) + MOST_KNOWN


def _writes_weight(args: tuple[Any, ...], result: Any) -> bool:
    """Whether an operation has written to a weight, which it returns."""
    return type(result) is Parameter and bool(args) and args[0] is result


def without_records(value: Any) -> Any:
    """The same without records, which is what begins a new chain."""
    if type(value) in NESTED:
        return type(value)([without_records(each) for each in value])
    return UNKNOWN if type(value) is PlainRecord else value


RECORDS = frozenset({PlainRecord, *([] if native.Record is None else [native.Record])})


def is_record(value: Any) -> bool:
    """Whether something in the arguments of a record is a record."""
    return type(value) in RECORDS


def operations_with(hooks: Hooks, leaves: Leaves) -> Operations:
    """What runs the operations of a thread, in C if that is built.

    Args:
        hooks: what is called of each.
        leaves: the leaves of autograd that they read are added here.
    """
    if native.Operations is None:
        return PlainOperations(hooks, leaves)
    functions = BACKWARDS, VIEWS, UNKNOWN, Tensor.__setitem__, Tensor.tolist, GETTER
    nodes = leaves, NOTED, torch.is_grad_enabled
    made: Operations = native.Operations(hooks, PLAIN, *functions, *nodes, MOST_DEPTH, MOST_KNOWN)
    return made


def kind_of_code(code: CodeType) -> int:
    """Whether code is the script's, a library's, that of a graph, or of a GradScaler."""
    file = code.co_filename
    if not is_internal(file):
        return OF_SCRIPT
    if file == torch.amp.grad_scaler.__file__:
        return OF_SCALER
    return OF_GRAPH if file.startswith(GRAPH) else INNER


def place_of(record: Record) -> Place:
    """The line of the script that called an operation."""
    code = record.code
    lines = (line for start, end, line in code.co_lines() if start <= record.last < end and line)
    return code.co_filename, next(lines, code.co_firstlineno)


def pair_of(tensor: Tensor) -> tuple[float, float] | None:
    """The smallest and the largest magnitude of a tensor in the memory of a CPU; else None."""
    if PAIRS_IN_C and not tensor.is_complex():
        return native.abs_min_max(tensor)
    is_plain = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested
    if not is_plain or not tensor.numel() or native.is_observed():
        return None
    with own_arithmetic():
        low, high = abs_min_max(tensor)
    return None if float(high) < 0 else (float(low), float(high))
