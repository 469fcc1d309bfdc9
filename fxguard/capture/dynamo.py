"""Everything that uses TorchDynamo's underscored names.

The names, their use, and what breaks without them (all present in torch 2.11 to 2.13):

- ``torch._C._dynamo.eval_frame.get_eval_frame_callback``: tells whether somebody compiles the
  guarded model, and with what. Without it ``torch.compile(instrument(model))`` would run the
  model eagerly.
- ``torch._dynamo.eval_frame.innermost_backend``: unwraps it to the user's backend.
- ``torch._dynamo.eval_frame.innermost_fn``: tells whether ``torch.compile`` would compile what the
  user's decorators are around. Without it, a forward under ``torch.compiler.disable`` is captured.
- ``torch._dynamo.eval_frame.OptimizedModule._initialize``: makes the result of ``torch.compile``
  look at the model again. Without it, a compiled model runs uncompiled after ``remove``.
  ``torch._dynamo.trace_rules.check`` is how it decides: whether it has to look again.
- ``InstructionTranslator.current_tx().one_graph`` and ``.output.compiler_fn``: whether somebody
  compiles a function around the model with ``fullgraph=True``, and with what. Without them the
  guard would break that graph, which is an error then. ``.error_on_graph_break`` says the same
  about a part of a function.
- ``torch._dynamo.convert_frame.ConvertFrameAssert``: the form that ``fullgraph=True`` takes.
- ``torch._dynamo.eval_frame.skip_code``: keeps TorchDynamo from compiling the observers as
  functions of their own, which would run them under the compiler they observe. They can still
  be traced as part of a caller.
- ``torch._dynamo.symbolic_convert.InstructionTranslator.current_tx``: its
  ``output.root_tx.f_code`` is the code that is captured. A recompiled graph comes from the same
  code, and that is how ``backend()`` knows where a batch begins. Its
  ``output.has_user_defined_allowed_in_graph``, and
  ``torch._dynamo.trace_rules.is_callable_allowed``: where a backend cannot compile a graph,
  TorchDynamo breaks it, but not if a user's own function is in it. Marks are such functions, and
  must not cause a failure where the plain model has none.
- ``torch._inductor.config.unsafe_marked_cacheable_functions``, if it exists: lets AOTAutograd's
  cache keep graphs with checks. Without it a second process traces them again.
- ``torch._dynamo.convert_frame.preserve_global_state`` and ``compile_lock``: how it compiles. With
  ``full_every`` a graph is compiled again in the middle of a forward, which must not change the
  forward's random numbers, and not happen beside another compilation.
- ``torch._dynamo.utils.counters["graph_break"]``: how often TorchDynamo broke a graph, and why.
  Without it coverage() could not say why operations ran between graphs.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import random
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch._inductor.config as inductor_config
from torch._dynamo import trace_rules
from torch._dynamo.convert_frame import ConvertFrameAssert, compile_lock, preserve_global_state
from torch._dynamo.eval_frame import (
    OptimizedModule,
    innermost_backend,
    innermost_fn,
    skip_code,
)
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from fxguard.batch import module_hooks, observer
from fxguard.capture import (
    context_vars,
    decisions,
    layers,
    let_go,
    lifted_items,
    own_sizes,
    plain_python,
    traced_modules,
    try_blocks,
)
from fxguard.capture.captured_only import captured_only
from fxguard.capture.instances import instances_of
from fxguard.capture.quiet import captured
from fxguard.capture.validation import own_compilation
from fxguard.graph import marks

__all__ = [
    "Backend",
    "Compiled",
    "Entry",
    "OuterCompiler",
    "backend_of_tracing",
    "cached_with",
    "captured_code",
    "compile_again",
    "compile_forward",
    "compiling",
    "eval_frame_callback",
    "graph_breaks",
    "is_compiled",
    "leave_to_python",
    "let_backend_fail",
    "may_not_break",
    "object_at",
    "outer_compiler",
    "take_for_constant",
    "wrap_backend",
]

# Compilations of one guarded forward before TorchDynamo gives up and leaves it to the observer.
# Changing shapes and train/eval switches soon reach TorchDynamo's own limit, 8.
RECOMPILE_LIMIT = 64

# TorchDynamo also limits the compilations of one code object for all models together. They have
# graphs of their own here, so the limit would leave the 257th model of a class to Python.
NO_LIMIT = 1 << 30

Backend = Callable[[GraphModule, list[Any]], Callable[..., Any]]

Made = TypeVar("Made")


class Entry(NamedTuple):
    """A method of a model, as a function that can be compiled without keeping the model alive."""

    function: Callable[..., Any]
    takes_model: bool  # as its first argument


class Compiled(NamedTuple):
    """A compiled function, and one that only calls what was captured of it, if there is one."""

    function: Callable[..., Any]
    captured: Callable[..., Any] | None  # see captured_only
    code: types.CodeType | None  # its first frame's; torch wraps functions of its own in another


@dataclass(frozen=True, slots=True)
class OuterCompiler:
    """The ``torch.compile`` that the guarded model runs under."""

    backend: Backend
    fullgraph: bool


# Called in a frame that TorchDynamo skips, this tells who would compile what that frame calls.
eval_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def outer_compiler(callback: Any) -> OuterCompiler | None:
    """The compiler of the code that is running, if any."""
    if not callable(callback) or not hasattr(callback, "_torchdynamo_orig_backend"):
        return None
    convert = callback._torchdynamo_orig_backend
    return OuterCompiler(innermost_backend(callback), isinstance(convert, ConvertFrameAssert))


def backend_of_tracing() -> Any:
    """The backend for the graph that is being traced in this thread; None if there is none."""
    try:
        root = InstructionTranslator.current_tx()
    except AttributeError:  # nothing is traced in this thread
        return None
    return plain_python.backend_of(root)


def wrap_backend(wrap: Callable[[Backend], Backend], *, whole_graph: bool = False) -> bool:
    """Put another backend around that of the graph that is being traced.

    Args:
        wrap: makes a backend from the user's backend; may return the latter.
        whole_graph: only if the graph must not break.

    Returns:
        False if it may break after all, or nothing is traced: then nothing has changed.
    """
    try:
        root = InstructionTranslator.current_tx()
    except AttributeError:  # nothing is traced in this thread
        return False
    if whole_graph and not root.one_graph:
        return False
    output = root.output
    assert output.compiler_fn is not None
    backend = innermost_backend(output.compiler_fn)
    wrapped = wrap(backend)
    if wrapped is not backend:
        output.compiler_fn = wrapped
    return True


def object_at(address: int) -> Any:
    """The object with this ``id``, which has to be alive.

    While tracing, TorchDynamo of torch 2.11 passes only constants to the functions that it calls,
    and treats an ``id`` as one.
    """
    return ctypes.cast(address, ctypes.py_object).value


def take_for_constant(function: Callable[..., Any]) -> None:
    """Let TorchDynamo call a function while tracing, and treat the result as a constant."""
    torch._dynamo.assume_constant_result(function)


def is_compiled(model: Any) -> bool:
    """Whether this is the result of ``torch.compile`` on a module."""
    return isinstance(model, OptimizedModule)


def compile_again(model: torch.nn.Module) -> None:
    """Let every result of ``torch.compile(model)`` look at the model's forward anew.

    When created, such a result decides how it calls the model: a forward in ``torch.nn`` needs a
    TorchDynamo function around it, and a forward elsewhere, such as a guard's, must have none. So
    there is something to decide anew only where the model's own forward is in ``torch.nn``.
    """
    forward = getattr(type(model), "forward", None)
    if isinstance(forward, types.FunctionType) and not trace_rules.check(forward):
        return
    for wrapper in instances_of(OptimizedModule):
        if wrapper._orig_mod is model:
            wrapper._initialize()


def compile_forward(
    forward: Callable[..., Any],
    backend: Backend,
    *,
    fullgraph: bool,
    leave_what_fails: bool,
    layers_in_turn: int = 0,
) -> Compiled:
    """``torch.compile`` for a guarded forward, with its own room for recompilations.

    Args:
        forward: what to compile.
        backend: the backend.
        fullgraph: as for ``torch.compile``.
        leave_what_fails: whether code that TorchDynamo fails to capture is silently left to Python
            and to the observer, because nobody asked for this compilation.
        layers_in_turn: how many layers are captured one by one, each of which may need a capture of
            its own.
    """
    let_go.tidy()
    plain_python.prepare_tracing()
    traced_modules.mark_traced_modules()
    try_blocks.leave_early()
    context_vars.follow_context_vars()
    decisions.follow_decisions()
    lifted_items.lift_items()
    own_sizes.keep_sizes_apart()
    limit = max(RECOMPILE_LIMIT, 4 * layers_in_turn)  # with gradients and without, training or not
    options: dict[str, Any] = {"recompile_limit": limit, "isolate_recompiles": True}
    known = inspect.signature(torch.compile).parameters  # torch 2.11 has neither of them
    options = {name: value for name, value in options.items() if name in known}
    if innermost_fn(forward) is not forward:
        forward = _as_it_is(forward)
    with own_compilation():
        compiled: Callable[..., Any] = torch.compile(
            forward, backend=backend, fullgraph=fullgraph, **options
        )
    let_go.forget_backend(backend)
    settings: dict[str, Any] = {"accumulated_recompile_limit": NO_LIMIT}
    if not options:
        settings["recompile_limit"] = limit
    function = captured(compiled, settings, quietly=leave_what_fails)
    code: types.CodeType | None = getattr(innermost_fn(compiled), "__code__", None)
    return Compiled(function, captured_only(compiled), code)


def compiling(function: Callable[..., Made], *args: Any) -> Made:
    """Call a function that compiles a graph, in the middle of a forward."""
    with compile_lock:
        state = random.getstate()
        try:
            return preserve_global_state(function)(*args)  # type: ignore[no-any-return]
        finally:
            random.setstate(state)


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that ``torch.compile`` does not take ``torch.compiler.disable`` off."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return forward


def graph_breaks() -> Counter[str]:
    """The number of TorchDynamo's graph breaks in this process, by reason."""
    global _breaks
    found = counters["graph_break"]
    total = sum(found.values())
    if total != _breaks[0]:  # called at each forward, but changes rarely
        reasons: Counter[str] = Counter()
        for text, count in found.items():
            reasons[text.partition("\n")[0].strip()] += count
        _breaks = total, reasons
    return _breaks[1]


_breaks: tuple[int, Counter[str]] = (0, Counter())  # their total number, and the number by reason


def captured_code() -> types.CodeType | None:
    """The code that TorchDynamo is capturing a graph from; None outside TorchDynamo."""
    try:
        code: types.CodeType = InstructionTranslator.current_tx().output.root_tx.f_code
    except AttributeError:
        return None
    return code


def cached_with(keys: Mapping[str, str]) -> contextlib.AbstractContextManager[object]:
    """Let AOTAutograd's cache keep graphs that call functions unknown to it.

    By itself it does not keep them, because it cannot tell when such functions change.

    Args:
        keys: qualified name of a function to a key that changes with the function.
    """
    option = "unsafe_marked_cacheable_functions"
    if not keys or not hasattr(inductor_config, option):
        return contextlib.nullcontext()
    known = getattr(inductor_config, option)
    patch: contextlib.AbstractContextManager[object]
    patch = inductor_config.patch({option: {**known, **keys}})
    return patch


def let_backend_fail(graph_module: GraphModule) -> None:
    """Let TorchDynamo break a graph that its backend cannot compile, as it does without marks."""
    targets = {node.target for node in graph_module.graph.nodes if node.op == "call_function"}
    if any(trace_rules.is_callable_allowed(target) for target in targets - marks.MARKS):
        return
    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:  # not called by TorchDynamo
        return
    output.has_user_defined_allowed_in_graph = False


@torch._dynamo.assume_constant_result
def may_not_break() -> bool:
    """In code that TorchDynamo traces: whether a graph break is an error."""
    now = InstructionTranslator.current_tx()
    return bool(now.one_graph or now.error_on_graph_break)


def leave_to_python(function: Any) -> None:
    """Keep TorchDynamo from compiling a function by itself; it can still be traced in a caller."""
    skip_code(function.__code__)  # type: ignore[attr-defined]


for function in (
    observer.Observer.__torch_function__,
    observer.FusedObserver.__torch_dispatch__,
    module_hooks.before_module,
    module_hooks.after_module,
    layers.Switch.begins,
    layers.Switch.returned,
):
    leave_to_python(function)
