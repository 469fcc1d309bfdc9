"""The stack of calls as plain Python would have it, without what fxguard puts between.

A guarded model runs through functions of fxguard, through TorchDynamo and through captured graphs.
Tracebacks and warnings of a script are not to show them. What stands between is left out, and what
TorchDynamo has renamed or replaced by a graph gets the user's lines back.

The parts of torch in use (present in torch 2.11 to 2.15; without one, its frames are shown):

- ``torch_dynamo_resume_in_NAME_at_LINE``: how TorchDynamo names the rest of a function behind a
  graph break. The function's own frame is still there, at the line of the break.
- ``<eval_with_key>``: the file of a graph's code. The local variable ``self`` of such a frame is
  the graph, and each line assigns to the name of a node.
- ``nn.Module._call_impl``: calls ``forward`` by itself, or in ``inner`` if there are hooks.
"""

from __future__ import annotations

import functools
import linecache
import os.path
import re
from collections.abc import Sequence
from dataclasses import replace

from torch.fx import GraphModule, Node

from fxguard.capture._calls import GRAPH, RESUMED, TORCH, Call, running_calls
from fxguard.capture._module_calls import is_in_hooks, line_of_forward, with_module_calls
from fxguard.source.lines import lines_of_trace

__all__ = ["Call", "plain_calls", "running_calls"]

OVERRIDES = os.path.join(TORCH, "overrides.py")
ASSIGNED = re.compile(r"\s*(\w+)\s*(:[^=]*)?=")


def plain_calls(calls: Sequence[Call]) -> list[Call]:
    """What plain Python would have called, outermost first.

    Args:
        calls: what runs, or has raised, outermost first.
    """
    found: list[Call] = []
    position = 0
    while position < len(calls):
        call = calls[position]
        if call.is_between:
            end = position
            while end < len(calls) and calls[end].is_between:
                end += 1
            between = calls[position:end]
            after = calls[end] if end < len(calls) else None
            found = _without(found, between, after)
            position = end
            continue
        if RESUMED.match(call.name):
            call = call.renamed()
            while found and found[-1].place == call.place:  # up to the graph break
                found.pop()
        position += 1
        if is_in_hooks(found, call):
            found[-1] = replace(found[-1], line=line_of_forward() or 0, is_changed=True)
            continue
        found.append(call)
    return found


def _without(found: list[Call], between: Sequence[Call], after: Call | None) -> list[Call]:
    """The calls before others that stand between, and what plain Python has in their place."""
    is_dispatch = between[0].file == OVERRIDES and between[0].name == "handle_torch_function"
    if is_dispatch and after is not None and found and found[-1].place == after.place:
        return found[:-1]  # the function is called a second time, from a mode
    if not any(call.is_ours for call in between):
        return [*found, *between]
    for call in reversed(between):
        node = _node_of(call) if call.file.startswith(GRAPH) else None
        if node is not None:
            lines = _lines_of(node)
            while found and lines and found[-1].place == lines[0].place:
                found = found[:-1]
            return [*found, *with_module_calls(lines, node, found[-1] if found else None)]
    return found


def _lines_of(node: Node) -> list[Call]:
    """The user's lines that an operation of a graph came from, outermost first."""
    if not node.stack_trace:
        return []
    return [Call(*place, name).renamed() for place, name in _named_lines(node.stack_trace)]


@functools.lru_cache(maxsize=256)
def _named_lines(trace: str) -> list[tuple[tuple[str, int], str]]:
    names = re.findall(r'File "[^"]+", line \d+, in ([^\n]*)', trace)
    return list(zip(lines_of_trace(trace), names, strict=True))


def _node_of(call: Call) -> Node | None:
    """The operation at a line of a graph's code."""
    graph = None if call.frame is None else call.frame.f_locals.get("self")
    assigned = ASSIGNED.match(linecache.getline(call.file, call.line))
    if not isinstance(graph, GraphModule) or assigned is None:
        return None
    return next((node for node in graph.graph.nodes if node.name == assigned[1]), None)
