"""Runs a model or a function under a guard, once or many times, and leaves it unchanged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fxguard import trees
from fxguard.api.listening import guard_with_tools
from fxguard.forgiving import theirs
from fxguard.graph.outputs import to_differentiate
from fxguard.guard.guard import GuardedModel
from fxguard.install.instrumented import check_can_instrument, find_guard, unwrapped
from fxguard.options import Options
from fxguard.report.errors import NonFiniteError
from fxguard.report.report import Report

__all__ = [
    "Outcome",
    "as_call",
    "as_module",
    "call",
    "forget",
    "on_loan",
    "watch",
]

Model = Module | Callable[..., Any]


class Function(Module):
    """A function as a module, because only modules are guarded."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one call."""

    output: Any  # None if the forward raised because of a bad value
    report: Report | None  # None if the call was healthy
    guard: GuardedModel


@dataclass(slots=True)
class _Kept:
    """The model that was watched last, so that the next example finds its graphs captured.

    A module is not kept alive. A function is, with the module around it.
    """

    model: Callable[[], Any]
    options: Options
    around: Function | None
    guard: GuardedModel
    reports: list[Report]


_last: _Kept | None = None


def watch(
    model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], **options: Any
) -> Outcome:
    """Call a model under a guard, and return what the guard found.

    Args:
        model: any module, possibly compiled, or a function of tensors. It is guarded during the
            call; an instrumented model uses its own guard.
        args: what it is given.
        kwargs: likewise.
        options: options of :func:`fxguard.instrument`. With ``backward=True``, its outputs are also
            differentiated.
    """
    backward = options.get("backward", False)
    if isinstance(model, Module) and (own := find_guard(unwrapped(model))) is not None:
        before = own.last_report
        try:
            output = call(model, args, kwargs, backward=backward)
        except NonFiniteError as error:
            return Outcome(None, error.report, own)
        found = own.last_report
        return Outcome(output, None if found is before else found, own)
    with on_loan(model, **options) as (called, guard, reports):
        try:
            output = call(called, args, kwargs, backward=backward)
        except theirs():  # a bad value may lead to one in the model
            if not reports:
                raise
            output = None
    return Outcome(output, reports[0] if reports else None, guard)


def call(model: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, backward: bool) -> Any:
    """Call a module, and differentiate what it returns.

    No gradient is accumulated: weights and inputs keep their gradients.

    Args:
        model: the module.
        args: what it is given.
        kwargs: likewise.
        backward: whether to differentiate its ``loss`` if it returns one, else the sum of all
            floating-point outputs, with respect to weights and floating-point inputs.

    Returns:
        What the module returned.
    """
    if not backward:
        return model(*args, **kwargs)
    inputs: list[Tensor] = []

    def leaf(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        inputs.append(value.detach().requires_grad_())
        return inputs[-1]

    with torch.enable_grad():
        args, kwargs = trees.tree_map_only(Tensor, leaf, (args, dict(kwargs)))
        output = model(*args, **kwargs)
        losses = [x.sum() for x in to_differentiate(output)]
        leaves = [*inputs, *(p for p in model.parameters() if p.requires_grad)]
        if losses and leaves:
            torch.autograd.grad(losses, leaves, allow_unused=True)
    return output


@contextmanager
def on_loan(model: Model, **options: Any) -> Iterator[tuple[Module, GuardedModel, list[Report]]]:
    """Guard a model for a while. The captured graphs of the last model are kept for the next time.

    Yields:
        The module to call, its guard, and the reports, which are not printed.
    """
    global _last
    wanted = Options(**{"backward": False, **options})
    if _last is None or _last.model() is not model or _last.options != wanted:
        _last = _keep(model, wanted)
    kept = _last
    check_can_instrument(kept.guard.model)
    kept.reports.clear()
    kept.guard.install()
    try:
        yield as_module(model) if kept.around is None else kept.around, kept.guard, kept.reports
    finally:
        kept.guard.put_away()
        kept.guard.stop_listening()


def as_module(model: Model) -> Module:
    """A module unchanged, a function wrapped in one."""
    return model if isinstance(model, Module) else Function(model)


def _keep(model: Model, options: Options) -> _Kept:
    called = as_module(model)
    reports: list[Report] = []
    wanted = replace(options, on_detect=reports.append)
    guard = guard_with_tools(unwrapped(called), wanted)
    if isinstance(called, Function):
        return _Kept(lambda: model, options, called, guard, reports)
    return _Kept(weakref.ref(model), options, None, guard, reports)


def forget() -> None:
    """Drop the model that was watched last."""
    global _last
    _last = None


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as arguments: a mapping by name, a tuple or list by position, else one argument."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}
