"""Run two models on the same inputs, and say where they part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils import _pytree as pytree

from fxguard.capture.dynamo import is_compiled
from fxguard.guard.guard import Guard
from fxguard.guard.instrumented import check_can_instrument, unwrapped
from fxguard.guard.options import Options
from fxguard.measure.at_hand import name_of_dtype
from fxguard.report.report import Report
from fxguard.trace.diff import Diff, diff
from fxguard.trace.trace import TracedBatch

__all__ = ["compare"]


def compare(
    model_a: Module, model_b: Module, *inputs: Any, tolerance: float | None = None, **kwargs: Any
) -> Diff:
    """Call two models with the same inputs and compare the ranges of what every operation made.

    Both see the same random numbers. Where the models are of different dtypes or on different
    devices, floating-point inputs are converted to the dtype of each model's first floating-point
    parameter, and all inputs are moved to its device. The inputs, the buffers (running statistics)
    and the random state are left as they were.

    Args:
        model_a: any module that is not instrumented; also the result of ``torch.compile``.
        model_b: likewise; it may be the same module, compiled.
        inputs: what both are called with, any nest of tensors and other objects.
        tolerance: as for :func:`fxguard.diff`.
        kwargs: what both are called with, by name.

    Raises:
        FxguardError: when a model is instrumented already.
        Exception: what a model raises, unless fxguard found a bad value that led there: then what
            ran before is compared.

    Example:
        >>> print(fxguard.compare(model, copy.deepcopy(model).half(), input_ids))
        >>> assert fxguard.compare(model, torch.compile(model), input_ids).agrees
    """
    places = [_place_of(model) for model in (model_a, model_b)]
    batches = []
    for model, place in zip((model_a, model_b), places, strict=True):
        args, named = pytree.tree_map_only(
            Tensor, _converter(place if places[0] != places[1] else None), (inputs, kwargs)
        )
        with torch.random.fork_rng(_cuda_devices(model)), _buffers_kept(model):
            batches.append(_run(model, args, named))
    found = diff(batches[0], batches[1], tolerance=tolerance)
    return replace(found, a=_name(model_a), b=_name(model_b))


def _run(model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedBatch:
    """Call a model under a guard of its own, and give what was measured."""
    target = unwrapped(model)
    check_can_instrument(target)
    reports: list[Report] = []
    guard = Guard(target, Options(on_detect=reports.append))
    guard.install()
    try:
        model(*args, **kwargs)
    except Exception:  # of a bad value that led there: what ran before can be compared
        if not reports:
            raise
    finally:
        guard.uninstall()
    verdict = tuple(reports[0].verdict) if reports else ()
    return TracedBatch(0, tuple(guard.frames()), verdict=verdict)


def _name(model: Module) -> str:
    """What tells two models apart: class, dtype, and whether it is compiled."""
    dtype = _place_of(model)[1]
    said = [type(unwrapped(model)).__name__]
    said += [name_of_dtype(dtype)] if dtype is not None else []
    said += ["compiled"] if is_compiled(model) else []
    return ", ".join(said)


Place = tuple[torch.device, torch.dtype | None]


def _place_of(model: Module) -> Place:
    """Where a model computes: device, and dtype of its first floating-point parameter."""
    parameters = list(model.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    return device, next((p.dtype for p in parameters if p.is_floating_point()), None)


def _converter(place: Place | None) -> Callable[[Tensor], Tensor]:
    """A copy of an input, as a model takes it; a model may write into it."""

    def convert(tensor: Tensor) -> Tensor:
        copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if place is None:
            return copy
        device, dtype = place
        return copy.to(device, dtype if tensor.is_floating_point() else None)

    return convert


def _cuda_devices(model: Module) -> list[int]:
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})


@contextmanager
def _buffers_kept(model: Module) -> Iterator[None]:
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
