"""One run of a model with all its values: what each operation read, and what it made.

The model runs as it is, in Python, so that all of it is seen: recurrent layers, loops that depend
on numbers, and what runs where a capture would end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from fxguard import trees
from fxguard.batch.kept_run import versions_of
from fxguard.graph.nodes import leaves, memory_of
from fxguard.graph.operations import name_of
from fxguard.graph.tables import NOT_OPERATIONS
from fxguard.recording.modules_running import ModulesRunning
from fxguard.records import Source
from fxguard.report.dependencies import PathStep
from fxguard.source.lines import source_of_caller
from fxguard.source.own_classes import is_own, source_of_script

__all__ = ["Made", "Read", "Recorder", "Recording"]

ATTRIBUTE = "__get__"


class Read(NamedTuple):
    """A tensor among the arguments of an operation."""

    held: int | None  # the index of its value; None for a weight, or if that is not known


@dataclass(slots=True, eq=False)
class Made:
    """A value of the run: what the model was given or keeps, or what an operation made."""

    tensor: Tensor  # a copy
    reads: tuple[int, ...] = ()  # of earlier values, by index
    step: PathStep | None = None  # None for what no operation made
    given: str = ""  # the name of an input of the model
    kept: str = ""  # the name of a buffer
    kind: str = ""  # of its operation
    module: str = ""  # in which that ran
    args: tuple[Any, ...] = ()  # of the operation, with a `Read` in the place of each tensor
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    caller: Source | None = None  # the line of a program that called the library of the step's line


@dataclass(slots=True)
class Recording:
    """The values of a run, in order of execution.

    Attributes:
        values: all of them.
        returned: the index of the value in each tensor that the model returned, as far as known.
    """

    values: list[Made] = field(default_factory=list)
    returned: list[int | None] = field(default_factory=list)


class Recorder(TorchFunctionMode):
    """Notes each operation that Python calls while it is active.

    Args:
        model: the model that will run.
        given: the tensors that it is given, with names.
    """

    def __init__(self, model: Module, given: Sequence[tuple[Tensor, str]]) -> None:
        super().__init__()
        self.recording = Recording()
        # What each tensor holds: by its identity; it is kept alive.
        self._known: dict[int, tuple[Tensor, int]] = {}
        for tensor, name in given:
            self._know(tensor, Made(_copy(tensor), given=name))
        for name, buffer in model.named_buffers():
            self._know(buffer, Made(_copy(buffer), kept=name))
        self._modules = ModulesRunning(model)

    def end(self) -> None:
        """Let the model go."""
        self._modules.end()

    def of(self, output: Any) -> Recording:
        """What was noted, of a run that has returned something."""
        found = [x for x in trees.tree_leaves(output) if isinstance(x, Tensor)]
        self.recording.returned = [self._held(x) for x in found]
        self._known.clear()
        return self.recording

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        kind = name_of(func)
        if kind == ATTRIBUTE:  # `mT`, `real`: what is no tensor is not noted
            kind = getattr(func.__self__, "__name__", "attribute")
        elif not kind or kind in NOT_OPERATIONS:
            return func(*args, **kwargs)
        tensors = [x for x in leaves([*args, *kwargs.values()]) if isinstance(x, Tensor)]
        before = versions_of(tensors)
        result = func(*args, **kwargs)
        now = versions_of(tensors)
        written = [x for x, a, b in zip(tensors, before, now, strict=True) if a != b]
        made = [x for x in leaves(_items(result)) if isinstance(x, Tensor)]
        if made or written:
            self._note(
                Made(torch.empty(0), kind=kind, args=args, kwargs=kwargs), tensors, made, written
            )
        return result

    def _note(
        self,
        call: Made,
        tensors: Sequence[Tensor],
        made: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> None:
        module = self._modules.innermost
        reads = tuple(dict.fromkeys(i for x in tensors if (i := self._held(x)) is not None))
        source = source_of_caller()
        caller = None if source is None or is_own(source.file) else source_of_script()
        step = PathStep(f"{module} {call.kind}".strip(), source)
        args, kwargs = trees.tree_map_only(
            Tensor, lambda x: Read(self._held(x)), (call.args, dict(call.kwargs))
        )

        def value(tensor: Tensor, read: tuple[int, ...]) -> int:
            return self._know(
                tensor,
                Made(
                    _copy(tensor),
                    read,
                    step,
                    kind=call.kind,
                    module=module,
                    args=args,
                    kwargs=kwargs,
                    caller=caller,
                ),
            )

        for tensor in {id(x): x for x in [*made, *written]}.values():
            index = value(tensor, reads)
            memory = memory_of(tensor)
            if memory is None or not any(tensor is x for x in written):
                continue
            for other, held in list(self._known.values()):
                if other is not tensor and memory_of(other) == memory:
                    value(other, (index, held))

    def _know(self, tensor: Tensor, made: Made) -> int:
        self.recording.values.append(made)
        self._known[id(tensor)] = tensor, len(self.recording.values) - 1
        return len(self.recording.values) - 1

    def _held(self, tensor: Tensor) -> int | None:
        """The value in a tensor; also of another object for the same elements."""
        known = self._known.get(id(tensor))
        if known is not None and known[0] is tensor:
            return known[1]
        memory = memory_of(tensor)
        for other, index in reversed(list(self._known.values())) if memory is not None else ():
            if memory_of(other) == memory and _layout(other) == _layout(tensor):
                return index
        return None


def _items(result: Any) -> Any:
    """The items of a result that is a sequence with names, such as that of ``max``."""
    return tuple(result) if isinstance(result, tuple) else result


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _layout(tensor: Tensor) -> object:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
