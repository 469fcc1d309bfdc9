"""Sees modules begin and return: in Python, and, as marks, in captured graphs.

These are hooks on every module during one forward (see :mod:`fxguard.capture.dynamo`). TorchDynamo
traces them as well, and then they leave marks in the graph.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from fxguard.batch import active
from fxguard.batch.active import ActiveForward, FusedModule
from fxguard.batch.events import ModuleReturn, ModuleRow
from fxguard.batch.observer import FusedObserver
from fxguard.graph import marks
from fxguard.graph.nodes import class_name
from fxguard.torch_names import DisableTorchFunction

__all__ = ["after_module", "before_module", "mark_return", "may_fuse", "record_return"]

# These use a fused kernel in evaluation, but not while a torch function mode is active.
FUSED_MODULES = (
    torch.nn.TransformerEncoder,
    torch.nn.TransformerEncoderLayer,
    torch.nn.MultiheadAttention,
)


def before_module(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    """Called when a module is about to run."""
    if torch.compiler.is_dynamo_compiling():
        return
    layers = active.here.layers
    if layers is None:
        enter_module(module)
        return
    (enter_module_undisturbed if layers.running is None else enter_module)(module)
    layers.begins(module)


def enter_module_undisturbed(module: torch.nn.Module) -> None:
    """Called when a module is about to run outside every graph, while TorchDynamo is off."""
    forward = active.current()
    if forward is None:
        return
    name = forward.name_of(module)
    if name is None:
        return
    forward.batch.enter_module(name)
    if forward.observer is not None and forward.fused is None and may_fuse(module):
        # The same kernels must run as without fxguard, so observe ATen operations instead.
        observation = contextlib.ExitStack()
        forward.fused = FusedModule(module, observation)  # first: an interrupt may come between
        observation.enter_context(DisableTorchFunction())
        observation.enter_context(FusedObserver())


enter_module = torch.compiler.disable(enter_module_undisturbed)


def after_module(module: torch.nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
    """Called when a module has returned.

    Args:
        module: the module.
        args: its positional arguments.
        rest: its keyword arguments and its result. The former are missing if another thread is just
            removing the hooks, in a call that nobody watches.
    """
    kwargs, output = rest if len(rest) == 2 else ({}, rest[0])
    if torch.compiler.is_dynamo_compiling():
        mark_return(output, *args, **kwargs)
        return
    layers = active.here.layers
    if layers is not None:
        layers.returned(module)
    off = layers is not None and layers.running is None
    (leave_module_undisturbed if off else leave_module)(module, args, kwargs, output)


def mark_return(output: Any, /, *args: Any, **kwargs: Any) -> None:
    """Leave the mark of a returned module in the graph that is being traced."""
    labels, tensors = marks.flatten_call(args, kwargs, output)
    marks.module_returned(labels, *tensors)


def leave_module_undisturbed(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Called when a module has returned outside every graph, while TorchDynamo is off."""
    forward = active.current()
    if forward is None or id(module) not in forward.names:
        return
    if forward.fused is not None and forward.fused.module is module:
        forward.leave_fused()
    batch, name = forward.batch, forward.names[id(module)]
    while batch.modules and batch.modules[-1].name != name:
        batch.modules.pop()  # it raised, and the model continued
    calls = batch.calls
    with DisableTorchFunction():
        record_return(forward, name, class_name(type(module)), calls, args, kwargs, output)
    if batch.modules:
        batch.modules.pop()


leave_module = torch.compiler.disable(leave_module_undisturbed)


def record_return(
    forward: ActiveForward,
    name: str,
    kind: str,
    calls: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    """Add the frame of a module that returned outside every graph."""
    labels, tensors = marks.flatten_call(args, kwargs, output)
    batch = forward.batch
    known = batch.live.key_of  # enough for nearly all: graphs and operations leave few unmeasured
    if len(labels) == len(tensors):  # each row has a tensor
        rows = [
            ModuleRow(label, known(tensor) or forward.key_of(tensor, label), "")
            for label, tensor in zip(labels, tensors, strict=True)
        ]
    else:
        rows = [
            ModuleRow(label, None if tensor is None else forward.key_of(tensor, label), note)
            for label, tensor, note in marks.rows_of(labels, tensors)
        ]
    batch.events.append(ModuleReturn(name, kind, calls, rows))


def may_fuse(module: torch.nn.Module) -> bool:
    """Whether a module may now use a fused kernel if no torch function mode is active."""
    if not isinstance(module, FUSED_MODULES) or module.training:
        return False
    return not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters())
