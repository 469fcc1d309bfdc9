"""Torch's global state, which a test must leave as it found it.

A test that changes it fails others, hours later and far away. One more open region of autocast, for
example, keeps the casts of weights that a test has long since written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.modules.module as modules

__all__ = ["changes_since", "state_now"]


def open_regions_of_autocast() -> Any:
    """The only way to find out is to open one more."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


STATE: dict[str, Callable[[], object]] = {
    "open regions of autocast": open_regions_of_autocast,
    "autocast on the CPU": lambda: torch.is_autocast_enabled("cpu"),
    "autocast on a GPU": lambda: torch.is_autocast_enabled("cuda"),
    "autocast's dtype on the CPU": lambda: torch.get_autocast_dtype("cpu"),
    "autocast's dtype on a GPU": lambda: torch.get_autocast_dtype("cuda"),
    "autocast's cache of weights": torch.is_autocast_cache_enabled,
    "torch function modes": torch._C._len_torch_function_stack,
    "torch dispatch modes": torch._C._len_torch_dispatch_stack,
    "torch functions": torch._C._is_torch_function_enabled,
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "gradients": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "anomaly mode": torch.is_anomaly_enabled,
    "deterministic kernels": torch.are_deterministic_algorithms_enabled,
    "attention in plain operations": torch._C._get_math_sdp_enabled,
    "attention in flash kernels": torch._C._get_flash_sdp_enabled,
    "attention in kernels that save memory": torch._C._get_mem_efficient_sdp_enabled,
    "kernels of oneDNN": torch._C._get_mkldnn_enabled,
    "precision of float32 products": torch.get_float32_matmul_precision,
    "how modules are called": lambda: torch.nn.Module.__call__,
    "global hooks before forward": lambda: len(modules._global_forward_pre_hooks),
    "global hooks after forward": lambda: len(modules._global_forward_hooks),
}


def state_now() -> dict[str, object]:
    """The state by what it is about."""
    return {about: read() for about, read in STATE.items()}


def changes_since(before: dict[str, object]) -> dict[str, tuple[object, object]]:
    """What has changed since a state was read: as it was, and as it is."""
    now = state_now()
    return {about: (was, now[about]) for about, was in before.items() if was != now[about]}
