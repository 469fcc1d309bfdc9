"""Torch's own settings, as they are and as they were.

A ``with`` block in a model, such as ``torch.no_grad()``, stands in a captured graph as two calls.
Where an operation between them raises, the second one does not run. Python would have run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, _backend_names, _sdpa_kernel

__all__ = ["changes_settings", "settings_now"]

DEVICES = ("cpu", "cuda", "mps", "xpu")  # that have an autocast of their own

# The kernels of attention: what tells whether one may be used, and its name. It is what
# torch.nn.attention._cur_sdpa_kernel_backends reads; this is asked in each batch.
KERNELS = [
    (getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(SDPBackend, backend))
    for name, backend in _backend_names.items()
]

# What changes settings inside a graph, by name of the function.
CHANGES = frozenset(
    """
    _enter_autocast _enter_inference_mode _sdpa_kernel _sdpa_kernel_variadic _set_grad_enabled
    set_grad_enabled set_autocast_enabled
    """.split()
)


def changes_settings(graph_module: GraphModule) -> bool:
    """Whether a run of the graph changes settings, and may end before it has set them back."""
    return any(
        node.op == "call_function" and getattr(node.target, "__name__", "") in CHANGES
        for node in graph_module.graph.nodes
    )


def settings_now() -> Callable[[], None]:
    """Note grad mode, autocast and the kernels of attention; returns what sets them back."""
    grad = torch.is_grad_enabled()
    kernels = [is_enabled() for is_enabled, _ in KERNELS]
    cache = torch.is_autocast_cache_enabled()
    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICES]
    nesting = _nesting()

    def restore() -> None:
        torch._C._set_grad_enabled(grad)
        _sdpa_kernel([kernel for (_, kernel), on in zip(KERNELS, kernels, strict=True) if on])
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
    """How many autocast regions are open. There is no way to ask but to open one more."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
