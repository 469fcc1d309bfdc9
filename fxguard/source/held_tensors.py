"""Who holds a tensor of a script: a buffer of a criterion, an attribute of an object, a variable.

An operation reads it at ``input[1]``; whoever looks for it looks for ``criterion.pos_weight``.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from fxguard.records import Role
from fxguard.source.frame_variables import (
    NAMELESS,
    held_by,
    is_of_library,
    script_frames,
    variables_of,
)

__all__ = ["UNNAMED", "held_name"]

UNNAMED = "of the script"  # behind "weight", where no variable holds it

MOST_OBJECTS = 500  # looked at for the variables of one frame
MOST_STEPS = 4  # from a variable to the object that holds the tensor

NO_HOLDERS = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType),
    *(str, bytes, int, float, complex, type(None), range),
)
OF_MODULES = {"_buffers": Role.BUFFER, "_parameters": Role.WEIGHT}


@dataclass(frozen=True, slots=True)
class _Place:
    path: tuple[str, ...]
    role: Role


def held_name(tensor: Tensor) -> tuple[Role, str] | None:
    """What a tensor is to the script, and its name there; None if no variable leads to it.

    A buffer is named as one, whoever else holds it. Then comes a variable of the innermost function
    of the script, whose line is quoted; then the shortest path from any other variable.

    Args:
        tensor: one that the running line reads.
    """
    frames = [each for each in script_frames() if not is_of_library(each.f_code.co_filename)]
    found: _Place | None = None
    seen: set[int] = set()
    for frame in frames:  # the outermost first: its variables live longest
        for place in _places(variables_of(frame), tensor, seen):
            if place.role is not Role.INPUT:
                return place.role, ".".join(part for part in place.path if part not in NAMELESS)
            found = found or place
    if frames:
        variables = variables_of(frames[-1])
        own = next((name for name, value in variables.items() if value is tensor), None)
        found = found if own is None else _Place((own,), Role.INPUT)
    return None if found is None else (Role.INPUT, ".".join(found.path))


def _places(variables: Mapping[str, Any], tensor: Tensor, seen: set[int]) -> Iterator[_Place]:
    """The places that lead to a tensor, those of the fewest steps first."""
    todo: deque[tuple[tuple[str, ...], Any]] = deque(
        sorted(
            (((name,), value) for name, value in variables.items() if not name.startswith("__")),
            key=lambda each: (each[0][0] in NAMELESS, each[0][0].startswith("_")),
        )
    )
    most = len(seen) + MOST_OBJECTS
    while todo and len(seen) < most:
        path, value = todo.popleft()
        if value is tensor:
            yield _Place(path, Role.INPUT)
        if isinstance(value, (Tensor, *NO_HOLDERS)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Module):
            for attribute, role in OF_MODULES.items():
                held = value.__dict__.get(attribute)
                for name, each in held.items() if isinstance(held, dict) else ():
                    if each is tensor:
                        yield _Place((*path, name), role)
            parts = value.__dict__.get("_modules")
            if isinstance(parts, dict):
                todo.extend(((*path, name), part) for name, part in parts.items())
        if len(path) <= MOST_STEPS:
            todo.extend(((*path, name), each) for name, each in held_by(value))
