"""What the numbers were measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

import torch

import fxguard

__all__ = ["describe", "title"]


def processor() -> str:
    """The model name of the CPU, as far as the system tells."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe(device: str) -> dict[str, str | int]:
    """Machine, versions and date, for the head of a table and of a JSON file."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "fxguard": fxguard.__version__,
    }


def title(environment: dict[str, str | int]) -> str:
    """The same in one line."""
    threads = environment["threads"]
    return (
        f"{environment['device_name']}, {threads} thread{'s' if threads != 1 else ''}, "
        f"torch {environment['torch']}, transformers {environment['transformers']}, "
        f"fxguard {environment['fxguard']}"
    )
