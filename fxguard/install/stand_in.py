"""The function that replaces the forward of a guarded model.

It hands the call to the guard, with the compiler around it, if there is one. It steps aside when
somebody traces the model itself (``torch.export``, a graph compiled around it) and when there are
no numbers to check (fake tensors).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.nn import Module

from fxguard.capture import backend, dynamo
from fxguard.install.instrumented import GUARD
from fxguard.torch_names import (
    FakeTensor,
    FakeTensorMode,
    dispatch_mode_count,
    dispatch_modes,
    tracing_state,
)

__all__ = ["RUN_LATER", "reason_to_stand_aside", "stand_in_for"]

__tracebackhide__ = True  # by pytest: it shows the test, and where the model was called

# What a forward returns if it has computed nothing yet.
RUN_LATER = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def reason_to_stand_aside(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why one call of the model cannot be checked, as ``coverage()`` words it; "" if it can."""
    if tracing_state() is not None:
        return "under torch.jit.trace"
    if dispatch_mode_count():
        modes = dispatch_modes()
        if any(isinstance(mode, (FakeTensorMode, ProxyTorchDispatchMode)) for mode in modes):
            return "with fake tensors"  # make_fx also traces with fake tensors
    for value in (*args, *kwargs.values()):
        if isinstance(value, FakeTensor):
            return "with fake tensors"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "recorded as a CUDA graph"
    return ""


def stand_in_for(original: Callable[..., Any], method: str) -> Any:
    """A function that replaces a method of a guarded model, and looks like it."""
    # What takes the model keeps it alive, and this function must not: a guard holds it.
    plain = None if isinstance(original, types.MethodType) else original

    # If this function is the outermost one of a compilation, TorchDynamo skips it, but not the
    # functions that it calls, so that `guarded` sees who compiles. If the user compiles a function
    # around the model, TorchDynamo traces this function, which then selects what to trace.
    def wrapper(model: Module, /, *args: Any, **kwargs: Any) -> Any:
        guard = model.__dict__[GUARD]
        if torch.compiler.is_dynamo_compiling():
            is_plain = backend.is_inlined(id(guard))
        else:
            is_plain = torch.compiler.is_exporting()
            if not is_plain and dynamo.eval_frame_callback() is None:  # nobody compiles
                return run_guarded(guard, method, None, args, kwargs)
        if not is_plain:
            return guarded(guard, method, args, kwargs)
        own_methods = guard.installation.own_methods
        if method in own_methods:
            return own_methods[method](*args, **kwargs)
        if plain is not None:
            return plain(*args, **kwargs)
        return getattr(type(model), method)(model, *args, **kwargs)

    functools.update_wrapper(wrapper, getattr(original, "__func__", original))
    stand_in: Any = wrapper
    model = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    with contextlib.suppress(ValueError):  # functions written in C may have no signature
        # Trainers and `generate` look here for the names of the model's arguments.
        signature = inspect.signature(original)
        parameters = [model, *signature.parameters.values()]
        stand_in.__signature__ = signature.replace(parameters=parameters)
    dynamo.leave_to_python(wrapper)
    return stand_in


# Two functions are needed. TorchDynamo skips the outer one but not the functions that it calls, so
# that it sees who compiles. The inner one switches TorchDynamo off for fxguard's own code, and its
# torch.compile switches it on again. With a single function, fullgraph=True fails.
@torch.compiler.disable(recursive=False)
def guarded(guard: Any, method: str, args: Any, kwargs: Any) -> Any:
    return run_undisturbed(guard, method, dynamo.eval_frame_callback(), args, kwargs)


def run_guarded(guard: Any, method: str, callback: Any, args: Any, kwargs: Any) -> Any:
    if reason := reason_to_stand_aside(args, kwargs):
        guard.unchecked_calls[reason] += 1
        return guard.installation.original(method)(*args, **kwargs)
    outer = backend.outer_compiler(callback) if callable(callback) else None
    return guard.run(method, outer, args, kwargs)


run_undisturbed = torch.compiler.disable(run_guarded)
