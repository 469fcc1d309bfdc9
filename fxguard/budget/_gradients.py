"""How far off the gradient of each weight is, and which operations that comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxguard.budget._graphs import Graphs
from fxguard.budget._measured import Measured, numbers_of, relative
from fxguard.budget._rows import Amplified, lines_of
from fxguard.errors import UsageError
from fxguard.graph.wide_form import widened
from fxguard.in_dtype.trials import Trials
from fxguard.report.error_budget import ErrorShare

__all__ = ["Gradients", "gradients_of"]


@dataclass(slots=True)
class Gradients:
    """The gradients of all weights."""

    errors: dict[str, float] = field(default_factory=dict)
    rows: tuple[ErrorShare, ...] = ()
    note: str = ""


def gradients_of(
    trials: Trials, of: Callable[[Any], Any] | None, graphs: Graphs, number: Measured
) -> Gradients:
    """Run the model's backward, and that of the float64 run, which is differentiated once more.

    Args:
        trials: runs the model.
        of: gives the number that matters.
        graphs: of the model; the shares of the forward are replaced by those of the gradients.
        number: the number that matters.
    """
    weights = {name: x for name, x in graphs.weights.items() if name in trials.with_gradient}
    if not weights:
        return Gradients(note="no weight asks for a gradient")
    # Factors that the model's dtype holds.
    drawn = [x.to(trials.dtype).to(x.dtype) for x in number.projections[0]]

    def loss(output: Any) -> Tensor:
        made = numbers_of(output, of)
        pairs = zip([made[at] for at in number.kept], drawn, strict=True)
        return torch.stack([(x * factor.to(x.dtype)).sum() for x, factor in pairs]).sum()

    try:
        _, low = trials.run(trials.low, trials.start(), loss)
    except (UsageError, RuntimeError) as reason:  # as for a value that was written too early
        return Gradients(note=f"no gradients: {str(reason).splitlines()[0]}")
    graphs.shares.listens = False
    found = torch.autograd.grad(
        number.wide, list(weights.values()), drawn, create_graph=True, allow_unused=True
    )
    wide = {name: x for name, x in zip(weights, found, strict=True) if x is not None}
    errors = {
        name: relative([widened(low[name], x.dtype)], [x.detach()])
        for name, x in wide.items()
        if name in low
    }
    if not errors:
        return Gradients(note="the number has no gradient with respect to a weight")
    return _shared(graphs, wide, errors)


def _shared(graphs: Graphs, wide: Mapping[str, Tensor], errors: dict[str, float]) -> Gradients:
    """What the errors of all gradients together come from; each of them weighs the same."""
    generator = torch.Generator().manual_seed(1)
    total: Any = 0.0
    count = 0
    for gradient in wide.values():
        norm = gradient.detach().norm()
        if gradient.requires_grad and bool(norm > 0) and bool(norm.isfinite()):
            drawn = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
            total = total + (gradient * drawn.to(gradient.device)).sum() / norm
            count += 1
    if not count:
        return Gradients(errors)
    graphs.shares.restart()
    graphs.shares.listens = True
    graphs.shares.begin()
    try:
        torch.autograd.grad(total, graphs.all_leaves(), allow_unused=True)
    except RuntimeError as error:  # an operation without a second derivative
        return Gradients(errors, note=f"no shares of the gradients: {str(error).splitlines()[0]}")
    amplified = Amplified(graphs.shares, graphs, count)
    lines = lines_of(graphs.shares, graphs)
    return Gradients(errors, tuple(line.row(amplified) for line in lines if line.share))
