"""Notes each operation of ATen that runs while a model does: its operands, results and line."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fxguard import trees
from fxguard.graph.operations import read_call
from fxguard.measure.at_hand import own_arithmetic
from fxguard.recording.recorded import Leaf, Operation, Recording, Ref, Value, numbers_of
from fxguard.source.lines import source_of_caller
from fxguard.torch_names import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = ["Recorder"]


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
        self._modules = [""]  # that run, the innermost last
        with own_arithmetic():
            for name, tensor in given:
                self._leaf(tensor, "input", name)
            for kind, tensors in (
                ("weight", model.named_parameters()),
                ("buffer", model.named_buffers()),
            ):
                for name, tensor in tensors:
                    self._leaf(tensor, kind, name)
        self._hooks = [
            hook
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
            for hook in (
                module.register_forward_pre_hook(_enters(self._modules, name)),
                module.register_forward_hook(_leaves(self._modules), always_call=True),
            )
        ]

    def end(self) -> None:
        """Let the model go."""
        for hook in self._hooks:
            hook.remove()
        self._known.clear()

    def held(self, tensor: Tensor) -> int:
        """The value that a tensor holds; a leaf if nothing that was recorded made it."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        return self._leaf(tensor, "other", "")

    def kept(self, tensor: Tensor) -> int:
        """The value of a tensor that the model returned; views are kept, too."""
        number = self.held(tensor)
        if number not in self.recording.data and self.keeps(_bytes(tensor)):
            self.recording.data[number] = _copy(tensor)
        return number

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
        with own_arithmetic():
            read_args, read_kwargs = trees.tree_map_only(
                Tensor, lambda x: Ref(self.held(x)), (args, kwargs)
            )
        written = {id(x): (x, self.held(x)) for x in _written(func, args, kwargs)}
        result = func(*args, **kwargs)
        with own_arithmetic():
            self._note(func, read_args, read_kwargs, result, written)
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
        self.recording.operations.append(
            Operation(
                str(func),
                args,
                kwargs,
                tuple(made),
                tuple(changed),
                self._modules[-1],
                source_of_caller(),
            )
        )

    def _value(self, tensor: Tensor, *, is_kept: bool = True) -> int:
        values = self.recording.values
        values.append(Value(tuple(tensor.shape), tensor.dtype, numbers_of(tensor)))
        number = len(values) - 1
        if is_kept and self.keeps(_bytes(tensor)):
            self.recording.data[number] = _copy(tensor)
        self._known[id(tensor)] = weakref.ref(tensor), number
        return number

    def _leaf(self, tensor: Tensor, kind: str, name: str) -> int:
        number = self._value(tensor)
        self.recording.leaves.append(Leaf(number, kind, name))
        return number


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The operands that an operation writes: by its schema, and statistics, which none tells."""
    call = read_call(func, args, dict(kwargs))
    yield from _tensors([*call.written, *(x for _, x in call.apart)])
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[at] if at < len(args) else kwargs.get(argument.name))


def _tensors(nest: Any) -> Iterator[Tensor]:
    return (x for x in trees.tree_leaves(nest) if isinstance(x, Tensor))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous().resolve_conj().resolve_neg()


def _enters(modules: list[str], name: str) -> Callable[..., None]:
    def enters(module: Module, args: Any) -> None:
        modules.append(name)

    return enters


def _leaves(modules: list[str]) -> Callable[..., None]:
    def leaves_it(module: Module, args: Any, output: Any) -> None:
        modules.pop()

    return leaves_it
