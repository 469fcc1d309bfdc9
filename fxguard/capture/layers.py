"""Captures equal layers once.

TorchDynamo takes the time of a capture for each layer of a model, though all may be alike. Here the
model itself runs in Python, with TorchDynamo off. It is on while a layer runs, and then it finds
the code that it compiled for an earlier one: the weights of a module are inputs of its graph. The
operations between layers are those of :mod:`fxguard.batch.observer`.

A graph for each layer costs its own call. So a model whose layers do little is captured whole after
some calls.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15):

- ``torch._C._dynamo.eval_frame.set_eval_frame``: switches TorchDynamo on and off in this thread.
- The code that ``torch.compiler.disable`` puts around a function. Without it, layers that a user's
  decorator keeps from TorchDynamo would be captured.
"""

from __future__ import annotations

import math
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn import Module
from torch.nn.parameter import is_lazy

from fxguard.batch.active import here

__all__ = ["EqualLayers", "Switch", "by_layers", "equal_layers", "rows_of"]

# Fewer are captured nearly as fast with the rest of the model.
FEWEST = 4

# Share of a model's modules that need no capture of their own. Less is not worth a graph for each.
LEAST_SAVED = 0.5

# Multiplications of one layer below which the call of its graph is felt: it takes about 1 % of a
# layer with so much work for each thread, or 3 % with so much on a GPU.
LEAST_WORK = 1 << 32
LEAST_WORK_OF_GPU = 1 << 35

# Bytes that the inputs of all layers may take until the end of a forward without gradients.
MOST_KEPT = 1 << 28


@dataclass(frozen=True, slots=True)
class EqualLayers:
    """The layers of a model that are captured one by one.

    Attributes:
        ids: ``id`` of each.
        felt_rows: the rows below which a layer feels the call of its graph.
        most_rows: the rows above which the model would keep too much.
    """

    ids: frozenset[int]
    felt_rows: float
    most_rows: float

    def least_rows(self, pieces: int) -> float:
        """The rows below which a call of the model feels that it runs in pieces.

        Args:
            pieces: graphs and operations between them, in a call before; 0 if that is not known.
                An operation between graphs costs about as much as the call of a graph.
        """
        return self.felt_rows * max(pieces / len(self.ids), 1)


def equal_layers(model: Module) -> EqualLayers | None:
    """The layers of a model that share their capture; None if it is better captured whole."""
    modules = list(model.modules())
    if any(map(_is_compiled_apart, modules)):
        return None
    forms: dict[int, object] = {}
    counts = Counter(_form(module, forms) for module in modules)
    layers = list(_outermost(model, lambda module: counts[forms[id(module)]] >= FEWEST))
    kinds = {forms[id(layer)]: layer for layer in layers}  # one of each
    captured = sum(map(_size, kinds.values()))
    if sum(map(_size, layers)) - captured < LEAST_SAVED * len(modules):
        return None
    weights = [weight for layer in layers for weight in layer.parameters() if _is_there(weight)]
    if not weights:
        return None
    work = sum(weight.numel() for weight in weights) / len(layers)  # of each, for each row
    first = weights[0]
    least = LEAST_WORK * torch.get_num_threads() if first.is_cpu else LEAST_WORK_OF_GPU
    most = math.inf  # with gradients autograd keeps the inputs, too
    if torch.is_grad_enabled():
        work *= 3  # the backward has twice as many multiplications
    else:
        sizes = [min(weight.shape[:2]) for weight in weights if weight.dim() > 1]
        most = MOST_KEPT / (len(layers) * max(sizes, default=1) * first.itemsize)
    return EqualLayers(frozenset(map(id, layers)), least / work, most)


def rows_of(given: Iterable[Any]) -> int:
    """The number of tokens, or of vectors of features, in the largest of some tensors."""
    return max((_rows(value) for value in given if isinstance(value, Tensor)), default=0)


def _rows(tensor: Tensor) -> int:
    if tensor.is_nested:
        return 0  # it has no one size
    if not tensor.dim() or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.numel()
    return tensor.numel() // max(tensor.shape[-1], 1)


def _outermost(module: Module, has_equals: Callable[[Module], bool]) -> Iterator[Module]:
    """The outermost modules below one that have enough equals, weights, and code of their own."""
    for child in dict.fromkeys(module.children()):
        if (
            has_equals(child)
            and _can_be_captured(child)
            and any(map(_is_there, child.parameters()))
        ):
            yield child
        else:
            yield from _outermost(child, has_equals)


def _is_there(weight: Tensor) -> bool:
    return not is_lazy(weight)


def _form(module: Module, forms: dict[int, object]) -> object:
    """What modules have in common that may run the same graph."""
    if id(module) not in forms:
        weights = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        forms[id(module)] = (
            type(module),
            module.training,
            tuple((name, _shape(weight), weight.dtype) for name, weight in weights),
            tuple((name, _form(child, forms)) for name, child in module.named_children()),
        )
    return forms[id(module)]


def _is_compiled_apart(module: Module) -> bool:
    """Whether a compiler of its own would compile a module, if the model ran in Python."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def _shape(weight: Tensor) -> tuple[int, ...] | None:
    return tuple(weight.shape) if _is_there(weight) else None


def _can_be_captured(module: Module) -> bool:
    """Whether TorchDynamo compiles the forward of a module by itself: not if it is torch's own."""
    where = getattr(module.forward, "__module__", None) or "torch"
    return where.partition(".")[0] != "torch"


def _size(module: Module) -> int:
    return sum(1 for _ in module.modules())


class Switch:
    """Has TorchDynamo on while a layer runs, in one thread.

    Args:
        layers: ``id`` of each layer. One that the user keeps from TorchDynamo is removed.
        new: ``id`` of those that have not run yet. One that runs is removed.
        callback: what TorchDynamo compiles with.
    """

    def __init__(self, layers: set[int], new: set[int], callback: Any) -> None:
        self.layers = layers
        self.new = new
        self.callback = callback
        self.running: Module | None = None

    def begins(self, module: Module) -> None:
        """A module is about to run."""
        if id(module) not in self.layers:
            return
        if id(module) in self.new:
            self.new.discard(id(module))
            if _is_disabled():
                self.layers.discard(id(module))
                return
        self.running = module  # another one that did not return has raised
        set_eval_frame(self.callback)

    def returned(self, module: Module) -> None:
        """A module has returned."""
        if module is self.running:
            self.running = None
            set_eval_frame(None)


def by_layers(function: Callable[..., Any], layers: frozenset[int]) -> Callable[..., Any]:
    """A function for ``torch.compile`` of which only the layers are compiled, each by itself.

    Args:
        function: runs the model.
        layers: ``id`` of each layer.
    """
    left, new = set(layers), set(layers)

    def run_layers_captured(*args: Any, **kwargs: Any) -> Any:
        callback = get_eval_frame_callback()
        before = here.layers
        try:
            set_eval_frame(None)
            here.layers = Switch(left, new, callback)
            return function(*args, **kwargs)
        finally:
            set_eval_frame(callback)
            here.layers = before

    return run_layers_captured


_DISABLED = torch.compiler.disable(lambda: None).__code__
_RUN = "run_layers_captured"  # by_layers


def _is_disabled() -> bool:
    """Whether a user's ``torch.compiler.disable`` is around the module that begins to run.

    Torch has it around functions of its own, such as ``checkpoint``.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _RUN:
        if frame.f_code is _DISABLED:
            function = frame.f_locals.get("fn")
            if not str(getattr(function, "__module__", None)).startswith("torch."):
                return True
        frame = frame.f_back
    return False
