"""Makes each module that TorchDynamo traces leave a mark in the graph when it has returned.

Hooks on all modules could leave the mark as well, and do so for modules with hooks of their own.
But with a hook, TorchDynamo traces all of ``Module._call_impl``, which takes longer than tracing
the computation of most modules. So it is told here to go straight to ``forward``, as without hooks.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15):

- ``UnspecializedNNModuleVariable.call_function``: traces a call of a module. What it does for one
  without hooks is done here, for those that have only fxguard's. Without it the hooks are traced.
- ``record_nn_module_stack``, ``guard_to_detect_forward_monkeypatching``, the methods that say where
  a module comes from, and ``unpatched_nn_module_call``: what that is made of.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.modules.module as module_hooks
from torch._dynamo.utils import unpatched_nn_module_call, unpatched_nn_module_call_impl
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.nn_module import (
    UnspecializedNNModuleVariable,
    guard_to_detect_forward_monkeypatching,
    record_nn_module_stack,
)
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch.nn.modules.lazy import LazyModuleMixin

from fxguard.batch.module_hooks import mark_return
from fxguard.capture.long_captures import module_was_traced
from fxguard.capture.module_hooks import HOOK_ID
from fxguard.capture.plain_python import backend_of, follows_python
from fxguard.capture.try_blocks import leave_try_block_of_last
from fxguard.graph import marks

__all__ = ["mark_traced_modules", "pass_through"]

OWN_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
GLOBAL_HOOKS = (
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
)

# Objects of other classes that are values or hold them, see fxguard.graph.marks.flatten.
ENTERED = (torch.Tensor, dict, tuple, list)

# Traces an attribute of a module; the first name exists from torch 2.15 on.
_attribute_of: Any = (
    getattr(UnspecializedNNModuleVariable, "tp_getattro_impl", None)
    or UnspecializedNNModuleVariable.var_getattr
)
# From torch 2.12 on, the method that gives the source of a module's attribute takes the tracer.
_SOURCE_TAKES_TX = (
    "tx" in inspect.signature(UnspecializedNNModuleVariable.get_source_by_walking_mro).parameters
)


@functools.cache
def mark_traced_modules() -> None:
    """Let TorchDynamo go straight to the forward of modules with only our hooks; done once."""
    original = UnspecializedNNModuleVariable.call_function

    def call_function(self: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if HOOK_ID in module_hooks._global_forward_hooks and _has_plain_call(self, tx):
            return _call_forward(self, tx, args, kwargs)
        return original(self, tx, args, kwargs)  # type: ignore[arg-type]

    UnspecializedNNModuleVariable.call_function = call_function  # type: ignore[method-assign]


_passed_through: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def pass_through(call: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Note a function that replaces ``Module.__call__`` and just calls it in a checked graph.

    Args:
        call: the function.
        original: the function that it calls.
    """
    if original is unpatched_nn_module_call:
        _passed_through.add(call)


def _has_plain_call(module: Any, tx: Any) -> bool:
    """Whether a call of a module only calls its forward, apart from our hooks."""
    value = module.value
    return (
        not isinstance(value, LazyModuleMixin)  # TorchDynamo has to make its weights first
        and _is_plain(getattr(value.__call__, "__func__", None), tx)
        and getattr(value._call_impl, "__func__", None) is unpatched_nn_module_call_impl
        and not module.has_key_in_generic_dict(tx, "forward")
        and isinstance(inspect.getattr_static(value, "forward"), types.FunctionType)
        and not any(set(getattr(module_hooks, kind)) - {HOOK_ID} for kind in GLOBAL_HOOKS)
        and not any(_attribute_of(module, tx, kind).realize().len() for kind in OWN_HOOKS)
    )


def _is_plain(call: Any, tx: Any) -> bool:
    """Whether it is ``Module.__call__``, or equivalent in the graph that is traced."""
    if call is unpatched_nn_module_call:
        return True
    return call in _passed_through and getattr(backend_of(tx), "has_marks", False)


def _call_forward(module: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source = None
    stack: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if module.source:
        asked = (tx, "forward") if _SOURCE_TAKES_TX else ("forward",)
        source = module.get_source_by_walking_mro(*asked)
        path = module.get_nn_module_stack_source()
        stack = record_nn_module_stack(str(id(module.value)), path, tx, module.value)
    guard_to_detect_forward_monkeypatching(module.source, module.value)
    with stack:
        forward = UserFunctionVariable(module.value_type.forward, source=source)
        output = forward.call_function(tx, [module, *args], dict(kwargs))
        if follows_python(tx):
            leave_try_block_of_last(tx)
        _leave_mark(tx, args, kwargs, output)
    module_was_traced()
    return output


def _leave_mark(tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
    labels: list[str] = []
    tensors: list[Any] = []
    rows = [(f"input[{index}]", value) for index, value in enumerate(args)]
    rows += [(f"input[{name}]", value) for name, value in kwargs.items()]
    if all(_flatten(tx, *row, labels, tensors) for row in (*rows, ("output", output))):
        mark = VariableTracker.build(tx, marks.module_returned)
        texts = TupleVariable([ConstantVariable.create(label) for label in labels])
        mark.call_function(tx, [texts, *tensors], {})
    else:  # another container, which Python can enter
        traced = VariableTracker.build(tx, mark_return)
        traced.call_function(tx, [output, *args], dict(kwargs))


def _flatten(tx: Any, label: str, value: Any, labels: list[str], tensors: list[Any]) -> bool:
    """Does the work of :func:`fxguard.graph.marks.flatten` for variables of the commonest values.

    Returns:
        Whether the value is one of those.
    """
    if isinstance(value, LazyVariableTracker):
        value = value.realize()
    kind = type(value)
    if kind is TensorVariable:
        labels.append(label)
        tensors.append(value)
    elif kind is ConstantVariable:
        is_none = value.as_python_constant() is None
        labels.append((marks.NO_VALUE if is_none else marks.NOT_TENSOR) + label)
    elif kind in (ListVariable, TupleVariable):
        items = enumerate(value.items)
        return all(_flatten(tx, f"{label}[{i}]", item, labels, tensors) for i, item in items)
    elif kind is not UserDefinedObjectVariable or issubclass(value.value_type, ENTERED):
        return False
    elif dataclasses.is_dataclass(value.value_type):
        of_object = VariableTracker.build(tx, getattr)
        names = [field.name for field in dataclasses.fields(value.value_type)]
        fields = (
            of_object.call_function(tx, [value, ConstantVariable.create(name)], {})
            for name in names
        )
        rows = zip(names, fields, strict=True)
        return all(_flatten(tx, f"{label}[{name}]", x, labels, tensors) for name, x in rows)
    else:  # such as a cache
        labels.append(marks.NOT_TENSOR + label)
    return True
