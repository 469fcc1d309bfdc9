"""The tools that listen to a guarded model, from the user's options: the only list of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn import Module

from fxguard.guard.guard import GuardedModel
from fxguard.guard.listeners import Listener, Recorded
from fxguard.guard.plugins import Plugins
from fxguard.options import Options
from fxguard.patch.patches import Patches
from fxguard.quiet.listener import QuietFaults
from fxguard.reproduce.kept import Reproducers
from fxguard.why.reasons import Reasons

__all__ = ["guard_with_tools", "listeners_for"]


def listeners_for(recorder: Recorded) -> Sequence[Listener]:
    """The tools for one guarded model, in the order in which they hear and write.

    A tool that nobody asked for is not imported.
    """
    options, found = recorder.options, list[Listener]()
    if options.trace_batch_nums or options.trace_to is not None:
        from fxguard.tracing.traces import Traces

        found.append(Traces(recorder))
    if options.underflow is not None:
        from fxguard.underflow.underflows import Underflows

        found.append(Underflows(recorder, options.underflow))
    if options.history is not None:
        from fxguard.history.recorder import Histories

        found.append(Histories(recorder))
    found.append(QuietFaults(recorder))
    return [*found, Reasons(recorder), Reproducers(recorder), Patches(recorder)]


def guard_with_tools(
    model: Module, options: Options, *, held_as: str = "", **plugins: Any
) -> GuardedModel:
    """A guard of a model, with the tools that its options ask for.

    Args:
        model: the model.
        options: what the user asked for.
        held_as: the name that a script has for the model; "" if names need not begin with it.
        plugins: further fields of :class:`~fxguard.guard.plugins.Plugins`.
    """
    return GuardedModel(model, options, Plugins(listeners=listeners_for, **plugins), held_as)
