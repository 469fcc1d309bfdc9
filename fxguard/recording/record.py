"""``record``: one batch of a model as a folder, to be compared elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.nn import Module

from fxguard.errors import UsageError
from fxguard.recording.folder import need_safetensors, refuse_to_overwrite, write_folder
from fxguard.recording.ranks import folder_of_rank
from fxguard.recording.running import recorded

__all__ = ["record"]


def record(
    model: Module,
    folder: str | os.PathLike[str],
    *inputs: Any,
    max_bytes: int = 2**30,
    of: Callable[[Any], Any] | None = None,
    gradients: bool = False,
    fingerprints_only: bool = False,
    **named: Any,
) -> Any:
    """Call a model once, and write what it computed into a folder, for :func:`fxguard.compare`.

    The folder holds each operation of ATen that ran: its operands by number, its result, the module
    and the line of the program, and numbers of each result that no order of elements changes. It
    also holds inputs, weights and results themselves, as far as ``max_bytes`` goes: **your data**.
    Another process, version, machine or engine can compare with it. Compiled models run as their
    source says.

    Args:
        model: any module.
        folder: where to write. With several ranks, each writes ``rank-N`` inside it.
        inputs: positional arguments of the model.
        max_bytes: of values: inputs and weights come first, then results in order. Of others the
            numbers alone are kept.
        of: a function from what the model returns to the number that matters, such as a token's
            log-probability or the loss. Its operations are recorded, too, and the comparison
            judges by it.
        gradients: whether to also record the backward, from the number that matters, from the
            ``loss`` that is returned, or else from all outputs; and the gradients of all weights.
        fingerprints_only: whether to keep no elements at all. Then numbers of values are compared:
            where the last ones that are the same were made, and no shares.
        named: keyword arguments of the model.

    Returns:
        What the model returned.

    Raises:
        FxguardError: when something is at the path already, or safetensors is not installed.
        Exception: whatever the model raises; nothing is written then.

    Example:
        >>> fxguard.record(model, "before", ids)
        >>> fxguard.record(engine, "after", ids)
        >>> print(fxguard.compare("before", "after"))
    """
    if not isinstance(model, Module):
        raise UsageError(f"record needs a torch.nn.Module, got {type(model).__name__}")
    if max_bytes < 0:
        raise UsageError(f"max_bytes has to be 0 or more, got {max_bytes}")
    need_safetensors()
    path = folder_of_rank(Path(folder))
    refuse_to_overwrite(path)
    limit = 0 if fingerprints_only else max_bytes
    found, output = recorded(model, inputs, named, limit, of=of, gradients=gradients)
    write_folder(found, path)
    return output
