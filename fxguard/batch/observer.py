"""Operations that run outside every captured graph, because TorchDynamo left them to Python.

Two observers report to the batch that is running in their thread: :class:`Observer` sees each
torch function that Python calls, :class:`FusedObserver` the operations below, in modules that take
another, fused path when a torch function mode is active.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Number
from typing import Any

import torch
from torch import Tensor, overrides
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from fxguard.batch.batch import Batch, GapOperation, Key
from fxguard.graph import nodes
from fxguard.graph.in_float64 import needed_by, reads_masked_row
from fxguard.graph.operations import Call, is_move, name_of, read_call
from fxguard.graph.source_lines import source_of_caller
from fxguard.graph.tables import NOT_OPERATIONS, RUN_FUNCTIONS
from fxguard.ranks import fsdp
from fxguard.records import Role

__all__ = [
    "FusedObserver",
    "Observer",
    "Watch",
    "here",
    "is_watched_by_others",
    "key_of",
    "set_watch",
    "unobserved",
    "watching",
]


class Watch:
    """Who is watching the forward that runs in this thread."""

    def __init__(
        self,
        batch: Batch,
        names: Mapping[int, str],
        tensors: Mapping[int, tuple[Role, str]],
        observer: Observer | None,
        refresh: Callable[[], None] = lambda: None,
        weights_stay: bool = True,
    ) -> None:
        self.batch = batch
        self.names = names  # id(module) to qualified name
        self.tensors = tensors  # id(parameter or buffer) to (role, qualified name)
        self._refresh = refresh  # brings both up to date
        self._is_fresh = False
        self.observer = observer
        self.weights_stay = weights_stay  # until a report is made
        # The module that may run fused kernels, and how to stop watching it from below.
        self.fused: tuple[torch.nn.Module, contextlib.ExitStack] | None = None

    def read_names(self) -> None:
        """Bring the names up to date, once for each batch that has something between graphs."""
        if not self._is_fresh:
            self._is_fresh = True
            self._refresh()

    def leave_fused(self) -> None:
        """Stop watching from below, where that was begun."""
        if self.fused is not None:
            self.fused[1].close()  # may be called again, if this was interrupted
            self.fused = None


class _Here(threading.local):
    watch: Watch | None = None


# Each guarded forward sets ``here.watch`` when it begins, and back to what it was when it ends.
here = _Here()


def watching() -> Watch | None:
    """The watch of the guarded forward that runs in this thread."""
    return here.watch


def set_watch(watch: Watch | None) -> Watch | None:
    """Install a watch for this thread and return the one before."""
    before = here.watch
    here.watch = watch
    return before


# Operations.


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


@contextlib.contextmanager
def unobserved(watch: Watch | None) -> Iterator[None]:
    """Take the observer off, and no other mode: graphs and their compilers may need those."""
    observer = None if watch is None else watch.observer
    modes = overrides._get_current_function_mode_stack() if observer is not None else []
    if observer not in modes:
        yield
        return
    try:
        set_function_modes([mode for mode in modes if mode is not observer])
        yield
    finally:
        try:
            set_function_modes(modes)
        except BaseException:  # an interrupt came between
            set_function_modes(modes)
            raise


def set_function_modes(modes: Sequence[Any]) -> None:
    """Replace the stack of torch function modes; may be called again, if it was interrupted."""
    while _len_torch_function_stack():
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)


def is_watched_by_others() -> bool:
    """Whether torch functions of this thread go through somebody else's mode.

    TorchDynamo would trace that mode, and the captured graph would run under it once more.
    """
    if not _len_torch_function_stack():
        return False
    modes = overrides._get_current_function_mode_stack()
    return any(not isinstance(mode, (DeviceContext, Observer)) for mode in modes)


# TorchDynamo is active while gaps run, and would compile fxguard's own functions one by one.
@torch.compiler.disable
def observe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation and report what it read and made."""
    watch = watching()
    if watch is None or watch.batch.measuring:
        return func(*args, **kwargs)
    kind = name_of(func)
    if kind in NOT_OPERATIONS:
        if kind == "__set__":  # x.data = y
            watch.batch.forget(args[0])
        return func(*args, **kwargs)
    call = read_call(func, args, kwargs)
    if kind == "as_tensor" and isinstance((*args, *kwargs.values())[0], Number):
        # TorchDynamo hands Python numbers to graphs with dynamic shapes like this.
        return func(*args, **kwargs)
    if not watch.weights_stay and fsdp.runs_now():
        return func(*args, **kwargs)
    watch.read_names()
    batch = watch.batch
    inputs = [(label, key_of(watch, tensor, label)) for label, tensor in _rows_of(call)]
    apart = [(key_of(watch, x, name), x) for name, x in call.apart if _is_float(x)]
    try:
        result = func(*args, **kwargs)
    except Exception as error:
        batch.raised = happened(batch, call, inputs, []), error
        raise
    results = [(path, x) for path, x in nodes.elements_of(result) if _is_float(x)]
    if len(results) == 1 and is_move(call, call.first, results[0][1]):
        moved = batch.key_of(call.first)
        if moved is not None:
            batch.remember(results[0][1], moved)
            return result
    made = [(path, batch.measure(x, Role.MADE, kind)) for path, x in results]
    outputs = [(nodes.label_of("output", path), key) for path, key in made]
    changed = list(call.beside)
    if result is None:  # ``x[i] = y`` returns nothing
        changed += [("", tensor) for tensor in call.in_place]
    for name, tensor in changed:
        if _is_float(tensor):
            label = f"output[{name}]" if name and (results or len(changed) > 1) else "output"
            outputs.append((label, batch.measure(tensor, Role.MADE, name or kind)))
    if kind not in RUN_FUNCTIONS and (call.overwrites or not (call.in_place or call.beside)):
        look_closer(batch, call, func, made)
    if outputs:
        batch.events.append(happened(batch, call, inputs, outputs))
    if apart:
        read = [*inputs[:1], *(("", before) for before, _ in apart)]
        written = [("", batch.measure(x, Role.MADE, kind)) for _, x in apart]
        beside = happened(batch, call, read, written)
        batch.events.append(replace(beside, framed=False, counts=False))
    return result


def happened(
    batch: Batch, call: Call, inputs: list[tuple[str, Key]], outputs: list[tuple[str, Key]]
) -> GapOperation:
    """An operation that has run, or raised, with the values that it read and made."""
    return GapOperation(
        kind=call.kind,
        module=batch.module,
        calls=batch.calls,
        source=source_of_caller(),
        inputs=inputs,
        outputs=outputs,
        framed=not (outputs and call.selects),
        infinite_literal=call.infinite_literal,
        limit_literal=call.limit_literal,
        counts=bool(outputs),
    )


CLOSER_LOOKS = 8  # in one batch: each runs the operation once more


def look_closer(
    batch: Batch, call: Call, func: Any, made: list[tuple[tuple[int, ...], Key]]
) -> None:
    """Note what an operation that made something bad would have needed, and what it read."""
    for path, (_, index) in made:
        if index not in batch.details or batch.closer_looks >= CLOSER_LOOKS:
            continue
        batch.closer_looks += 1
        with batch.own_arithmetic(), torch._C.DisableTorchFunction(), torch.no_grad():
            needed = needed_by(func, call.args, call.kwargs, path)
            masked = reads_masked_row(call.args, call.kwargs)
        batch.details[index] = replace(batch.details[index], needed=needed, masked_row=masked)


def key_of(watch: Watch, tensor: Tensor, label: str) -> Key:
    """The value that a tensor holds: a weight's or buffer's where it is one."""
    role, name = watch.tensors.get(id(tensor), (Role.INPUT, label))
    if role is Role.WEIGHT and watch.weights_stay:
        return watch.batch.key_of(tensor) or watch.batch.weight(tensor, name)
    return watch.batch.value_of(tensor, name, role)


def _rows_of(call: Call) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors that a call reads, labelled in order of use."""
    position = 0
    for keyword, tensor in call.reads:
        if _is_float(tensor):
            yield f"input[{position if keyword is None else keyword}]", tensor
            position += keyword is None


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
