"""Pipeline parallelism of torch: which stage and micro-batch run, and what runs for shapes alone.

A stage of ``torch.distributed.pipelining`` learns the shapes that it will receive: it runs its
module once on uninitialised memory (``torch.empty``), and throws the numbers away.
"""

from __future__ import annotations

import os.path
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import torch

__all__ = ["Stage", "infers_shapes", "stage_now"]

PACKAGE = "torch.distributed.pipelining"
FILES = os.path.join(os.path.dirname(torch.__file__), "distributed", "pipelining") + os.sep
# A part of the names of the methods that run a stage for shapes: `_shape_inference` up to torch
# 2.10, `_forward_metadata_inference` and `_backward_metadata_inference` since.
INFERENCE = "_inference"
# The argument after `self` of the methods that run a micro-batch.
NUMBERS = (("fwd_chunk_id",), ("bwd_chunk_id",))


@dataclass(frozen=True, slots=True)
class Stage:
    """A place in a pipeline."""

    number: int  # of the stage, counted from 0
    micro_batch: int  # of the step, counted from 0


def infers_shapes() -> bool:
    """Whether a stage runs its module for the shapes alone, on memory that nobody has written."""
    if PACKAGE not in sys.modules:  # called at each forward
        return False
    return any(frame.f_code.co_name.endswith(INFERENCE) for frame in _frames())


def stage_now() -> Stage | None:
    """The stage and the micro-batch that run in this thread; None outside of a pipeline."""
    if PACKAGE not in sys.modules:  # called at each forward
        return None
    for frame in _frames():
        code = frame.f_code
        if code.co_varnames[1:2] not in NUMBERS:
            continue
        stage, number = (frame.f_locals.get(name) for name in code.co_varnames[:2])
        position = getattr(stage, "stage_index", None)
        if isinstance(position, int) and isinstance(number, int):
            return Stage(position, number)
    return None


def _frames() -> Iterator[FrameType]:
    """The calls of this thread that are in torch's pipelining, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(FILES):
            yield frame
        frame = frame.f_back
