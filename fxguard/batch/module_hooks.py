"""Modules that begin and return: in Python, and, as marks, in captured graphs.

Hooks on every module, for the time of one forward (see :mod:`fxguard.capture.dynamo`).
TorchDynamo traces them too, and there they leave marks in the graph.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from fxguard.batch.batch import ModuleReturn
from fxguard.batch.observer import FusedObserver, Watch, key_of, watching
from fxguard.graph import marks
from fxguard.ranks.fsdp import class_name

__all__ = ["after_module", "before_module", "record_return"]

# These use one fused kernel in evaluation, but not while a torch function mode is active.
FUSED_MODULES = (
    torch.nn.TransformerEncoder,
    torch.nn.TransformerEncoderLayer,
    torch.nn.MultiheadAttention,
)


def before_module(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    """A module is about to run."""
    if not torch.compiler.is_dynamo_compiling():
        enter_module(module)


@torch.compiler.disable
def enter_module(module: torch.nn.Module) -> None:
    """A module is about to run outside every graph."""
    watch = watching()
    if watch is None:
        return
    watch.read_names()
    if id(module) not in watch.names:
        return
    watch.batch.enter_module(watch.names[id(module)])
    if watch.observer is not None and watch.fused is None and _may_fuse(module):
        # The same kernels have to run as without fxguard: watch from below instead.
        from_below = contextlib.ExitStack()
        watch.fused = (module, from_below)  # first: an interrupt may come between
        from_below.enter_context(torch._C.DisableTorchFunction())
        from_below.enter_context(FusedObserver())


def after_module(module: torch.nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
    """A module has returned.

    Args:
        module: the module.
        args: its positional arguments.
        rest: its keyword arguments and what it returned. The former are missing where another
            thread takes the hooks off just then, in a call that nobody watches.
    """
    kwargs, output = rest if len(rest) == 2 else ({}, rest[0])
    if torch.compiler.is_dynamo_compiling():
        labels, tensors = marks.flatten_call(args, kwargs, output)
        marks.module_returned(labels, *tensors)
    else:
        leave_module(module, args, kwargs, output)


@torch.compiler.disable
def leave_module(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """A module has returned outside every graph."""
    watch = watching()
    if watch is None or id(module) not in watch.names:
        return
    if watch.fused is not None and watch.fused[0] is module:
        watch.leave_fused()
    batch, name = watch.batch, watch.names[id(module)]
    while batch.modules and batch.modules[-1].name != name:
        batch.modules.pop()  # it raised, and the model went on
    calls = batch.calls
    record_return(watch, name, class_name(type(module)), calls, args, kwargs, output)
    if batch.modules:
        batch.modules.pop()


def record_return(
    watch: Watch,
    name: str,
    kind: str,
    calls: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    """Add the frame of a module that returned outside every graph."""
    labels, tensors = marks.flatten_call(args, kwargs, output)
    rows = [
        (label, None if tensor is None else key_of(watch, tensor, label), note)
        for label, tensor, note in marks.rows_of(labels, tensors)
    ]
    watch.batch.events.append(ModuleReturn(name, kind, calls, rows))


def _may_fuse(module: torch.nn.Module) -> bool:
    if not isinstance(module, FUSED_MODULES) or module.training:
        return False
    return not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters())
