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

import ast
import functools
import inspect
import linecache
import os.path
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
import torch.nn.modules.module as module_hooks
from torch.fx import GraphModule, Node
from torch.nn import Module

from fxguard.capture.module_hooks import OWN_HOOKS
from fxguard.graph.source_lines import lines_of_trace

__all__ = ["Call", "hide_frames", "plain_calls", "running_calls"]

TORCH = os.path.dirname(torch.__file__) + os.sep
OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
MODULE_FILE = inspect.getsourcefile(Module) or ""
OVERRIDES = os.path.join(TORCH, "overrides.py")
MACHINERY = (
    *(os.path.join(TORCH, name) + os.sep for name in ("_dynamo", "fx", "_functorch")),
    *(os.path.join(TORCH, name) for name in ("overrides.py", "_compile.py")),
)
GRAPH = "<eval_with_key>"

RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<name>.+)_at_\d+$")
ASSIGNED = re.compile(r"\s*(\w+)\s*(:[^=]*)?=")
DIRECT = re.compile(r"\.forward\(")


@dataclass(frozen=True, slots=True)
class Call:
    """A function that runs, and where."""

    file: str
    line: int
    name: str  # of the function
    frame: FrameType | None = None  # None for one that plain Python would have had
    last: int = -1  # index of the instruction, if there is a frame
    is_changed: bool = False  # whether the frame has another line or name

    @property
    def is_ours(self) -> bool:
        """Whether it is a function of fxguard."""
        return self.file.startswith(OURS)

    @property
    def is_between(self) -> bool:
        """Whether it may stand between two functions of the script because of fxguard."""
        return self.is_ours or self.file.startswith((GRAPH, *MACHINERY))

    @property
    def place(self) -> tuple[str, str]:
        """The function: its file and its name."""
        return self.file, self.name

    def renamed(self) -> Call:
        """The same under the name that the user gave it."""
        found = RESUMED.match(self.name)
        if found is None:
            return self
        return replace(self, name=found["name"], is_changed=True)


def running_calls(frame: FrameType | None) -> list[Call]:
    """The calls that run now, outermost first, up to a frame."""
    found = []
    while frame is not None:
        code = frame.f_code
        found.append(Call(code.co_filename, frame.f_lineno, code.co_name, frame, frame.f_lasti))
        frame = frame.f_back
    return found[::-1]


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
        if _is_in_hooks(found, call):
            found[-1] = replace(found[-1], line=_line_of_forward() or 0, is_changed=True)
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
        if call.file.startswith(GRAPH) and (lines := _lines_of(call)):
            while found and found[-1].place == lines[0].place:
                found = found[:-1]
            return [*found, *_with_module_calls(lines)]
    return found


def _lines_of(call: Call) -> list[Call]:
    """The user's lines that a line of a graph's code came from, outermost first."""
    node = _node_of(call)
    if node is None or not node.stack_trace:
        return []
    return [Call(*place, name).renamed() for place, name in _named_lines(node.stack_trace)]


@functools.lru_cache(maxsize=256)
def _named_lines(trace: str) -> list[tuple[tuple[str, int], str]]:
    names = re.findall(r'File "[^"]+", line \d+, in ([^\n]*)', trace)
    return list(zip(lines_of_trace(trace), names, strict=True))


def _node_of(call: Call) -> Node | None:
    graph = None if call.frame is None else call.frame.f_locals.get("self")
    assigned = ASSIGNED.match(linecache.getline(call.file, call.line))
    if not isinstance(graph, GraphModule) or assigned is None:
        return None
    return next((node for node in graph.graph.nodes if node.name == assigned[1]), None)


def _with_module_calls(lines: Sequence[Call]) -> Iterator[Call]:
    """Between a line that calls a module and the module's forward, the calls of torch."""
    for index, call in enumerate(lines):
        calls_module = index > 0 and call.name == "forward"
        if calls_module and not DIRECT.search(linecache.getline(*_place(lines[index - 1]))):
            yield from _module_calls()
        yield call


def _place(call: Call) -> tuple[str, int]:
    return call.file, call.line


@functools.cache
def _module_calls() -> tuple[Call, ...]:
    wrapped = _line_with(Module._wrapped_call_impl, "return self._call_impl(*args, **kwargs)")
    plain = _line_of_forward()
    if wrapped is None or plain is None:
        return ()
    return (
        Call(MODULE_FILE, wrapped, "_wrapped_call_impl"),
        Call(MODULE_FILE, plain, "_call_impl"),
    )


@functools.cache
def _line_of_forward() -> int | None:
    """The line at which ``nn.Module`` calls a forward without hooks."""
    return _line_with(Module._call_impl, "return forward_call(*args, **kwargs)")


def _line_with(function: Any, text: str) -> int | None:
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):  # torch without its source
        return None
    return next((first + i for i, line in enumerate(lines) if line.strip() == text), None)


def _is_in_hooks(found: Sequence[Call], call: Call) -> bool:
    """Whether ``nn.Module`` takes the path with hooks only because of those of fxguard."""
    if call.name != "inner" or call.file != MODULE_FILE or _line_of_forward() is None:
        return False
    if not found or found[-1].place != (MODULE_FILE, "_call_impl") or found[-1].frame is None:
        return False
    module = found[-1].frame.f_locals.get("self")
    if not isinstance(module, Module):
        return False
    return not (
        *module._forward_hooks,
        *module._forward_pre_hooks,
        *module._backward_hooks,
        *module._backward_pre_hooks,
        *module_hooks._global_backward_hooks,
        *module_hooks._global_backward_pre_hooks,
        *(set(module_hooks._global_forward_hooks) - OWN_HOOKS),
        *(set(module_hooks._global_forward_pre_hooks) - OWN_HOOKS),
    )


# Tracebacks.


def hide_frames(error: BaseException) -> None:
    """Leave out of a traceback, and of those that belong to it, what plain Python does not have."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _plain_traceback(each.__traceback__)
        waiting += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def _plain_traceback(trace: TracebackType | None) -> TracebackType | None:
    calls = []
    while trace is not None:
        code = trace.tb_frame.f_code
        place = code.co_filename, trace.tb_lineno
        calls.append(Call(*place, code.co_name, trace.tb_frame, trace.tb_lasti))
        trace = trace.tb_next
    if not any(call.is_between for call in calls):
        return _linked(calls)
    return _linked(plain_calls(calls))


def _linked(calls: Sequence[Call]) -> TracebackType | None:
    trace: TracebackType | None = None
    for call in reversed(calls):
        frame, last = call.frame, call.last
        if frame is None or call.is_changed:
            frame, last = _frame_at(call)
        trace = TracebackType(trace, frame, last, call.line)
    return trace


class _HereError(Exception):
    pass


def _raise() -> None:
    raise _HereError


def _frame_at(call: Call) -> tuple[FrameType, int]:
    """A frame that stands at a line of the user's, with the variables of the real one."""
    variables = {} if call.frame is None else dict(call.frame.f_locals)
    known = {} if call.frame is None else call.frame.f_globals
    names = {**known, "__fxguard_raise": _raise}
    try:
        exec(_code_at(call.file, call.line, call.name), names, variables)
    except _HereError:
        trace = sys.exc_info()[2]
    assert trace is not None
    assert trace.tb_next is not None
    frame = trace.tb_next.tb_frame
    return frame, trace.tb_next.tb_lasti


@functools.lru_cache(maxsize=1024)
def _code_at(file: str, line: int, name: str) -> CodeType:
    """Code that raises at a line of a file. It covers the line, so that no part is underlined."""
    text = linecache.getline(file, line).rstrip()
    start, end = len(text) - len(text.lstrip()), len(text.encode())
    if text.lstrip().startswith("return ") and text.endswith(")"):
        start += len("return ")  # Python underlines the call
    tree = ast.parse("__fxguard_raise()")
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr)):
            node.lineno = node.end_lineno = line
            node.col_offset, node.end_col_offset = start, max(end, start)
    code = compile(tree, file, "exec")
    changes: dict[str, Any] = {"co_name": name}
    if sys.version_info >= (3, 11):
        changes["co_qualname"] = name
    return code.replace(**changes)
