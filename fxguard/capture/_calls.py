"""A function that runs, and where: what stacks and tracebacks consist of."""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass, replace
from types import FrameType

import torch

__all__ = ["GRAPH", "RESUMED", "TORCH", "Call", "running_calls"]

TORCH = os.path.dirname(torch.__file__) + os.sep
OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
MACHINERY = (
    *(os.path.join(TORCH, name) + os.sep for name in ("_dynamo", "fx", "_functorch")),
    *(os.path.join(TORCH, name) for name in ("overrides.py", "_compile.py")),
)
GRAPH = "<eval_with_key>"
RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<name>.+)_at_\d+$")


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
