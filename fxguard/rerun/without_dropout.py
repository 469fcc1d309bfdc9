"""An attention that drops, as one that keeps everything: its inside can be looked at.

A compiled graph tells what such an attention has made, and not what it has dropped. Its products
and its softmax come before the dropout, which makes nothing bad: it multiplies by 0 or 1 / (1 - p).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from fxguard.graph.attention_masks import named_arguments
from fxguard.graph.poles import ATTENTION, plain
from fxguard.graph.wide_form import Ran

__all__ = ["without_dropout"]

SCALED = "scaled_dot_product_attention"
PROBABILITY = 4  # its position among the arguments


def without_dropout(ran: Ran) -> Ran | None:
    """The same attention without its dropout; None of other operations.

    Args:
        ran: an operation that may draw random numbers.
    """
    kind = plain(ran.call.kind)
    if kind not in (ATTENTION, SCALED):
        return None

    def run(*given: Any, **named: Any) -> Any:
        if kind == ATTENTION:
            return ran.target(**named_arguments(given, named) | {"training": False})
        given = (*given[:PROBABILITY], *(0.0 for _ in given[PROBABILITY:]))
        with sdpa_kernel(SDPBackend.MATH):  # one fused kernel has no inside
            return ran.target(*given, **named | ({} if given[PROBABILITY:] else {"dropout_p": 0.0}))

    return replace(ran, call=replace(ran.call, random=False), run=run)
