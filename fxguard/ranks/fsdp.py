"""Weights that FSDP gathers while a module runs, and frees afterwards.

They are measured where they are read. When a report is made, only the part on this rank is left,
and asking for the rest would wait for processes that may be gone.
"""

from __future__ import annotations

import os.path
import sys
from types import FrameType

import torch
from torch.nn import Module

__all__ = ["is_sharded", "runs_now"]

_TORCH = os.path.dirname(torch.__file__)
FSDP_FILES = os.path.join(_TORCH, "distributed", "fsdp") + os.sep
MODULE_FILE = os.path.join(_TORCH, "nn", "modules", "module.py")


def is_sharded(model: Module) -> bool:
    """Whether ``fully_shard`` was applied to the model or to a part of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if not imported, it was not applied
    return fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules())


def runs_now() -> bool:
    """Whether FSDP itself is running (gathering weights), not the modules that it wraps."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != MODULE_FILE:
        if frame.f_code.co_filename.startswith(FSDP_FILES):
            return True
        frame = frame.f_back
    return False
