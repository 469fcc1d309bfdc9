"""Notes each operation of ATen that runs while a model does: its operands, results and line."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fxguard import trees
from fxguard.forgiving import theirs, where_theirs_may_raise
from fxguard.graph.written_operands import written_operands
from fxguard.measure.at_hand import has_memory, own_arithmetic
from fxguard.measure.func_levels import has_levels
from fxguard.recording._collectives import Collective, collective_of, waits
from fxguard.recording.modules_running import ModulesRunning
from fxguard.recording.recorded import (
    NO_NUMBERS,
    NOT_RECORDED,
    Leaf,
    Operation,
    Recording,
    Ref,
    Value,
    numbers_of,
)
from fxguard.source.lines import source_of_caller
from fxguard.torch_names import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = ["Recorder", "parts_of"]


class Recorder(TorchDispatchMode):
    """The mode under which a model runs to be recorded.

    Args:
        model: the model that will run.
        given: the tensors that it is given, with names.
        recording: what is noted goes here.
        keeps: whether the elements of a value are to be kept, given its size in bytes.
    """

    def __init__(
        self,
        model: Module,
        given: Sequence[tuple[str, Tensor]],
        recording: Recording,
        keeps: Callable[[int], bool],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's has no annotations
        self.recording, self.keeps = recording, keeps
        # What each tensor holds, by its identity.
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        # What collectives write: it is there when somebody reads it.
        self._late: dict[int, weakref.ref[Tensor]] = {}
        self._modules = ModulesRunning(model)
        with own_arithmetic():
            for kind, tensors in (
                ("input", given),
                ("weight", model.named_parameters()),
                ("buffer", model.named_buffers()),
            ):
                for name, tensor in tensors:
                    for inner in parts_of(tensor):
                        self._leaf(inner, kind, name)

    def end(self) -> None:
        """Let the model go."""
        self._modules.end()
        with own_arithmetic(), where_theirs_may_raise():  # no memory for a copy
            for value, alive in list(self._late.items()):
                if (tensor := alive()) is not None:
                    self._arrived(value, tensor)
        self._known.clear()

    def held(self, tensor: Tensor) -> int:
        """The value that a tensor holds; a leaf if nothing that was recorded made it."""
        value = self._held(tensor)
        if value is None:
            return self._leaf(tensor, "other", "")
        if value in self._late:
            self._arrived(value, tensor)
        return value

    def _held(self, tensor: Tensor) -> int | None:
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def kept(self, tensor: Tensor) -> int:
        """The value of a tensor that the model returned; views are kept, too."""
        number = self.held(tensor)
        is_new = number not in self.recording.data and _has_elements(tensor)
        if is_new and self.keeps(_bytes(tensor)):
            self.recording.data[number] = _copy(tensor)
        return number

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in trees.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(map(is_traceable_wrapper_subclass, given)):
            return NotImplemented  # its own operations are recorded, on the tensors inside
        try:
            collective = collective_of(func, args, kwargs)
        except theirs():  # a group of somebody else's, which has no ranks
            collective = None
        if collective is not None:
            return self._exchange(func, args, kwargs, collective)
        if waits(func) and args:
            return self._wait(func, args, kwargs)
        if self._late and self._is_part_of_one(func, args):
            return func(*args, **kwargs)
        read: tuple[Any, Any] | None = None
        try:
            with own_arithmetic():
                read = trees.tree_map_only(Tensor, lambda x: Ref(self.held(x)), (args, kwargs))
                written = {id(x): (x, self.held(x)) for x in written_operands(func, args, kwargs)}
        except theirs():  # tensors of others, which answer in ways of their own
            read = None
        result = func(*args, **kwargs)
        try:
            with own_arithmetic():
                if read is not None:
                    self._note(func, read[0], read[1], result, written)
        except theirs():  # likewise; no memory for a copy
            read = None
        if read is None:
            self._leave_out()
        return result

    def _note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        written: Mapping[int, tuple[Tensor, int]],
    ) -> None:
        is_view = bool(getattr(func, "is_view", False))
        made = [
            self._value(x, is_kept=not is_view) if isinstance(x, Tensor) else None
            for x in trees.tree_leaves(result)
        ]
        if all(x is None for x in made) and not written:
            return  # a number that Python reads
        changed = []
        for tensor, before in written.values():
            now = self.held(tensor)
            changed.append((before, self._value(tensor) if now == before else now))
        self._append(func, args, kwargs, tuple(made), tuple(changed))

    def _exchange(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], collective: Collective
    ) -> Any:
        """Run a collective, and note it; what it brings may come later than it returns."""
        try:
            with own_arithmetic():
                given = collective.as_arguments(self.held)
                before = [self.held(x) for x in collective.writes]
        except theirs():  # no memory for a copy
            self._leave_out()
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        returns = not collective.writes and collective.kind != "send"
        brought = [x for x in trees.tree_leaves(result) if returns and isinstance(x, Tensor)]
        written = zip(before, map(self._later, collective.writes), strict=True)
        self._append(func, (), given, tuple(map(self._later, brought)), tuple(written))
        return result

    def _append(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: tuple[int | None, ...],
        written: tuple[tuple[int, int], ...],
    ) -> None:
        module, source = self._modules.innermost, source_of_caller()
        self.recording.operations.append(
            Operation(str(func), args, kwargs, made, written, module, source)
        )

    def _leave_out(self) -> None:
        about = self.recording.about
        about[NOT_RECORDED] = int(about.get(NOT_RECORDED, 0)) + 1

    def _wait(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        value = self._held(args[0]) if isinstance(args[0], Tensor) else None
        if value is not None and isinstance(result, Tensor):
            self._known[id(result)] = weakref.ref(result), value
            if value in self._late:
                self._late[value] = weakref.ref(result)
        return result

    def _is_part_of_one(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether an operation copies what a collective brings out of memory of its own."""
        if func is not torch.ops.aten.copy_.default or self._held(args[0]) not in self._late:
            return False
        source = args[1]._base if args[1]._is_view() else args[1]
        held = self._held(source)
        unnamed = (leaf.value for leaf in self.recording.leaves if not leaf.name)
        return held is None or held in unnamed

    def _later(self, tensor: Tensor) -> int:
        """The value of a tensor whose elements are not there yet."""
        values, alive = self.recording.values, weakref.ref(tensor)
        values.append(Value(tuple(tensor.shape), tensor.dtype, NO_NUMBERS))
        number = len(values) - 1
        self._known[id(tensor)] = alive, number
        self._late[number] = alive
        return number

    def _arrived(self, value: int, tensor: Tensor) -> None:
        del self._late[value]
        if _has_elements(tensor):
            known = self.recording.values[value]
            self.recording.values[value] = replace(known, numbers=numbers_of(tensor))
            if self.keeps(_bytes(tensor)):
                self.recording.data[value] = _copy(tensor)

    def _value(self, tensor: Tensor, *, is_kept: bool = True) -> int:
        values = self.recording.values
        is_there = _has_elements(tensor)
        numbers = numbers_of(tensor) if is_there else NO_NUMBERS
        values.append(Value(tuple(tensor.shape), tensor.dtype, numbers))
        number = len(values) - 1
        if is_kept and is_there and self.keeps(_bytes(tensor)):
            self.recording.data[number] = _copy(tensor)
        self._known[id(tensor)] = weakref.ref(tensor), number
        return number

    def _leaf(self, tensor: Tensor, kind: str, name: str) -> int:
        number = self._value(tensor)
        self.recording.leaves.append(Leaf(number, kind, name))
        return number


def parts_of(tensor: Tensor) -> list[Tensor]:
    """A tensor, or the tensors inside one that wraps others: what this process holds of it."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner = (getattr(tensor, name) for name in names)  # a DTensor's mesh is among them
    return [x for each in inner if isinstance(each, Tensor) for x in parts_of(each)]


def _has_elements(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_nested
        and not has_levels(tensor)
        and has_memory(tensor)
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous().resolve_conj().resolve_neg()
