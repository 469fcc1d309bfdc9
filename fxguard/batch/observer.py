"""Observes operations outside every captured graph, which TorchDynamo left to Python.

Two observers report to the batch that is running in their thread. :class:`Observer` sees each torch
function that Python calls. :class:`FusedObserver` sees the ATen operations below, in modules that
would not take their fused path while a torch function mode is active.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxguard.batch import active
from fxguard.batch.batch import Batch
from fxguard.batch.events import UncapturedOperation
from fxguard.batch.keys import Key
from fxguard.batch.runner import runner_of
from fxguard.batch.tape import Tape
from fxguard.batch.tape_graph import Noted
from fxguard.forgiving import where_theirs_may_raise
from fxguard.graph import nodes
from fxguard.graph.closer_look import evidence_alone
from fxguard.graph.collectives import waits
from fxguard.graph.exchanges import Exchange, brought_later, exchange_of
from fxguard.graph.operations import Call, is_move, name_of, read_call
from fxguard.graph.tables import NOT_OPERATIONS, RUN_FUNCTIONS
from fxguard.ranks import fsdp
from fxguard.records import Role, Severity
from fxguard.source.lines import Place, calling_line
from fxguard.torch_names import (
    DeviceContext,
    DisableTorchFunction,
    TorchDispatchMode,
    function_mode_at,
    function_mode_count,
    pop_function_mode,
    push_function_mode,
)

__all__ = [
    "Begun",
    "FusedObserver",
    "Observer",
    "is_watched_by_others",
    "observe_undisturbed",
    "rows_read",
    "unobserved",
]


class Observer(TorchFunctionMode):
    """Measures the results of torch functions that run outside every graph."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        return observe(func, args, kwargs or {})

    def watch(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function under this mode.

        After an interrupt at the wrong moment, a ``with`` statement would leave the mode behind, or
        fail to find it.
        """
        try:
            push_function_mode(self)
            return function(*args, **kwargs)
        finally:
            try:
                self._take_off()
            except BaseException:  # an interrupt came first
                self._take_off()
                raise

    def _take_off(self) -> None:
        count = function_mode_count()
        if count and function_mode_at(count - 1) is self:  # in nearly all forwards
            pop_function_mode()
            return
        # Modes that the function put on the stack stay, as with torch.set_default_device.
        modes = function_modes()
        if self in modes:
            set_function_modes([mode for mode in modes if mode is not self])


class FusedObserver(TorchDispatchMode):
    """Measures the results of ATen operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's has no annotations

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return observe(func, args, kwargs or {})


def unobserved(function: Callable[..., Any], /, *args: Any) -> Any:
    """Call a function without our observers; other modes stay, because graphs may need them."""
    count = function_mode_count()
    if count == 1 and type(mode := function_mode_at(0)) is Observer:  # in nearly all forwards
        try:
            pop_function_mode()
            return function(*args)
        finally:
            try:
                if function_mode_count():  # the function has left a mode
                    _replace_modes([mode])
                else:
                    push_function_mode(mode)
            except BaseException:  # an interrupt came first
                set_function_modes([mode])
                raise
    modes = function_modes()
    others = [mode for mode in modes if not isinstance(mode, Observer)]
    if len(others) == len(modes):
        return function(*args)
    try:
        set_function_modes(others)
        return function(*args)
    finally:
        try:
            set_function_modes(modes)
        except BaseException:  # an interrupt came first
            set_function_modes(modes)
            raise


def function_modes() -> list[Any]:
    """The torch function modes of this thread, the outermost first."""
    return [function_mode_at(index) for index in range(function_mode_count())]


def set_function_modes(modes: Sequence[Any]) -> None:
    """Replace the stack of torch function modes, even across an interrupt."""
    try:
        _replace_modes(modes)
    except BaseException:
        _replace_modes(modes)
        raise


def _replace_modes(modes: Sequence[Any]) -> None:
    while function_mode_count():
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)


def is_watched_by_others() -> bool:
    """Whether torch functions of this thread go through another mode.

    TorchDynamo would trace that mode, and the captured graph would run under it again.
    """
    if not function_mode_count():
        return False
    return any(not isinstance(mode, (DeviceContext, Observer)) for mode in function_modes())


def observe_undisturbed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation and report what it read and made, where TorchDynamo is not active."""
    kind = name_of(func) if active.is_any() else ""
    if not kind or (kind in NOT_OPERATIONS and kind != "__set__"):
        return func(*args, **kwargs)
    if kind == "as_tensor" and isinstance((*args, *kwargs.values())[0], Number):
        # TorchDynamo passes Python numbers to graphs with dynamic shapes in this way.
        return func(*args, **kwargs)
    forward = active.current()
    if forward is None or forward.batch.measuring:
        return func(*args, **kwargs)
    if kind == "__set__":  # x.data = y
        forward.batch.live.forget(args[0])
        return func(*args, **kwargs)
    call = read_call(func, args, kwargs)
    if not forward.weights_stay and fsdp.runs_now():
        return func(*args, **kwargs)
    exchange = exchange_of(func, args, kwargs)
    rows = rows_read(call) if exchange is None else _labelled(exchange.reads)
    inputs = [(label, forward.key_of(tensor, label)) for label, tensor in rows]
    apart = [(forward.key_of(x, name), x) for name, x in call.apart if _is_float(x)]
    tape = None if kind in RUN_FUNCTIONS else forward.tape  # these compile what they run
    noted = None if tape is None else tape.before(func, args, kwargs, forward.batch.module)
    begun = Begun(forward.batch, func, call, inputs, exchange, apart, tape, noted)
    runner = runner_of(forward.batch.watchers) if forward.batch.watchers else None
    try:
        if runner is None or exchange is not None or kind in RUN_FUNCTIONS:
            result = func(*args, **kwargs)
        else:
            result = runner.run_operation(func, args, kwargs, kind, forward.batch.module)
    except Exception as error:
        begun.has_raised(error)
        raise
    begun.has_returned(result)
    return result


# TorchDynamo is active between graphs and would compile fxguard's own functions one by one.
observe = torch.compiler.disable(observe_undisturbed)


@dataclass(slots=True, eq=False)
class Begun:
    """An operation that has begun, and what it has read."""

    batch: Batch
    func: Any
    call: Call
    inputs: list[tuple[str, Key]]
    exchange: Exchange | None = None
    apart: Sequence[tuple[Key, Tensor]] = ()  # what it updates apart, with the values before
    tape: Tape | None = None
    noted: Noted | None = None  # on the tape

    def has_raised(self, error: Exception) -> None:
        """Note that it has raised."""
        operation = operation_of(self.batch, self.call, calling_line(), self.inputs, [])
        self.batch.raised = operation, error

    def has_returned(self, result: Any) -> None:
        """Measure what it has made, and report that."""
        batch, call, func, inputs = self.batch, self.call, self.func, self.inputs
        kind, place = call.kind, None
        if self.tape is not None and self.noted is not None:
            place = calling_line()
            with DisableTorchFunction():
                self.tape.after(self.noted, result, place)
        if self.exchange is not None:
            self._exchanged(self.exchange, result, place or calling_line())
            return
        results = [(path, x) for path, x in nodes.elements_of(result) if _is_float(x)]
        if len(results) == 1 and is_move(call, call.first, results[0][1]):
            moved = batch.live.key_of(call.first)
            if moved is not None:
                batch.live.remember(results[0][1], moved)
                return
        place = place or calling_line()
        made = [(path, batch.measure(x, Role.MADE, kind)) for path, x in results]
        outputs = [(nodes.label_of("output", path), key) for path, key in made]
        changed = list(call.beside)
        if result is None:  # ``x[i] = y`` returns nothing
            changed += [("", tensor) for tensor in call.in_place]
        for name, tensor in changed:
            if _is_float(tensor):
                label = f"output[{name}]" if name and (results or len(changed) > 1) else "output"
                outputs.append((label, batch.measure(tensor, Role.MADE, name or kind)))
        keeps_operands = call.overwrites or not (call.in_place or call.beside)
        is_bad = any(key.value in batch.details for _, key in made)
        if is_bad and keeps_operands and kind not in RUN_FUNCTIONS:
            hands_on = call.infinite_literal or hands_on_what_is_bad(batch, inputs, made)
            most = FLOAT64_RUNS if hands_on else MOST_ORIGINS
            add_evidence(batch, call, func, result, made, most)
        for watcher in batch.watchers if made else ():
            with batch.own_arithmetic():
                watcher.ran(call, func, result, made[0][1])
        if outputs:
            batch.add(operation_of(batch, call, place, inputs, outputs))
        if self.apart:
            read = [*inputs[:1], *(("", before) for before, _ in self.apart)]
            written = [("", batch.measure(x, Role.MADE, kind)) for _, x in self.apart]
            written_apart = operation_of(batch, call, place, read, written)
            batch.add(replace(written_apart, framed=False, counts=False))

    def _exchanged(self, exchange: Exchange, result: Any, place: Place | None) -> None:
        batch = self.batch
        for tensor in exchange.writes:
            batch.exchanged(tensor)
        operation = operation_of(batch, self.call, place, self.inputs, [])
        later = brought_later(self.func, result, exchange)
        if later is None:
            batch.brought(operation, exchange.writes)
        elif later:
            batch.expect(operation, later)


class Where(Protocol):
    """Where an operation ran."""

    @property
    def module(self) -> str:
        """The name of the innermost module that ran outside every graph."""

    @property
    def calls(self) -> tuple[str, ...]:
        """Keys of the modules that ran outside every graph, the outermost first."""


def operation_of(
    where: Where,
    call: Call,
    place: Place | None,
    inputs: list[tuple[str, Key]],
    outputs: list[tuple[str, Key]],
) -> UncapturedOperation:
    """The event of an operation that has run or raised, with the values that it read and made."""
    return UncapturedOperation(
        kind=call.kind,
        module=where.module,
        calls=where.calls,
        place=place,
        inputs=inputs,
        outputs=outputs,
        framed=not (outputs and call.selects),
        infinite_literal=call.infinite_literal,
        limit_literal=call.limit_literal,
        literals=call.literals,
        number_first=call.number_first,
        counts=bool(outputs),
    )


FLOAT64_RUNS = 8  # in one batch, at most: each runs an operation again
MOST_ORIGINS = 32  # the same with operations that may have made the first bad number


def hands_on_what_is_bad(
    batch: Batch, inputs: Iterable[tuple[str, Key]], made: Iterable[tuple[tuple[int, ...], Key]]
) -> bool:
    """Whether an operation made nothing worse than what it read, as far as that was looked at."""

    def worst(keys: Iterable[Key]) -> Severity:
        found = (batch.details.get(key.value) for key in keys if key.is_between_graphs)
        return max((each.severity for each in found if each is not None), default=Severity.FINITE)

    return worst(key for _, key in made) <= worst(key for _, key in inputs)


def add_evidence(
    batch: Batch,
    call: Call,
    func: Any,
    result: Any,
    made: list[tuple[tuple[int, ...], Key]],
    most: int,
) -> None:
    """Take a closer look at an operation that made something bad, at most so many in a batch."""
    for path, key in made:
        index = key.value
        if index not in batch.details or len(batch.evidence) >= most:
            continue
        if reason := waits(func, nodes.leaves([*call.args, *call.kwargs.values(), result])):
            batch.no_evidence[index] = reason
            continue
        with batch.own_arithmetic(), where_theirs_may_raise():  # a tensor may know few
            evidence = evidence_alone(call, func, result, path)
            if evidence is not None:
                batch.evidence[index] = evidence
                for watcher in batch.watchers:
                    watcher.turned_bad(call, func, path, key)


def rows_read(call: Call) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors that a call reads, labelled in order of use."""
    position = 0
    for keyword, tensor in call.reads:
        if _is_float(tensor):
            yield f"input[{position if keyword is None else keyword}]", tensor
            position += keyword is None


def _labelled(tensors: Iterable[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The same for tensors that leave for other ranks."""
    return ((f"input[{i}]", tensor) for i, tensor in enumerate(filter(_is_float, tensors)))


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
