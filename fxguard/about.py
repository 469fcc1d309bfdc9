"""Prints what is installed: ``python -m fxguard.about``."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import torch

import fxguard
from fxguard.measure import native

__all__ = ["lines"]

IN_C = "tensors in memory are measured in C"
NOT_BUILT = (
    "tensors in memory are measured by torch's operations, which takes several times as long:\n"
    "the part in C is not installed. Install a C compiler (cc), then reinstall fxguard from\n"
    "source: from a checkout, from an sdist, or with pip's option --no-binary fxguard."
)


def lines() -> Iterator[str]:
    """Versions, and which implementation measures tensors.

    Example:
        >>> for line in lines():
        ...     print(line)
        fxguard 0.2.0
        torch 2.13.0+cpu, Python 3.11.7, Linux x86_64
        tensors in memory are measured in C
    """
    system = f"{platform.system()} {platform.machine()}"
    yield f"fxguard {fxguard.__version__}"
    yield f"torch {torch.__version__}, Python {platform.python_version()}, {system}"
    yield IN_C if native.is_built else NOT_BUILT


if __name__ == "__main__":
    print(*lines(), sep="\n")
