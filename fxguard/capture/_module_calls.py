"""The calls that ``nn.Module`` makes in plain Python, where a graph or hooks of fxguard took over.

The stack trace of a node names the user's lines only. The modules of torch between them are known:
``nn_module_stack`` names the modules that were running, and a line of a module's ``forward`` is
found by what it calls.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch.nn.modules.module as module_hooks
from torch.fx import Node
from torch.nn import Module, Sequential

from fxguard.capture._calls import TORCH, Call
from fxguard.capture.module_hooks import OWN_HOOKS

__all__ = ["is_in_hooks", "line_of_forward", "with_module_calls"]

MODULE_FILE = inspect.getsourcefile(Module) or ""
DIRECT = re.compile(r"\.forward\(")


def with_module_calls(lines: Sequence[Call], node: Node, caller: Call | None) -> list[Call]:
    """The calls that led to an operation of a graph, from the user's lines alone.

    Args:
        lines: the user's lines, outermost first; none if the whole model is torch's.
        node: the operation.
        caller: the call from which the graph ran.
    """
    module = None if lines or caller is None else module_of(caller)
    return _all_calls(lines, node, module) or list(_between_forwards(lines))


def module_of(call: Call) -> Module | None:
    """The module whose forward ``nn.Module`` calls there."""
    if call.place != (MODULE_FILE, "_call_impl") or call.frame is None:
        return None
    module = call.frame.f_locals.get("self")
    return module if isinstance(module, Module) else None


def _all_calls(lines: Sequence[Call], node: Node, whole: Module | None) -> list[Call] | None:
    """With the modules of torch; None if one of their lines is not known."""
    groups: list[list[Call]] = []  # each begins with a module's forward
    for line in lines:
        if line.name == "forward" or not groups:
            groups.append([])
        groups[-1].append(line)
    of_user = iter(groups)
    found = list(next(of_user, []))
    modules = [each for each in node.meta.get("nn_module_stack", {}).values() if each[1]]
    if whole is not None:
        modules.insert(0, ("", type(whole)))
    for index, (name, kind) in enumerate(modules):
        forward = getattr(kind, "forward", None)
        code = getattr(forward, "__code__", None)
        if code is None or not code.co_filename.startswith(TORCH):
            group = next(of_user, None)
        else:
            inner = modules[index + 1][0] if index + 1 < len(modules) else None
            called = _called(node) if inner is None else _attribute(name, inner, kind)
            number = None if called is None else _line_with(forward, called)
            group = None if number is None else [Call(code.co_filename, number, "forward")]
        if group is None:
            return None
        found += group if whole is not None and index == 0 else [*_module_calls(), *group]
    return found if next(of_user, None) is None else None


def _called(node: Node) -> str | None:
    """How source code calls the operation of a node."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", None)
    return None if name is None else rf"\b{re.escape(name)}\("


def _attribute(name: str, inner: str, kind: Any) -> str | None:
    """How source code of a module calls one of its parts."""
    if isinstance(kind, type) and issubclass(kind, Sequential):
        return r"\bmodule\("
    part = inner.removeprefix(f"{name}.") if name else inner.rpartition(".")[2]
    return rf"\bself\.{part}\(" if part.isidentifier() else None


def _between_forwards(lines: Sequence[Call]) -> Iterator[Call]:
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
    wrapped = _line_with(Module._wrapped_call_impl, r"return self\._call_impl\(")
    plain = line_of_forward()
    if wrapped is None or plain is None:
        return ()
    return (
        Call(MODULE_FILE, wrapped, "_wrapped_call_impl"),
        Call(MODULE_FILE, plain, "_call_impl"),
    )


@functools.cache
def line_of_forward() -> int | None:
    """The line at which ``nn.Module`` calls a forward without hooks."""
    return _line_with(Module._call_impl, r"return forward_call\(")


@functools.lru_cache(maxsize=1024)
def _line_with(function: Any, pattern: str) -> int | None:
    """The only line of a function in which a pattern is found."""
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):  # torch without its source
        return None
    found = [first + index for index, line in enumerate(lines) if re.search(pattern, line)]
    return found[0] if len(found) == 1 else None


def is_in_hooks(found: Sequence[Call], call: Call) -> bool:
    """Whether ``nn.Module`` takes the path with hooks only because of those of fxguard."""
    if call.place != (MODULE_FILE, "inner") or line_of_forward() is None or not found:
        return False
    module = module_of(found[-1])
    if module is None:
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
