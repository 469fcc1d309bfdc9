"""Operations in ``try`` blocks: TorchDynamo captures them as if nothing in there could raise.

It leaves the handlers out, and what stands under ``finally``. So a function of which an operation
may be caught is left to Python, and the functions that it calls are captured on their own.

What is used of TorchDynamo (present in torch 2.11 to 2.15):

- ``exc.SkipFrame``: what a backend raises to leave a function to Python.
- ``InstructionTranslator.current_tx().f_code``: the code of the function that is captured.
- ``tx.output.root_tx.f_code``: the same, for what traces a function that it calls.
"""

from __future__ import annotations

import ast
import functools
import linecache
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
from fxguard.graph.source_lines import is_internal, lines_of_trace
from fxguard.graph.tables import REPEATABLE

__all__ = ["leave_try_block_of_last", "leave_try_blocks"]

TRY_BLOCK = "an operation in a try block, whose handlers TorchDynamo leaves out"

# Dtypes for which operations that only copy have a kernel, on a CPU and on CUDA.
WITH_KERNELS = frozenset(
    {
        torch.bool,
        torch.uint8,
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)


def leave_try_blocks(graph_module: GraphModule) -> None:
    """Raise what leaves a function to Python where an operation of it stands in a ``try`` block.

    The functions that it calls are captured on their own then. A block that waits for nothing but
    a kernel that does not exist is captured where there is one: caches of transformers have it.
    """
    try:
        root = InstructionTranslator.current_tx().f_code
    except AttributeError:  # the backend was called by somebody else
        return
    for node in graph_module.graph.nodes:
        _leave_try_block(node, root)


def leave_try_block_of_last(tx: Any) -> None:
    """Do that for the last operation alone, while the function is still traced.

    The end of the tracing would come to the same. A model whose whole forward is called in a
    ``try`` block is not traced to its end for nothing, though, and once more where it breaks.

    Args:
        tx: what traces the function, or one that it calls.
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
    """Whether an operation has a kernel for what it is given, as those that only copy have."""
    example = nodes.example_of(node)
    return (
        name_of(node.target) in REPEATABLE
        and isinstance(example, Tensor)
        and example.device.type in ("cpu", "cuda")
        and example.dtype in WITH_KERNELS
    )


@functools.lru_cache(maxsize=4096)
def _is_tried(trace: str | None, root: CodeType, may_fail: bool) -> bool:
    """Whether an exception at a node is caught by a function from the captured one on.

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
    waits_for_kernels: bool  # nothing but NotImplementedError is handled


@functools.lru_cache(maxsize=256)
def _tried_lines(file: str) -> tuple[_Tried, ...]:
    """The lines of a file behind which a handler or a ``finally`` block stands."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # no Python, or none that can be read
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
    """All statements of a file. What stands in expressions is left out: it holds none."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, block, ())


def _handles_no_kernel(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.type, ast.Name) and handler.type.id == "NotImplementedError"
