"""Finds which operation inside a composite one, such as ``normalize``, failed first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxguard.graph.closer_look import evidence_alone, evidence_of
from fxguard.graph.evidence import Evidence
from fxguard.graph.operations import read_call
from fxguard.graph.wide_form import Ran, is_float, widened
from fxguard.torch_names import TorchDispatchMode

__all__ = ["evidence_inside"]


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One ATen operation that ran."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any


class _Kernels(TorchDispatchMode):
    """The ATen operations that run, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's has no annotations
        self.ran: list[_Kernel] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ran.append(_Kernel(func, args, kwargs or {}, result))
        return result


def evidence_inside(ran: Ran) -> Evidence | None:
    """The evidence for the first ATen operation with a bad result inside an operation.

    The operation runs again, and once in float64, on its original operands: the operands of an
    inner operation in the second run are what it should have read.

    Args:
        ran: an operation that writes nothing and draws no random numbers.

    Returns:
        None if it is one kernel, or if the two runs call different operations.
    """
    low = _kernels(ran, ran.args, ran.kwargs)
    wide = _kernels(ran, *widened((ran.args, dict(ran.kwargs)), torch.float64))
    if len(low) < 2 or [kernel.target for kernel in low] != [kernel.target for kernel in wide]:
        return None
    for kernel, other in zip(low, wide, strict=True):
        if not is_float(kernel.result) or bool(kernel.result.isfinite().all()):
            continue
        call = read_call(kernel.target, kernel.args, kernel.kwargs)
        if call.written:  # its operands are gone
            return None
        seen = evidence_of(
            call,
            kernel.args,
            kernel.kwargs,
            kernel.result,
            wide_args=other.args,
            wide_kwargs=other.kwargs,
            wide=other.result,
        )
        alone = evidence_alone(call, kernel.target, kernel.result)
        if seen is None or alone is None:
            return None
        return replace(seen, same=alone.same, needed=alone.needed)
    return None


def _kernels(ran: Ran, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Kernel]:
    kernels = _Kernels()
    with kernels:
        ran.run(*args, **kwargs)
    return kernels.ran
