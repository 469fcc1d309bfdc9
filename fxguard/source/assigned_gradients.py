"""The line of a script that gives a tensor its gradient: ``m.grad = h.grad.float() / scale``.

Optimizers that keep weights in float32 beside a model in half precision do so. Knows nothing of
torch.
"""

from __future__ import annotations

import ast

from fxguard.records import Source
from fxguard.source.assigned import function_around, source_of
from fxguard.source.frame_variables import script_frames
from fxguard.source.lines import source_at

__all__ = ["line_that_set_gradients"]


def line_that_set_gradients() -> Source | None:
    """The only such line of a function that is running, above where it is now; else None."""
    for frame in reversed([*script_frames()]):
        here = source_at((frame.f_code.co_filename, frame.f_lineno))
        found = [
            node
            for node in ast.walk(function_around(here))
            if isinstance(node, ast.Assign) and node.lineno < here.line
            if any(isinstance(x, ast.Attribute) and x.attr == "grad" for x in node.targets)
            if not isinstance(node.value, ast.Constant)  # None: what a step begins with
        ]
        if found:
            return source_of(found[0], here.file) if len(found) == 1 else None
    return None
