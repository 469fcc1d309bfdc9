"""Runs a model once and records what it does, in memory."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fxguard.graph.marks import flatten_call, rows_of
from fxguard.in_dtype.starts import differentiated, drawn_for, named_tensors
from fxguard.install.instrumented import check_can_instrument, unwrapped
from fxguard.measure.at_hand import name_of_dtype, own_arithmetic
from fxguard.recording._recorder import Recorder, parts_of
from fxguard.recording.recorded import Recording

__all__ = ["recorded"]


def recorded(
    model: Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    max_bytes: int,
    *,
    of: Callable[[Any], Any] | None = None,
    gradients: bool = False,
) -> tuple[Recording, Any]:
    """Call a model, and return what it did and what it returned.

    Args:
        model: any module; what is compiled runs as its source says, in eager mode.
        args: its positional arguments.
        kwargs: its keyword arguments.
        max_bytes: how many bytes of values to keep; numbers of the rest.
        of: makes the number that matters of what the model returned.
        gradients: whether to also record a backward.

    Raises:
        FxguardError: when the model is instrumented.
    """
    model = unwrapped(model)
    if not isinstance(model, torch.jit.ScriptModule):
        check_can_instrument(model)
    left = max_bytes

    def keeps(size: int) -> bool:
        nonlocal left
        if size > left:
            return False
        left -= size
        return True

    dtype = next((x.dtype for x in model.parameters() if x.is_floating_point()), None)
    name = type(model).__name__ + ("" if dtype is None else f", {name_of_dtype(dtype)}")
    recording = Recording(name, about=_about())
    recorder = Recorder(model, _named_inputs(args, kwargs), recording, keeps)
    try:
        with torch.compiler.set_stance("force_eager"), recorder:
            output = model(*args, **kwargs)
            number = None if of is None else of(output)
            found = _gradients(model, output, number) if gradients else {}
        with own_arithmetic():
            named = [] if not isinstance(number, Tensor) else [("of", number)]
            named += [*named_tensors(output), *found.items()]
            recording.outputs = [
                (name, recorder.kept(x)) for name, whole in named for x in parts_of(whole)
            ]
    finally:
        recorder.end()
    return recording, output


def _gradients(model: Module, output: Any, number: Any) -> dict[str, Tensor]:
    """The gradients of weights, by name: of the number that matters, of a loss, or of outputs."""
    roots = [number] if isinstance(number, Tensor) else differentiated(output)
    weights = {name: x for name, x in model.named_parameters() if x.requires_grad}
    if not roots or not weights:
        return {}
    with own_arithmetic():
        come_in = drawn_for(roots)
    found = torch.autograd.grad(roots, list(weights.values()), come_in, allow_unused=True)
    return {f"grad of {name}": x for name, x in zip(weights, found, strict=True) if x is not None}


def _about() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
    }


def _named_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors that a model is given, with the names that reports give them: ``input[0]``."""
    rows = rows_of(*flatten_call(args, kwargs, None))
    return [(name, x) for name, x, _ in rows if x is not None]
