"""The operations of a model that are kept in float32: named by globs, found in each graph."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Module

from fxguard.batch.events import GraphRun
from fxguard.capture.float32_weights import Float32Weights
from fxguard.errors import UsageError
from fxguard.globs import matches
from fxguard.graph.nodes import example_of
from fxguard.measure.free_memory import has_room
from fxguard.passes.float32 import in_float32, is_put_in
from fxguard.plan.plan import Place, Plan, Step
from fxguard.plan.reader import make_plan
from fxguard.records import Role, title_of

__all__ = ["Keeping", "named_steps", "numbered", "seen_from_outside", "titles_of"]

AROUND = "<the model>"  # its name in a graph that holds more than the model


class Keeping:
    """The operations of one model that are kept in float32.

    Args:
        globs: ``"encoder.block.*:add#2"`` names modules, and after the colon operations in them. A
            number selects one of several with the same name.
        names: ``id(module)`` to its name in globs; None for its name in the plan of a graph.

    Attributes:
        globs: may be replaced while nobody runs the model; see
            :class:`~fxguard.capture.keeping_backend.KeepingBackend`.
        idle: globs that have named no operation yet.
    """

    def __init__(self, globs: Sequence[str], names: Mapping[int, str] | None = None) -> None:
        self.globs = tuple(globs)
        self.names = names
        self.idle = dict.fromkeys(self.globs)
        self.refusal: UsageError | None = None
        self._is_settled = not self.globs

    def expect_some(self) -> None:
        """Check, after the model has run, that something was found.

        Raises:
            FxguardError: when no glob named an operation, or one named an operation that cannot be
                kept.
        """
        if self.refusal is not None:
            raise self.refusal
        if self._is_settled:
            return
        if len(self.idle) == len(self.globs):
            raise UsageError(
                f"keep_float32: {', '.join(self.globs)} names no operation of the graphs that were "
                "captured; operations that run between graphs cannot be kept"
            )
        self._is_settled = True
        for glob in self.idle:
            warnings.warn(
                f"keep_float32: {glob} names no operation of the graphs that were captured",
                RuntimeWarning,
                stacklevel=2,
            )

    def around(self, model: Module) -> Keeping:
        """The same for a graph that was compiled around the model."""
        # A name that no other module can have.
        names = {
            id(module): f"{AROUND}.{name}" if name else AROUND
            for name, module in model.named_modules()
        }
        seen = [each for glob in self.globs for each in seen_from_outside(glob, AROUND)]
        return Keeping(seen, names)

    def rewritten(
        self, graph_module: GraphModule, plan: Plan, *, weights_stay: bool
    ) -> tuple[GraphModule, Float32Weights]:
        """A graph with its kept operations in float32.

        Args:
            graph_module: the graph; returned unchanged if nothing in it is kept.
            plan: its plan.
            weights_stay: whether weights exist between two runs. FSDP frees them, and copies would
                undo that, so weights are cast at each run; likewise if memory is scarce.

        Returns:
            The graph to run, and a function that gives its extra inputs.
        """
        weights = {
            value.argument
            for value in plan.values
            if value.role is Role.WEIGHT and value.argument is not None and weights_stay
        }
        kept = self.kept_of(graph_module, plan)
        if self.names is not None:  # a graph around the model is the only one
            self.expect_some()
        if not kept:
            return graph_module, Float32Weights(())
        try:
            made = in_float32(graph_module, kept, weights)
            if not has_room(_inputs_at(graph_module, made.weights), torch.float32):
                made = in_float32(graph_module, kept, frozenset())
        except UsageError as error:
            self.refusal = error  # TorchDynamo may leave code to Python that its backend rejects
            raise
        return made.graph_module, Float32Weights(made.weights)

    def kept_of(self, graph_module: GraphModule, plan: Plan) -> frozenset[str]:
        """The names of the nodes of a graph that are kept."""
        if self.names is not None:
            plan = make_plan(graph_module, self.names, has_marks=False)
        kept = set()
        for step, number in numbered(plan):
            names = step.kind, f"{step.kind}#{number}"
            for glob in self.globs:
                if any(matches(glob, step.module, name) for name in names):
                    kept.add(_outermost(step))
                    self.idle.pop(glob, None)
        return frozenset(kept)


def seen_from_outside(glob: str, part: str) -> tuple[str, ...]:
    """A glob for a part of a model, as globs for the whole model.

    Example:
        >>> seen_from_outside("*:add", "encoder")
        ('encoder.*:add', 'encoder:add')
    """
    of_module, colon, of_operation = glob.partition(":")
    operation = colon + of_operation
    if not part:
        return (glob,)
    if not of_module:
        return (part + operation,)
    inside = f"{part}.{of_module}{operation}"
    return (inside, part + operation) if matches(of_module, "", "") else (inside,)


def numbered(plan: Plan) -> Iterator[tuple[Step, int]]:
    """Each operation of a graph, with its number among those of its module with the same name.

    Casts that :mod:`fxguard.passes.float32` put in have no number.
    """
    count: Counter[tuple[str, str]] = Counter()
    for step in plan.steps:
        if step.counts and not is_put_in(step.node):
            count[step.module, step.kind] += 1
            yield step, count[step.module, step.kind]


def _inputs_at(graph_module: GraphModule, positions: Collection[int]) -> list[Tensor]:
    inputs = [example_of(node) for node in graph_module.graph.nodes if node.op == "placeholder"]
    return [inputs[position] for position in positions if isinstance(inputs[position], Tensor)]


def _outermost(step: Step) -> str:
    """The node of the outer graph that contains an operation."""
    return step.inside[0][0] if step.inside else step.node


def titles_of(run: GraphRun) -> dict[Place, str]:
    """The title of each operation; a second one with the same name has a number."""
    named = named_steps(run)
    return {(step.inside, step.node): title_of(module, kind) for module, kind, step in named}


def named_steps(run: GraphRun) -> Iterator[tuple[str, str, Step]]:
    """Each operation of a graph, with its module and its name: ``mul #2``."""
    for step, number in numbered(run.plan):
        kind = step.kind if number == 1 else f"{step.kind} #{number}"
        yield run.running_name(step.module), kind, step
