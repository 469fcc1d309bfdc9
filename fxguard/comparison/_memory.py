"""Memory that nothing has written yet: it holds no numbers, and two models get other contents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxguard.graph.nodes import leaves
from fxguard.graph.tables import UNINITIALISED
from fxguard.graph.wide_form import Ran

__all__ = ["gives_memory", "with_zeros"]


def gives_memory(ran: Ran) -> bool:
    """Whether an operation returns memory without numbers, such as ``torch.empty``."""
    return ran.call.kind in UNINITIALISED and not ran.call.written


def with_zeros(result: Any) -> Any:
    """Such a result, with zeros written into it: these are the same in both models."""
    with torch.no_grad():
        for x in leaves(result):
            if isinstance(x, Tensor):
                x.zero_()
    return result
