"""Who holds a module: the path from a variable of a calling frame, such as ``vae.encoder.0``.

Only variables of running frames are looked at, and what they hold a few steps further, so that the
search costs little however many objects a process has. No code of the user runs.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from fxguard.install.instrumented import unwrapped
from fxguard.source.frame_variables import (
    NAMELESS,
    held_by,
    is_of_library,
    script_frames,
    variables_of,
)
from fxguard.torch_names import Criterion

__all__ = ["name_by_holder"]

MOST_OBJECTS = 2000  # looked at for one module
MOST_STEPS = 3  # from a variable to the model that holds the module

LEAVES = (
    *(Tensor, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType),
    *(str, bytes, int, float, complex, type(None), range),
)


@dataclass(frozen=True, slots=True)
class Found:
    """A place where a module is held."""

    path: tuple[str, ...]
    is_one_of_several: bool  # its holder is a module, or holds other models as well


def name_by_holder(module: Module) -> str:
    """The name of a module that a script calls, where the class alone does not tell which it is.

    A module that is the only model of its holder needs no name, and neither does one that nobody
    holds: then "".

    Args:
        module: the module, which is about to be called.
    """
    frames = list(script_frames())
    for of_libraries in (False, True):
        for frame in frames:  # the outermost first: its variables live longest
            if is_of_library(frame.f_code.co_filename) is of_libraries:
                found = _found_in(variables_of(frame), module)
                if found is not None:
                    named = [part for part in found.path if part not in NAMELESS]
                    return ".".join(named) if found.is_one_of_several else ""
    return ""


def _found_in(variables: Mapping[str, Any], module: Module) -> Found | None:
    """The shortest path from one of these variables to a module."""
    todo: deque[tuple[tuple[str, ...], Any, Sequence[Any]]] = deque()
    beside = list(variables.values())
    todo += sorted(
        (((name,), value, beside) for name, value in variables.items()),
        key=lambda each: (each[0][0] in NAMELESS, each[0][0].startswith("_")),
    )
    seen: set[int] = set()
    found: Found | None = None
    while todo and len(seen) < MOST_OBJECTS:
        path, value, siblings = todo.popleft()
        if isinstance(value, LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if found is not None and len(path) > len(found.path):
            break
        if isinstance(value, Module):
            inside = _path_inside(unwrapped(value), module)
            if inside:
                return Found((*path, *inside), is_one_of_several=True)
            if inside is not None and found is None:
                found = Found(path, _has_others(siblings, module))
                continue
        if len(path) <= MOST_STEPS:
            held = dict(held_by(value))
            todo += (((*path, name), each, list(held.values())) for name, each in held.items())
    return found


def _path_inside(whole: Module, module: Module) -> tuple[str, ...] | None:
    """The names from a model to one of its modules; empty if it is the model; None if not there."""
    if whole is module:
        return ()
    todo: deque[tuple[tuple[str, ...], Module]] = deque([((), whole)])
    seen = {id(whole)}
    while todo:
        path, at = todo.popleft()
        held = at.__dict__.get("_modules")
        for name, part in held.items() if isinstance(held, dict) else ():
            if part is module:
                return (*path, name)
            if isinstance(part, Module) and id(part) not in seen:
                seen.add(id(part))
                todo.append(((*path, name), part))
    return None


def _has_others(siblings: Sequence[Any], module: Module) -> bool:
    """Whether other models are held beside a module: none that holds it, and no part of it."""
    models = {id(each): each for each in map(_model, siblings) if each is not None}
    return any(
        _path_inside(each, module) is None and _path_inside(module, each) is None
        for each in models.values()
    )


def _model(value: Any) -> Module | None:
    """The model that a value is: a module with weights or buffers, but for weights of classes."""
    if not isinstance(value, Module) or isinstance(value, Criterion):
        return None
    model = unwrapped(value)
    held = (*Module.parameters(model), *Module.buffers(model))
    return model if held else None
