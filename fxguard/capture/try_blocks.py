"""Operations in ``try`` blocks, which TorchDynamo captures as if nothing there could raise.

TorchDynamo leaves out the handlers and the code under ``finally``. So a function that may catch an
operation's exception is left to Python, and the functions that it calls are captured separately.
A block that only waits for exceptions of another package is captured: no operation raises them.
So is one that only sets back, under ``finally``, what was set in front of it: where an operation of
the graph raises, neither has happened.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15):

- ``exc.SkipFrame``: a backend raises it to leave a function to Python.
- ``InstructionTranslator.current_tx().f_code``: the code of the function that is captured.
- ``tx.output.root_tx.f_code``: the same, from the tracer of a function that it calls.
- ``InstructionTranslatorBase.inline_user_function_return``: traces a function that is called.
- ``SubgraphTracer.create_proxy``: puts an operation into the graph.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._dynamo.exc import SkipFrame
from torch._dynamo.output_graph import SubgraphTracer
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch.autograd import Function
from torch.fx import GraphModule, Node
from torch.nn import Module

from fxguard.capture import left_functions
from fxguard.capture._calls import RESUMED
from fxguard.capture._handlers import tried_lines
from fxguard.capture.plain_python import backend_of, follows_python
from fxguard.graph import marks, nodes
from fxguard.graph.operations import is_custom, name_of
from fxguard.graph.tables import REPEATABLE
from fxguard.source.lines import Place, is_internal, lines_of_trace
from fxguard.torch_names import HigherOrderOperator

__all__ = ["leave_early", "leave_try_block_of_last", "leave_try_blocks"]

# What runs a module. Layers of Keras have a ``call`` in place of a ``forward``.
CALLS_OF_MODULES = ("forward", "__call__", "_wrapped_call_impl", "_call_impl", "call")

TRY_BLOCK = "an operation in a try block, whose handlers TorchDynamo leaves out"

# Dtypes for which copying operations have a kernel, on a CPU and on CUDA.
WITH_KERNELS = frozenset(
    {
        torch.bool,
        torch.uint8,
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)


@functools.cache
def leave_early() -> None:
    """Leave a function at its first operation in a ``try`` block, while it is traced; done once.

    The check at the end of tracing has the same effect. But with this one, a function is not traced
    to its end in vain, and again after each break. Nor are the functions between it and the
    operation, which would be left in their turn.
    """
    left_functions.skip_left_functions(_leave_certain_try_block)
    original = SubgraphTracer.create_proxy

    @functools.wraps(original)
    def create_proxy(self: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        tx = self.output_graph.root_tx
        if kind.startswith("call") and follows_python(tx):
            leave_try_block_of_last(tx)  # by now its result is known
        return original(self, kind, *args, **kwargs)

    SubgraphTracer.create_proxy = create_proxy  # type: ignore[method-assign]
    inline = InstructionTranslatorBase.inline_user_function_return

    @functools.wraps(inline)
    def inline_unless_tried(self: Any, fn: Any, args: Any, *rest: Any, **more: Any) -> Any:
        if _is_call_of_module(fn, args) and follows_python(self):
            _leave_try_block_around(self)
        return inline(self, fn, args, *rest, **more)

    InstructionTranslatorBase.inline_user_function_return = (  # type: ignore[method-assign]
        inline_unless_tried
    )


def _leave_certain_try_block(tx: Any) -> None:
    """Leave the call of a module that runs the module in a ``try`` block, before it is traced.

    The trace would end there, behind all that stands before it.
    """
    code: CodeType = tx.f_code
    if code.co_name != "__call__" or not follows_python(tx):
        return
    module = tx.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if not isinstance(module, Module) or not _is_before_call_of_torch(type(module), code):
        return
    calls = [tried.calls for tried in tried_lines(code.co_filename) if tried.calls is not None]
    places = [(code.co_filename, call.line) for call in calls if call.first == code.co_firstlineno]
    if _is_covered(places, code):
        backend_of(tx).left.add(code)


def _is_before_call_of_torch(kind: type[Module], code: CodeType) -> bool:
    """Whether ``super().__call__`` in some code is the call of a module as torch has it."""
    own = kind.__mro__[: kind.__mro__.index(Module)]
    found = [vars(each)["__call__"] for each in own if "__call__" in vars(each)]
    return len(found) == 1 and getattr(inspect.unwrap(found[0]), "__code__", None) is code


def _is_call_of_module(function: Any, args: Sequence[Any]) -> bool:
    """Whether a function that is about to be traced runs a module."""
    if not args or not isinstance(function, UserFunctionVariable):
        return False
    return function.get_code().co_name in CALLS_OF_MODULES and isinstance(
        args[0], UnspecializedNNModuleVariable
    )


def _leave_try_block_around(tx: Any) -> None:
    """Leave a function to Python that is about to run a module in a ``try`` block.

    Nearly all modules contain operations. Without this, a module is traced up to its first one.
    """
    calls = list(left_functions.calls_to(tx))
    places = [(each.f_code.co_filename, each.lineno) for each in reversed(calls)]
    tried = [each.f_code for each in calls if _is_covered(places, each.f_code)]
    if calls[-1].f_code in tried:
        backend_of(tx).left.update(tried)
        _leave()


def _leave() -> NoReturn:
    raise SkipFrame(TRY_BLOCK)


def leave_try_blocks(graph_module: GraphModule) -> None:
    """Leave a function to Python, by an exception, if one of its operations is in a ``try`` block.

    The functions that it calls are then captured separately. A block that only handles a missing
    kernel is captured if there is a kernel: caches of transformers have such a block.
    """
    try:
        root = InstructionTranslator.current_tx().f_code
    except AttributeError:  # the backend was called by somebody else
        return
    if any(_is_tried_in(root, node) for node in graph_module.graph.nodes):
        _leave()
    traces = [node.meta.get("stack_trace") for node in graph_module.graph.nodes if _is_call(node)]
    set_back = frozenset().union(*map(_set_back_around, traces))
    if set_back and not all(map(set_back.isdisjoint, map(lines_of_trace, traces))):
        _leave()  # an attribute is set inside the graph: of a tensor, or by a property


def leave_try_block_of_last(tx: Any) -> None:
    """Do the same for only the last operation, while the function is still being traced.

    Args:
        tx: the tracer of the function, or of one that it calls.
    """
    last = next(iter(reversed(tx.output.graph.nodes)), None)
    root = tx.output.root_tx
    if last is None or not _is_tried_in(root.f_code, last):
        return
    calls = left_functions.calls_to_last(root)
    backend_of(root).left.update(tx.f_code for tx in calls if _is_tried_in(tx.f_code, last))
    _leave()


def _is_tried_in(root: CodeType, node: Node) -> bool:
    """Whether an exception at an operation is caught by a function or one that it calls."""
    return _is_call(node) and _is_tried(
        node.meta.get("stack_trace"), root, not _has_kernel(node), _may_raise_others(node)
    )


def _is_call(node: Node) -> bool:
    return node.op.startswith("call")


def _has_kernel(node: Node) -> bool:
    """Whether an operation has a kernel for its arguments, as copying operations do."""
    example = nodes.example_of(node)
    return (
        name_of(node.target) in REPEATABLE
        and isinstance(example, Tensor)
        and example.device.type in ("cpu", "cuda")
        and example.dtype in WITH_KERNELS
    )


def _may_raise_others(node: Node) -> bool:
    """Whether an operation may raise an exception that another package has defined."""
    if node.op == "call_method" or node.target in marks.MARKS:
        return False
    owner = getattr(node.target, "__self__", None)
    return (
        node.op != "call_function"
        or is_custom(node.target)
        or isinstance(node.target, HigherOrderOperator)
        or (isinstance(owner, type) and issubclass(owner, Function))
    )


@functools.lru_cache(maxsize=4096)
def _is_tried(trace: str | None, root: CodeType, may_fail: bool, may_raise_others: bool) -> bool:
    """Whether an exception at a node is caught by the captured function or one that it calls.

    Args:
        trace: the node's stack trace.
        root: the code of the captured function.
        may_fail: whether there may be no kernel for it.
        may_raise_others: whether it may raise an exception that another package has defined.
    """
    return _is_covered(lines_of_trace(trace), root, may_fail, may_raise_others)


def _is_covered(
    places: Iterable[Place], root: CodeType, may_fail: bool = False, may_raise_others: bool = False
) -> bool:
    """The same for the lines of calls, outermost first."""
    inside = False
    for file, line in places:
        in_root = file == root.co_filename and line in _lines_of(root)
        inside = inside or in_root
        if not inside or is_internal(file):
            continue
        for tried in tried_lines(file):
            if line in tried.lines and not (
                (tried.waits_for_kernels and not may_fail)
                or (tried.waits_for_others and not may_raise_others)
                or (tried.undoes and not (in_root and _is_resumed(root)))
            ):
                return True
    return False


@functools.lru_cache(maxsize=4096)
def _set_back_around(trace: str | None) -> frozenset[Place]:
    """The lines that set what is set back by one of the blocks that a node stands in."""
    return frozenset(
        (file, number)
        for file, line in lines_of_trace(trace)
        if not is_internal(file)
        for tried in tried_lines(file)
        if line in tried.lines
        for number in tried.set_back
    )


def _is_resumed(code: CodeType) -> bool:
    """Whether a function begins behind a graph break: what stands in front of that has happened."""
    return RESUMED.match(code.co_name) is not None


@functools.lru_cache(maxsize=256)
def _lines_of(code: CodeType) -> frozenset[int | None]:
    return frozenset(line for _, _, line in code.co_lines())
