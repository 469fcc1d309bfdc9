"""Operations in ``try`` blocks, which TorchDynamo captures as if nothing there could raise.

TorchDynamo leaves out the handlers and the code under ``finally``. So a function that may catch an
operation's exception is left to Python, and the functions that it calls are captured separately.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15):

- ``exc.SkipFrame``: a backend raises it to leave a function to Python.
- ``InstructionTranslator.current_tx().f_code``: the code of the function that is captured.
- ``tx.output.root_tx.f_code``: the same, from the tracer of a function that it calls.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.exc import SkipFrame
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.fx import GraphModule, Node

from fxguard.graph import nodes
from fxguard.graph.operations import name_of
from fxguard.graph.tables import REPEATABLE
from fxguard.source.lines import is_internal, lines_of_trace
from fxguard.source.syntax import tree_of_file

__all__ = ["leave_try_block_of_last", "leave_try_blocks"]

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


def leave_try_blocks(graph_module: GraphModule) -> None:
    """Leave a function to Python, by an exception, if one of its operations is in a ``try`` block.

    The functions that it calls are then captured separately. A block that only handles a missing
    kernel is captured if there is a kernel: caches of transformers have such a block.
    """
    try:
        root = InstructionTranslator.current_tx().f_code
    except AttributeError:  # the backend was called by somebody else
        return
    for node in graph_module.graph.nodes:
        _leave_try_block(node, root)


def leave_try_block_of_last(tx: Any) -> None:
    """Do the same for only the last operation, while the function is still being traced.

    The check at the end of tracing has the same effect. But with this one, a model whose whole
    forward is called in a ``try`` block is not traced to its end in vain, and again after each
    break.

    Args:
        tx: the tracer of the function, or of one that it calls.
    """
    last = next(iter(reversed(tx.output.graph.nodes)), None)
    if last is not None:
        _leave_try_block(last, tx.output.root_tx.f_code)


def _leave_try_block(node: Node, root: CodeType) -> None:
    if not node.op.startswith("call"):
        return
    may_fail = not _has_kernel(node)
    if _is_tried(node.meta.get("stack_trace"), root, may_fail):
        raise SkipFrame(TRY_BLOCK)


def _has_kernel(node: Node) -> bool:
    """Whether an operation has a kernel for its arguments, as copying operations do."""
    example = nodes.example_of(node)
    return (
        name_of(node.target) in REPEATABLE
        and isinstance(example, Tensor)
        and example.device.type in ("cpu", "cuda")
        and example.dtype in WITH_KERNELS
    )


@functools.lru_cache(maxsize=4096)
def _is_tried(trace: str | None, root: CodeType, may_fail: bool) -> bool:
    """Whether an exception at a node is caught by the captured function or one that it calls.

    Args:
        trace: the node's stack trace.
        root: the code of the captured function.
        may_fail: whether there may be no kernel for it.
    """
    inside = False
    for file, line in lines_of_trace(trace):
        inside = inside or (file == root.co_filename and _holds(root, line))
        if inside and not is_internal(file):
            for tried in _tried_lines(file):
                if line in tried.lines and (may_fail or not tried.waits_for_kernels):
                    return True
    return False


def _holds(code: CodeType, line: int) -> bool:
    return any(line == own for _, _, own in code.co_lines())


class _Tried(NamedTuple):
    """The body of a ``try`` block."""

    lines: range
    waits_for_kernels: bool  # only NotImplementedError is handled


@functools.lru_cache(maxsize=256)
def _tried_lines(file: str) -> tuple[_Tried, ...]:
    """The lines of a file that a handler or a ``finally`` block covers."""
    tree = tree_of_file(file)
    if tree is None:
        return ()
    kinds = (ast.Try, getattr(ast, "TryStar", ast.Try))
    return tuple(
        _Tried(
            range(node.body[0].lineno, (node.body[-1].end_lineno or node.body[-1].lineno) + 1),
            not node.finalbody and all(map(_handles_no_kernel, node.handlers)),
        )
        for node in _statements(tree)
        if isinstance(node, kinds)
    )


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements of a file. Expressions are skipped, because they contain none."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, block, ())


def _handles_no_kernel(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.type, ast.Name) and handler.type.id == "NotImplementedError"
