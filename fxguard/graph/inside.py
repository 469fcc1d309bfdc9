"""Which of the operations inside a composite one, such as ``normalize``, failed first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxguard.graph.closer_look import evidence_alone, evidence_of
from fxguard.graph.evidence import Evidence
from fxguard.graph.operations import read_call
from fxguard.graph.wide_form import Ran, is_float, widened

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
    """What was seen of the first ATen operation inside an operation that made something bad.

    The operation runs once more, and once in float64, on the operands that it had: what an inner
    operation would have read is the same one's operands in that run.

    Args:
        ran: an operation that writes nothing and draws no random numbers.

    Returns:
        None where it is one kernel, or where the two runs differ in what they call.
    """
    low = _kernels(ran, ran.args, ran.kwargs)
    wide = _kernels(ran, *widened((ran.args, dict(ran.kwargs)), torch.float64))
    if len(low) < 2 or [kernel.target for kernel in low] != [kernel.target for kernel in wide]:
        return None
    for kernel, other in zip(low, wide, strict=True):
        if not is_float(kernel.result) or bool(kernel.result.isfinite().all()):
            continue
        call = read_call(kernel.target, kernel.args, kernel.kwargs)
        if call.written:  # what it had read is gone
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
