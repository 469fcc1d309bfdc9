"""Torch's own settings, to be saved and restored.

A ``with`` block in a model, such as ``torch.no_grad()``, becomes two calls in a captured graph. If
an operation between them raises, the second call does not run. Python would have run it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from fxguard.torch_names import (
    ATTENTION_KERNELS,
    is_any_autocast_on,
    set_grad_enabled,
    use_attention_kernels,
)

__all__ = ["changes_settings", "settings_now"]

# Devices with their own autocast, of those that torch was built for.
BUILT_FOR = {
    "cuda": torch.backends.cuda.is_built(),
    "mps": torch.backends.mps.is_built(),
    "xpu": getattr(torch.version, "xpu", None) is not None,
}
DEVICES = ("cpu", *(device for device, is_built in BUILT_FOR.items() if is_built))
NOWHERE = (False,) * len(DEVICES)
OPEN_AND_CLOSE = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)
CALL: Callable[[Any], Any] = type(torch.autocast_increment_nesting).__call__  # of C's functions

# Functions that tell of settings that are on or off.
SIMPLE = (
    *(torch.is_grad_enabled, torch.is_autocast_cache_enabled),
    *(is_enabled for is_enabled, _ in ATTENTION_KERNELS),
)


# Functions that change settings inside a graph, by name.
CHANGES = frozenset(
    """
    _enter_autocast _enter_inference_mode _sdpa_kernel _sdpa_kernel_variadic _set_grad_enabled
    set_grad_enabled set_autocast_enabled
    """.split()
)


def changes_settings(graph_module: GraphModule) -> bool:
    """Whether a run of the graph changes settings, and may end before it has restored them."""
    return any(
        node.op == "call_function" and getattr(node.target, "__name__", "") in CHANGES
        for node in graph_module.graph.nodes
    )


def settings_now() -> Callable[[], None]:
    """Save grad mode, autocast and the kernels of attention; returns a function to restore them."""
    # This runs for each graph with a backward, so it calls no function of Python's.
    simple = [setting() for setting in SIMPLE]
    enabled = tuple(map(torch.is_autocast_enabled, DEVICES)) if is_any_autocast_on() else NOWHERE
    dtypes = tuple(map(torch.get_autocast_dtype, DEVICES))
    _, nesting = map(CALL, OPEN_AND_CLOSE)  # see _nesting
    return functools.partial(_restore, simple, enabled, dtypes, nesting)


def _restore(
    simple: Sequence[bool], enabled: Sequence[bool], dtypes: Sequence[torch.dtype], nesting: int
) -> None:
    grad, cache, *kernels = simple
    set_grad_enabled(grad)
    allowed = [kernel for (_, kernel), on in zip(ATTENTION_KERNELS, kernels, strict=True) if on]
    use_attention_kernels(allowed)
    torch.set_autocast_cache_enabled(cache)
    for device, is_enabled, dtype in zip(DEVICES, enabled, dtypes, strict=True):
        torch.set_autocast_enabled(device, is_enabled)
        torch.set_autocast_dtype(device, dtype)
    while _nesting() > nesting:
        torch.autocast_decrement_nesting()
    if not nesting:
        torch.clear_autocast_cache()


def _nesting() -> Any:
    """How many autocast regions are open. The only way to find out is to open one more."""
    # An interrupt cannot come between the two: both run within one instruction of Python.
    _, nesting = map(CALL, OPEN_AND_CLOSE)
    return nesting
