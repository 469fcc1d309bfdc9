"""Runs the backward of a captured graph again, for the gradient at each operand."""

from __future__ import annotations

import torch
from torch import Tensor

from fxguard.batch.kept_run import KeptRun
from fxguard.graph.random_state import random_state_kept
from fxguard.graph.wide_form import NotJudged
from fxguard.measure.at_hand import range_of
from fxguard.records import Role
from fxguard.rerun._edge_hooks import EdgeHooks
from fxguard.rerun.edges import Gradients, Look
from fxguard.rerun.start import Start, with_aliases
from fxguard.torch_names import DisableTorchFunction

__all__ = ["gradients_of"]


def gradients_of(kept: KeptRun, scale: float = 1.0, look: Look | None = None) -> Gradients:
    """Run a graph and its backward again as they ran before.

    Users' hooks do not run, because the graph runs on aliases of its arguments.

    Args:
        kept: the run, with the incoming gradients of its outputs.
        scale: a divisor for these gradients.
        look: an operand to look at closely, if any.

    Raises:
        NotJudged: when an argument was changed since, or a collective would be issued.
        Exception: whatever the operations raise.
    """
    gradients = Gradients()
    run = kept.opened()
    start = Start(run)
    with kept.settings(), start.begun() as copies, torch.enable_grad():
        assert run.args is not None
        aliases, given = with_aliases(run.args, copies)
        hooks = EdgeHooks(gradients, look)
        for position, value in enumerate(given):
            if isinstance(value, Tensor) and value.requires_grad:
                gradients.arguments[position] = hooks.enter(value)
        for value in run.plan.values:
            if value.role is Role.WEIGHT and value.argument in gradients.arguments:
                name = run.running_name(value.name)
                gradients.weights[gradients.arguments[value.argument]] = name
        outputs, _ = start.walk(given, hooks)
        incoming = {
            position: gradient / scale if scale != 1 else gradient
            for position, gradient in sorted(kept.incoming.items())
        }
        for position, gradient in incoming.items():
            number = gradients.outputs[position] = hooks.number_of(outputs[position])
            gradients.incoming[position] = range_of(gradient)
            if kept.are_sums:
                gradients.sums[number] = gradient
        for position, sample in kept.samples.items():
            gradients.samples[hooks.number_of(outputs[position])] = sample / scale
    with random_state_kept(run.args), DisableTorchFunction(), start.alone():
        torch.autograd.grad(
            [outputs[position] for position in incoming],
            aliases,
            list(incoming.values()),
            allow_unused=True,
        )
    gradients.sums.clear()
    if gradients.samples:
        raise NotJudged("an output got gradients from inside and from outside of its graph")
    return gradients
