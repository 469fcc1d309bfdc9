"""One run of a model under a guard of its own: its graphs, its outputs and its gradients."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fxguard import trees
from fxguard.batch.events import GraphRun
from fxguard.batch.kept_run import versions_of
from fxguard.capture.dynamo import is_compiled
from fxguard.forgiving import theirs
from fxguard.guard.guard import GuardedModel
from fxguard.guard.plugins import Plugins
from fxguard.in_dtype.placed import place_of
from fxguard.in_dtype.starts import differentiated, drawn_for, named_tensors
from fxguard.install.instrumented import check_can_instrument, unwrapped
from fxguard.measure.at_hand import name_of_dtype
from fxguard.options import Options
from fxguard.report.report import Report
from fxguard.rerun.differences import are_equal
from fxguard.trace.trace import TracedBatch

__all__ = [
    "KeptRun",
    "ModelRun",
    "buffers_kept",
    "run_model",
    "unchanged",
]


@dataclass(frozen=True, slots=True)
class KeptRun:
    """A run of a graph that has returned."""

    run: GraphRun
    outputs: list[Any]  # what it returned, as the model computed it
    versions: tuple[int | None, ...]  # how often its arguments had been written by then
    output_versions: tuple[int | None, ...]


@dataclass(slots=True)
class ModelRun:
    """One call of a model."""

    name: str  # class, dtype, and whether it is compiled
    is_compiled: bool
    batch: TracedBatch  # what was measured
    runs: list[KeptRun]
    given: list[Tensor]  # the tensors that it was given, in order
    parameters: dict[str, Tensor]
    outputs: list[Tensor] = field(default_factory=list)  # all tensors that it returned, in order
    output_names: list[str] = field(default_factory=list)  # of each: "output", "output['logits']"
    raised: bool = False  # a bad value led to an exception, so that it returned nothing
    between: int = 0  # operations that ran between graphs
    # Tensors where a backward begins, and the gradients that came in there; empty without one.
    starts: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of weights and "input 0"
    no_gradients: str = ""  # why there are none

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first floating-point tensor that it has or was given."""
        tensors = (*self.parameters.values(), *self.given)
        return next((x.dtype for x in tensors if x.is_floating_point()), None)


def run_model(
    model: Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, backward: bool
) -> ModelRun:
    """Call a model under a guard of its own, and differentiate what it returns."""
    target = unwrapped(model)
    check_can_instrument(target)
    reports: list[Report] = []
    runs: list[KeptRun] = []

    def hear(run: GraphRun, outputs: Sequence[Any] | None) -> None:
        if outputs is not None:
            assert run.args is not None
            versions = versions_of(run.args), versions_of(outputs)
            runs.append(KeptRun(dataclasses.replace(run), list(outputs), *versions))

    guard = GuardedModel(
        target, Options(on_detect=reports.append, backward=False), Plugins(hear=hear)
    )
    guard.install()
    given = [x for x in trees.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    found = ModelRun(
        name_of(model),
        is_compiled(model),
        TracedBatch(0, ()),
        runs,
        given,
        dict(target.named_parameters()),
    )
    try:
        with torch.set_grad_enabled(backward):
            output = model(*args, **kwargs)
            named = named_tensors(output)
            found.output_names, found.outputs = [x for x, _ in named], [x for _, x in named]
            if backward:
                _differentiate(found, output)
    except theirs():  # a bad value led there: what ran before can be compared
        if not reports:
            raise
        found.raised = True
    finally:
        guard.uninstall()
    verdict = tuple(reports[0].verdict) if reports else ()
    found.batch = TracedBatch(0, tuple(guard.frames()), verdict=verdict)
    found.between = guard.counted().between
    return found


def _differentiate(found: ModelRun, output: Any) -> None:
    """Compute the gradients of weights and inputs: of a loss, or of all outputs."""
    made = differentiated(output)
    found.starts += zip(made, drawn_for(made), strict=True)
    leaves = {name: x for name, x in found.parameters.items() if x.requires_grad}
    leaves |= {f"input {n}": x for n, x in enumerate(found.given) if x.requires_grad}
    if not made or not leaves:
        found.no_gradients = "nothing that was returned can be differentiated"
        return
    try:
        gradients = torch.autograd.grad(
            made, list(leaves.values()), [drawn for _, drawn in found.starts], allow_unused=True
        )
    except theirs() as error:  # such as a second backward of the user's
        found.no_gradients = f"{type(error).__name__} in the backward: {error}".splitlines()[0]
        return
    pairs = zip(leaves, gradients, strict=True)
    found.gradients = {name: x.detach() for name, x in pairs if x is not None}


def unchanged(kept: KeptRun) -> bool:
    """Whether nobody has written the arguments of a graph since it ran."""
    assert kept.run.args is not None
    return versions_of(kept.run.args) == kept.versions


def name_of(model: Module) -> str:
    """What tells two models apart: class, dtype, and whether it is compiled."""
    dtype = place_of(model)[1]
    said = [type(unwrapped(model)).__name__]
    said += [name_of_dtype(dtype)] if dtype is not None else []
    said += ["compiled"] if is_compiled(model) else []
    return ", ".join(said)


@contextlib.contextmanager
def buffers_kept(model: Module) -> Iterator[None]:
    """Restore the buffers that a forward writes, and leave the others alone."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                if not bool(are_equal(buffer, before).all()):
                    buffer.copy_(before)
