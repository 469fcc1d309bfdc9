"""Every private name of torch that is used outside ``capture/``, and what breaks without it.

``capture/`` is the home of ``torch._dynamo`` and ``torch._inductor``; :mod:`fxguard.trees` is that
of ``torch.utils._pytree``. A new version of torch is tried against these three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Modules that a compiler runs are no models of the script.
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import CompileContext

# Its body is run as Python in a second run, as those of other higher-order operations are.
from torch._higher_order_ops.flex_attention import flex_attention

# The kinds of callables that stand in a captured graph: each has its name and its schema elsewhere.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

# Shapes without numbers: nothing is measured, and no pass computes with them.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# TorchDynamo captures a block of autocast as these two calls.
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

# A model that is traced or exported runs as it would without fxguard.
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

# It puts the outputs of an exported graph together, with the statistics of the checks.
from torch.fx.graph import _PyTreeCodeGen
from torch.nn.attention import SDPBackend, _backend_names, _sdpa_kernel

# Criteria: what they return is a loss, and the variable that holds one names no model.
from torch.nn.modules.loss import _Loss

# ``torch.set_default_device`` puts this mode on the stack, which is no mode of the user's.
from torch.utils._device import DeviceContext

# Operations below autograd: a collective that a custom operation hides is refused there, and the
# operation that failed first inside a composite one is found there.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,  # such a tensor is measured by the tensors that it wraps
)

try:  # the module of an operator that was defined in Python, for a reproducer to import
    from torch._library.custom_ops import OPDEFS
except ImportError:  # another version
    OPDEFS = {}  # type: ignore[assignment] # weak values need no other kind of mapping

__all__ = [
    "ATTENTION_KERNELS",
    "OPDEFS",
    "CompileContext",
    "Criterion",
    "DeviceContext",
    "DisableTorchFunction",
    "DispatchKey",
    "DispatchKeySet",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "PyTreeCodeGen",
    "TorchDispatchMode",
    "allow_saved_tensor_hooks",
    "copy_each",
    "cuda_device",
    "cuda_is_capturing",
    "cuda_stream",
    "current_autograd_node",
    "dispatch_mode_count",
    "dispatch_modes",
    "enter_autocast",
    "enter_inference_mode",
    "exit_autocast",
    "exit_inference_mode",
    "flex_attention",
    "forbid_saved_tensor_hooks",
    "func_level",
    "func_level_count",
    "func_level_of",
    "func_levels_left",
    "function_mode_at",
    "function_mode_count",
    "graph_task",
    "is_any_autocast_on",
    "is_fx_symbolic_tracing",
    "is_of_func_level",
    "is_of_vmap",
    "is_traceable_wrapper_subclass",
    "leave_func_levels",
    "pop_function_mode",
    "push_function_mode",
    "resolve_process_group",
    "sequence_number",
    "set_grad_enabled",
    "top_saved_tensor_hooks",
    "tracing_state",
    "use_attention_kernels",
    "vmapped_dim",
    "why_saved_tensor_hooks_are_forbidden",
    "without_func_level",
]

# Torch functions and subclasses.

# Hides fxguard's own arithmetic from torch function modes and from subclasses of tensors.
DisableTorchFunction = torch._C.DisableTorchFunction
# The observer steps aside for a user's mode, and goes back to its place in the stack.
function_mode_count = torch._C._len_torch_function_stack
function_mode_at = torch._C._get_function_stack_at
push_function_mode = torch._C._push_on_torch_function_stack
pop_function_mode = torch._C._pop_torch_function_stack

# Dispatch modes and keys.

# A guard does not run in a user's dispatch mode, and the C extension does not read through one.
dispatch_mode_count = torch._C._len_torch_dispatch_stack
dispatch_modes = _get_current_dispatch_mode_stack
# A custom operation with a kernel of its own for autograd may wait for other ranks.
DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet

# ``torch.func``.

# A tensor under ``vmap`` or ``grad`` stands for others, and its numbers are read below all levels.
func_level = torch._C._functorch.peek_interpreter_stack
func_level_count = torch._C._functorch.get_dynamic_layer_stack_depth
leave_func_levels = torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth
is_of_func_level = torch._C._functorch.is_functorch_wrapped_tensor
without_func_level = torch._C._functorch.get_unwrapped
is_of_vmap = torch._C._functorch.is_batchedtensor
vmapped_dim = torch._C._functorch.maybe_get_bdim
func_level_of = torch._C._functorch.maybe_get_level
# fxguard's own tensors are written outside of all levels: in one, only what was made there may be.
func_levels_left = temporarily_clear_interpreter_stack

# Autograd.

# Under ``torch.func.grad`` hooks on saved tensors are forbidden, with a message that is kept.
forbid_saved_tensor_hooks = torch._C._autograd._saved_tensors_hooks_disable
allow_saved_tensor_hooks = torch._C._autograd._saved_tensors_hooks_enable
why_saved_tensor_hooks_are_forbidden = (
    torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
)
# Activation checkpointing counts what a forward saves: a second one has to save the same.
top_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
# A forward inside a backward is activation checkpointing, and no batch of its own.
graph_task = torch._C._current_graph_task_id
# A hook on a node is not told which one: what a script computed is found from there.
current_autograd_node = torch._C._current_autograd_node
sequence_number = torch._C._autograd._get_sequence_nr
# A graph that runs again sets the grad mode that the graph of the first run set.
set_grad_enabled = torch._C._set_grad_enabled
enter_inference_mode = torch.autograd.grad_mode._enter_inference_mode
exit_inference_mode = torch.autograd.grad_mode._exit_inference_mode
# All weights of a step are copied in one call.
copy_each = torch._foreach_copy_

# Autocast.

# An operation between graphs is told apart from one that autocast has cast.
is_any_autocast_on = torch._C._is_any_autocast_enabled
enter_autocast, exit_autocast = _enter_autocast, _exit_autocast

# Attention.

# A second run takes the kernels of attention that the first one was allowed to take.
# :func:`torch.nn.attention._cur_sdpa_kernel_backends` reads the same; this runs in each batch.
ATTENTION_KERNELS = [
    (getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(SDPBackend, backend))
    for name, backend in _backend_names.items()
]
use_attention_kernels = _sdpa_kernel

# Tracing and compiling.

tracing_state = torch._C._get_tracing_state
PyTreeCodeGen = _PyTreeCodeGen

# Devices.

# torch.cuda asks the same with a lock and a new object for each answer, which takes longer than a
# check. Builds without CUDA do not have them.
cuda_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
cuda_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
# In a CUDA graph nothing may wait for the device.
cuda_is_capturing = torch._C._cuda_isCurrentStreamCapturing

# Ranks.


def resolve_process_group(name: str) -> Any:
    """The group that the functional collectives give by its name."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore


# Kinds.

Criterion = _Loss
