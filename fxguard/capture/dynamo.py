"""Everything that touches TorchDynamo. The only file that may use its underscored names.

What is used, why, and what breaks without it (all present in torch 2.11 to 2.13):

- ``torch._C._dynamo.eval_frame.get_eval_frame_callback``: tells whether somebody compiles the
  guarded model, and with what. Without it ``torch.compile(instrument(model))`` would run the
  model eagerly.
- ``torch._dynamo.eval_frame.innermost_backend``: unwraps that to the user's backend.
- ``torch._dynamo.eval_frame.OptimizedModule._initialize``: makes the result of ``torch.compile``
  look at the model again. Without it a compiled model runs uncompiled after ``remove``.
- ``InstructionTranslator.current_tx().one_graph`` and ``.output.compiler_fn``: whether somebody
  compiles a function around the model with ``fullgraph=True``, and with what. Without them the
  guard would break that graph, which is an error then.
- ``torch._dynamo.convert_frame.ConvertFrameAssert``: the form that ``fullgraph=True`` takes.
- ``torch._dynamo.eval_frame.skip_code``: keeps TorchDynamo from compiling the observers as
  functions of their own, which would run them under the compiler they observe. They can still
  be traced as part of a caller.
- ``torch._dynamo.symbolic_convert.InstructionTranslator.current_tx``: its
  ``output.root_tx.f_code`` is the code that is captured. A recompiled graph comes from the same
  code, and that is how ``backend()`` knows where a batch begins. Its
  ``output.has_user_defined_allowed_in_graph``, and
  ``torch._dynamo.trace_rules.is_callable_allowed``: where a backend cannot compile a graph,
  TorchDynamo breaks it, but not when a user's own function stands in it. Marks are such
  functions, and no reason to fail where the plain model would not.
- ``torch._inductor.config.unsafe_marked_cacheable_functions``, where there is one: lets
  AOTAutograd's cache keep graphs with checks. Without it a second process traces them again.
- ``torch._dynamo.config._make_closure_patcher``: settings for one forward. The public
  ``config.patch`` does the same and takes ten times as long, at each forward.
- ``torch._dynamo.utils.counters["graph_break"]``: how often TorchDynamo broke a graph, and why.
  Without it coverage() could not say why operations ran between graphs.
- ``torch.nn.modules.module._global_forward_hooks`` and its two companions: hooks on every
  module for the time of one forward. The public function gives a new key at each call, and
  TorchDynamo would compile again for each key. Hooks on the modules themselves would switch off
  the fused kernels of ``nn.TransformerEncoder``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import inspect
import threading
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.nn.modules.module as module_hooks
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.convert_frame import ConvertFrameAssert
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend, skip_code
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.trace_rules import is_callable_allowed
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from torch.utils.hooks import RemovableHandle

from fxguard.batch import active, observer
from fxguard.batch import module_hooks as module_calls
from fxguard.batch.events import GraphRun, Postponed
from fxguard.capture import plain_python
from fxguard.graph import marks
from fxguard.graph.overwritten_inputs import spoiled_inputs
from fxguard.graph.random_state import RandomState
from fxguard.graph.torch_settings import changes_settings, settings_now
from fxguard.measure import eager, func_levels, inductor, traceable
from fxguard.passes.checkpointing import keep_random_state
from fxguard.passes.checks import Arithmetic, with_checks, without_marks
from fxguard.plan.plan import Plan
from fxguard.plan.reader import make_plan
from fxguard.records import Role
from fxguard.rerun.whole_graph import leaving_of, measure_leaving

__all__ = [
    "HOOK_ID",
    "CheckingBackend",
    "OuterCompiler",
    "captured_code",
    "compile_again",
    "compile_forward",
    "eval_frame_callback",
    "graph_breaks",
    "is_compiled",
    "is_inlined",
    "leave_to_python",
    "module_hooks_on",
    "object_at",
    "outer_compiler",
]

# Compilations of one guarded forward before TorchDynamo gives up and leaves it to the observer.
# TorchDynamo's own limit, 8, is soon reached by changing shapes and train/eval switches.
RECOMPILE_LIMIT = 64

NOTHING = torch.empty((0, 2))  # the statistics of a graph that has not returned

# What checks call, in AOTAutograd's words.
FUNCTIONS_IN_GRAPHS = tuple(
    f"{function.__module__}.{function.__name__}"
    for function in (inductor.abs_min_max, inductor.collect, func_levels.without_levels)
)

Backend = Callable[[GraphModule, list[Any]], Callable[..., Any]]


class OuterCompiler:
    """The ``torch.compile`` that the guarded model runs under."""

    def __init__(self, backend: Backend, fullgraph: bool) -> None:
        self.backend = backend
        self.fullgraph = fullgraph


# Called by a frame that TorchDynamo skips, this says who would compile what that frame calls.
eval_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def outer_compiler(callback: Any) -> OuterCompiler | None:
    """Who compiles the code that is running, if anybody does."""
    if not callable(callback) or not hasattr(callback, "_torchdynamo_orig_backend"):
        return None
    convert = callback._torchdynamo_orig_backend
    backend = innermost_backend(callback)
    if isinstance(backend, CheckingBackend):
        backend = backend.inner
    return OuterCompiler(backend, isinstance(convert, ConvertFrameAssert))


def object_at(address: int) -> Any:
    """The object of which this is the ``id``, which has to be alive.

    While it traces, TorchDynamo of torch 2.11 hands nothing but constants to the functions that it
    calls, and takes an ``id`` for one.
    """
    return ctypes.cast(address, ctypes.py_object).value


def is_inlined(guard_id: int) -> bool:
    """Whether what TorchDynamo traces now is to hold the plain forward of a guarded model.

    TorchDynamo calls this while it traces a function around the model, and takes the answer for a
    constant. A break of the graph in front of the model lets the guard run it. Where breaks are
    errors (``fullgraph=True``) the graph around it is checked instead: its backend is wrapped, as
    that of the guarded forward is.

    Args:
        guard_id: ``id`` of the model's guard, whose ``compiled_around`` makes a backend of one.
    """
    if torch.compiler.is_exporting():
        return True
    if is_checked():
        return True  # the model calls itself, or is part of one that is guarded
    try:
        root = InstructionTranslator.current_tx()
    except AttributeError:  # nothing is traced in this thread
        return False
    if not root.one_graph:
        return False
    output = root.output
    assert output.compiler_fn is not None
    guard = object_at(guard_id)
    output.compiler_fn = guard.compiled_around(innermost_backend(output.compiler_fn))
    return True


def is_checked() -> bool:
    """Whether what TorchDynamo traces now is part of a graph that is checked."""
    try:
        root = InstructionTranslator.current_tx()
    except AttributeError:  # nothing is traced in this thread
        return False
    return isinstance(plain_python.backend_of(root), CheckingBackend)


def take_for_constant(function: Callable[..., Any]) -> None:
    """Let TorchDynamo call a function while it traces, and take what it returns for a constant."""
    torch._dynamo.assume_constant_result(function)


take_for_constant(is_inlined)
take_for_constant(is_checked)


def is_compiled(model: Any) -> bool:
    """Whether this is the result of ``torch.compile`` of a module."""
    return isinstance(model, OptimizedModule)


def compile_again(model: torch.nn.Module) -> None:
    """Let every result of ``torch.compile(model)`` look at the model's forward anew.

    It decides when it is made how it calls the model: a forward in ``torch.nn`` needs a function of
    TorchDynamo around it, a forward elsewhere, such as a guard's, must have none.
    """
    for wrapper in gc.get_objects():
        if type(wrapper) is OptimizedModule and wrapper._orig_mod is model:
            wrapper._initialize()


def compile_forward(
    forward: Callable[..., Any],
    backend: CheckingBackend,
    *,
    fullgraph: bool,
    leave_what_fails: bool,
) -> Callable[..., Any]:
    """``torch.compile`` for a guarded forward: with room for recompilations, of its own.

    Args:
        forward: what to compile.
        backend: with what.
        fullgraph: as for ``torch.compile``.
        leave_what_fails: whether code that TorchDynamo fails to capture is left to Python and to
            the observer, with TorchDynamo's own warning: nobody asked for this compilation.
    """
    plain_python.prepare_tracing()
    options: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}
    known = inspect.signature(torch.compile).parameters  # torch 2.11 has neither
    options = {name: value for name, value in options.items() if name in known}
    compiled: Callable[..., Any] = torch.compile(
        forward, backend=backend, fullgraph=fullgraph, **options
    )
    settings: dict[str, Any] = {"suppress_errors": True} if leave_what_fails else {}
    if options:
        return with_settings(compiled, settings) if settings else compiled
    settings["recompile_limit"] = RECOMPILE_LIMIT
    return with_settings(compiled, settings)


def with_settings(function: Callable[..., Any], settings: dict[str, Any]) -> Callable[..., Any]:
    """Call a function under settings of TorchDynamo."""
    change = torch._dynamo.config._make_closure_patcher(**settings)

    def call(*args: Any, **kwargs: Any) -> Any:
        revert = change()
        try:
            return function(*args, **kwargs)
        finally:
            revert()

    return call


def graph_breaks() -> Counter[str]:
    """Reason to the number of graph breaks that TorchDynamo made for it, in this process."""
    global _breaks
    found = counters["graph_break"]
    total = sum(found.values())
    if total != _breaks[0]:  # it is asked at each forward, and changes at few
        reasons: Counter[str] = Counter()
        for text, count in found.items():
            reasons[text.partition("\n")[0].strip()] += count
        _breaks = total, reasons
    return _breaks[1]


_breaks: tuple[int, Counter[str]] = (0, Counter())  # how many there were, and their reasons


def captured_code() -> types.CodeType | None:
    """The code that TorchDynamo is capturing a graph from; None where somebody else calls."""
    try:
        code: types.CodeType = InstructionTranslator.current_tx().output.root_tx.f_code
    except AttributeError:
        return None
    return code


class CheckingBackend:
    """A TorchDynamo backend: plan, insert checks, hand on to the inner backend.

    Args:
        inner: the name of a backend, or a backend.
        report: called with each run of a graph and what it returned; None when it raised.
        names: ``id(module)`` to qualified name.
        tensors: ``id(parameter or buffer)`` to its role and its qualified name.
        refresh: brings both up to date; called before a graph is read, because modules and
            parameters may have been replaced since the last one.
        weights_stay: whether weights are still there when a report is made.
        replay: whether only what leaves a graph is measured, until that turns bad.
        follows_python: whether nobody asked for a compiler, so that the model has to take the path
            that plain Python takes.
        has_marks: whether modules leave marks in the graphs; otherwise their frames come from
            data flow.
    """

    def __init__(
        self,
        inner: str | Backend,
        report: Callable[[GraphRun, Any], None],
        names: Mapping[int, str] | None = None,
        tensors: Mapping[int, tuple[Role, str]] | None = None,
        refresh: Callable[[], None] = lambda: None,
        *,
        weights_stay: bool = True,
        replay: bool = False,
        follows_python: bool = False,
        has_marks: bool = True,
    ) -> None:
        self.has_marks = has_marks
        self.follows_python = follows_python
        self.weights_stay = weights_stay
        self.replay = replay
        self.inner: Backend = lookup_backend(inner) if isinstance(inner, str) else inner
        self.arithmetic = arithmetic_for(self.inner)
        self.report = report
        self.names = names
        self.tensors = {} if tensors is None else tensors
        self.refresh = refresh
        self.plans: list[Plan] = []  # of every graph that was captured, for coverage()
        self.graphs: list[GraphModule] = []  # without checks, for selftest()

    def __call__(self, graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        if self.follows_python:
            plain_python.leave_try_blocks(graph_module)
        self.refresh()
        let_backend_fail(graph_module)
        forward = active.current()
        captured_in = forward.batch.module if forward is not None else ""
        with torch._C.DisableTorchFunction():
            arguments = {
                position: self.tensors[id(example)]
                for position, example in enumerate(example_inputs)
                if id(example) in self.tensors
            }
            plan = make_plan(
                graph_module,
                self.names,
                arguments,
                captured_in,
                weights_stay=self.weights_stay,
                has_marks=self.has_marks,
            )
            handed_on = without_marks if self.replay else functools.partial(self.checked, plan)
            changed = handed_on(graph_module)
            if self.arithmetic is eager:  # no compiler follows
                changed = keep_random_state(changed)
        with observer.unobserved(forward), self.kept_between_processes():
            compiled = self.inner(changed, example_inputs)
        self.plans.append(plan)
        self.graphs.append(graph_module)
        spoiled = spoiled_inputs(graph_module)
        way = Unchecked(self, plan, graph_module, spoiled) if self.replay else None
        restores = self.follows_python and changes_settings(graph_module)

        def run(*args: Any) -> Any:
            forward = active.current()
            random_state = RandomState.now(args) if plan.random else None
            names = (captured_in, forward.batch.module if forward is not None else "")
            calls = forward.batch.calls if forward is not None else ()
            kept = copied(args, spoiled) if spoiled else args
            restore = settings_now() if restores else None
            graph_run = GraphRun(
                plan, graph_module, NOTHING, kept, random_state, names, calls, live=args
            )
            try:
                # What a captured graph does is checked by the graph: no observer has to see it.
                with observer.unobserved(forward):
                    outputs = compiled(*args)
            except Exception:
                if restore is not None:
                    restore()
                self.report(graph_run, None)
                raise
            if way is None:
                *outputs, graph_run.statistics = outputs
            with torch._C.DisableTorchFunction():
                if way is not None:
                    graph_run.postponed = way.measure(outputs)
                self.report(graph_run, outputs)
            return outputs

        return run

    def kept_between_processes(self) -> contextlib.AbstractContextManager[object]:
        """Let AOTAutograd's cache keep a graph with checks, as it keeps the one without them.

        It does not keep graphs that call functions it does not know, because it cannot tell
        when these change. Ours are the same as long as their files are.
        """
        option = "unsafe_marked_cacheable_functions"
        if self.replay or self.arithmetic is not inductor or not hasattr(inductor_config, option):
            return contextlib.nullcontext()
        version = inductor.version()
        if version is None:
            return contextlib.nullcontext()
        known = getattr(inductor_config, option)
        ours = dict.fromkeys(FUNCTIONS_IN_GRAPHS, version)
        patch: contextlib.AbstractContextManager[object]
        patch = inductor_config.patch({option: {**known, **ours}})
        return patch

    def checked(self, plan: Plan, graph_module: GraphModule) -> GraphModule:
        """The graph with its checks."""
        return with_checks(graph_module, plan, flat=True, arithmetic=self.arithmetic)


def arithmetic_for(backend: Backend) -> Arithmetic:
    """What measures under a backend, at the least cost."""
    # A backend is looked up by name, or an object that torch.compile makes of it and its options.
    name = getattr(backend, "compiler_name", None)
    if name == "eager" or backend is lookup_backend("eager"):
        return eager
    if name == "inductor" or backend is lookup_backend("inductor"):
        return inductor
    return traceable


@torch.no_grad()
def copied(args: Sequence[Any], spoiled: Sequence[int]) -> tuple[Any, ...]:
    """The arguments of a run, those copied that it is going to change."""
    kept = list(args)
    with torch._C.DisableTorchFunction():
        for position in spoiled:
            kept[position] = kept[position].detach().clone()
    return tuple(kept)


class Unchecked:
    """A graph that runs as it is: only what leaves it is measured."""

    def __init__(
        self,
        backend: CheckingBackend,
        plan: Plan,
        graph_module: GraphModule,
        spoiled: Collection[int],
    ) -> None:
        self.backend = backend
        self.plan = plan
        self.graph_module = graph_module
        self.leaving = leaving_of(plan)
        self.values = tuple(value for _, value in self.leaving)
        not_copied = {position for position, _ in plan.written if position not in spoiled}
        given = (*plan.inputs, *plan.buffers)
        self.overwritten = tuple(value for position, value in given if position in not_copied)

    def measure(self, outputs: Sequence[Any]) -> Postponed:
        """What is known of a run that returned this."""
        numbers = measure_leaving(outputs, self.leaving)
        return Postponed(self.values, numbers, self.checked_forms, self.overwritten)

    def checked_forms(self) -> Iterator[Callable[..., Any]]:
        """The graph with checks: under its own backend, and then without one."""
        inner = self.backend.inner
        if self.backend.arithmetic is not eager:
            checked = self.backend.checked(self.plan, self.graph_module)
            yield lambda *args: inner(checked, list(args))(*args)
        yield with_checks(self.graph_module, self.plan, flat=True, arithmetic=eager)


def let_backend_fail(graph_module: GraphModule) -> None:
    """Let TorchDynamo break a graph that its backend cannot compile, as without marks."""
    targets = {node.target for node in graph_module.graph.nodes if node.op == "call_function"}
    if any(is_callable_allowed(target) for target in targets - marks.MARKS):
        return
    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:  # the backend was called by somebody else
        return
    output.has_user_defined_allowed_in_graph = False


def leave_to_python(function: Any) -> None:
    """Keep TorchDynamo from compiling a function of its own; it may still be traced in another."""
    skip_code(function.__code__)  # type: ignore[attr-defined]


# Hooks on every module, for the time of one forward.

HOOK_ID = RemovableHandle(OrderedDict()).id  # a key that nobody else is given
_lock = threading.Lock()
_users: set[object] = set()  # forwards that need the hooks now, in all threads


@contextlib.contextmanager
def module_hooks_on() -> Iterator[None]:
    """Let :mod:`fxguard.batch.module_hooks` see modules begin and return, wherever they run."""
    user = object()
    try:  # an interrupt may come at any call
        with _lock:
            module_hooks._global_forward_pre_hooks[HOOK_ID] = module_calls.before_module
            module_hooks._global_forward_hooks_with_kwargs[HOOK_ID] = True
            module_hooks._global_forward_hooks[HOOK_ID] = module_calls.after_module
            _users.add(user)
        yield
    finally:
        with _lock:
            try:
                _users.discard(user)
            finally:
                if not _users and HOOK_ID in module_hooks._global_forward_pre_hooks:
                    del module_hooks._global_forward_pre_hooks[HOOK_ID]
                    del module_hooks._global_forward_hooks[HOOK_ID]
                    del module_hooks._global_forward_hooks_with_kwargs[HOOK_ID]


for function in (
    observer.Observer.__torch_function__,
    observer.FusedObserver.__torch_dispatch__,
    module_calls.before_module,
    module_calls.after_module,
):
    leave_to_python(function)
