"""Torch's own settings, to be saved and restored.

A ``with`` block in a model, such as ``torch.no_grad()``, becomes two calls in a captured graph. If
an operation between them raises, the second call does not run. Python would have run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from fxguard.torch_names import ATTENTION_KERNELS, set_grad_enabled, use_attention_kernels

__all__ = ["changes_settings", "settings_now"]

DEVICES = ("cpu", "cuda", "mps", "xpu")  # those with their own autocast


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
    grad = torch.is_grad_enabled()
    kernels = [is_enabled() for is_enabled, _ in ATTENTION_KERNELS]
    cache = torch.is_autocast_cache_enabled()
    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICES]
    nesting = _nesting()

    def restore() -> None:
        set_grad_enabled(grad)
        allowed = [kernel for (_, kernel), on in zip(ATTENTION_KERNELS, kernels, strict=True) if on]
        use_attention_kernels(allowed)
        torch.set_autocast_cache_enabled(cache)
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        while _nesting() > nesting:
            torch.autocast_decrement_nesting()
        if not nesting:
            torch.clear_autocast_cache()

    return restore


def _nesting() -> Any:
    """How many autocast regions are open. The only way to find out is to open one more."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
