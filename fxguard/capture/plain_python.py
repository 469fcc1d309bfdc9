"""Lets TorchDynamo capture an eager model along the path of plain Python.

Nobody asked for a compiler, so nobody may notice one. TorchDynamo differs from Python in ways that
a model can see. This module undoes them, only for our own captures (:mod:`fxguard.install._hooks`
handles hooks):

- It answers ``torch.compiler.is_compiling()`` with True. Models then choose other code: those of
  transformers build whole attention masks. They also ask whether a device is recording a stream,
  which TorchDynamo cannot trace. ``nn.MultiheadAttention`` leaves out its fused kernel.
- It traces operations through the observer, as through any torch function mode.
  Some methods of tensors break the graph under a mode (``unflatten``).
- It takes ``mark_static_address``, which only code asks for that is not compiled, for an error.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15):

- ``TorchInGraphFunctionVariable._get_handlers()``: the table that says how calls of functions such
  as ``is_compiling`` are traced. Ours look first at who asks, and whose capture it is.
- ``SymbolicTorchFunctionState.in_torch_function_mode``: whether a call is traced through the modes
  that are active. The stack of modes stays as it is: a graph that changes it puts it back.
- ``symbolic_convert.is_forbidden``: whether a function may not be traced at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.symbolic_convert as symbolic_convert
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.exc import unimplemented
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.torch_function import SymbolicTorchFunctionState

from fxguard.batch.observer import Observer
from fxguard.source.lines import is_internal

__all__ = ["backend_of", "follows_python", "prepare_tracing", "traced_under_observer"]

# Questions that models ask to choose their path; in plain Python the answer to each is no. A guard
# steps aside while a stream is recorded.
ASKED = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch.compiler.is_exporting,
    torch._utils.is_compiling,
    torch._dynamo.external_utils.is_compiling,
    torch.cuda.is_current_stream_capturing,
)

# Decides whether nn.MultiheadAttention uses its fused kernel in evaluation; torch itself calls it.
MAY_FUSE = torch.nn.modules.activation._is_make_fx_tracing


@functools.cache
def prepare_tracing() -> None:
    """Teach TorchDynamo these answers, once, before the first capture."""
    handlers = TorchInGraphFunctionVariable._get_handlers()
    asked = [*ASKED, MAY_FUSE]
    if not torch.xpu.is_available() and hasattr(torch.xpu, "is_current_stream_capturing"):
        # TorchDynamo breaks the graph at every function of torch.xpu.
        asked.append(torch.xpu.is_current_stream_capturing)
        get_torch_obj_rule_map()[asked[-1]] = TorchInGraphFunctionVariable
    for function in asked:
        handlers[function] = _python_answers(handlers.get(function, _as_ever))
    state: Any = SymbolicTorchFunctionState
    state.in_torch_function_mode = _is_traced_through_modes
    torch.compiler.allow_in_graph(torch._dynamo.mark_static_address)
    asking: Any = symbolic_convert
    asking.is_forbidden = _left_to_python(asking.is_forbidden)


# Called when an operation is traced while only our observers are on the stack of modes.
traced_under_observer: list[Callable[[], object]] = []


def _is_traced_through_modes(state: Any) -> bool:
    if not all(map(_is_observer, state.mode_stack)):
        return True
    if state.mode_stack:
        for hear in traced_under_observer:
            hear()
    return False


def _is_observer(mode: Any) -> bool:
    """Whether a mode on the stack that TorchDynamo traces is ours."""
    if isinstance(mode, LazyVariableTracker):
        if not mode.is_realized():
            return isinstance(mode.original_value(), Observer)
        mode = mode.realize()
    return isinstance(getattr(mode, "value", None), Observer)


def backend_of(tx: Any) -> Any:
    """The backend for the graph that is being traced, as it was given."""
    backend = innermost_backend(tx.output.compiler_fn)
    return getattr(backend, "compiler_fn", backend)  # torch.compile keeps it with its options


def follows_python(tx: Any) -> bool:
    """Whether the graph that is being traced has to take the path of plain Python."""
    return getattr(backend_of(tx), "follows_python", False)


def _python_answers(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of ``is_compiling`` that answers code of the user as plain Python would."""

    @functools.wraps(handler)
    def handle(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        # Torch itself has to know that it is traced, and so do fxguard's hooks.
        if follows_python(tx) and (
            self.value is MAY_FUSE or not is_internal(tx.f_code.co_filename)
        ):
            return ConstantVariable.create(False)
        return handler(self, tx, *args, **kwargs)

    return handle


def _left_to_python(is_forbidden: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Replaces the test for functions that may not be traced, so that calling them is an error.

    A call of ``mark_static_address`` becomes part of the graph, which applies it to its own
    tensors. Before all other such calls the graph ends, and Python makes the call.
    """

    @functools.wraps(is_forbidden)
    def ask(function: Any) -> bool:
        if not is_forbidden(function):
            return False
        tx = InstructionTranslator.current_tx()
        if not follows_python(tx):
            return True
        if function is torch._dynamo.mark_static_address:
            return False
        name = getattr(function, "__name__", type(function).__name__)
        why = "TorchDynamo must not trace it."
        return unimplemented(gb_type=f"call of {name}", context=name, explanation=why, hints=[])

    return ask


def _as_ever(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> None:
    """Give no answer, so that TorchDynamo continues as if there were no handler."""
