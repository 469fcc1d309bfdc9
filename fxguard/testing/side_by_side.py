"""One run of a graph in two precisions, operation by operation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fxguard.batch.events import GraphRun
from fxguard.graph.nodes import elements_of
from fxguard.graph.operations import read_node
from fxguard.graph.random_state import RandomState
from fxguard.measure.func_levels import without_levels
from fxguard.passes.unmark import without_marks
from fxguard.plan.plan import Check, Step
from fxguard.records import Source
from fxguard.rerun.same_start import copies_of

__all__ = ["Deviation", "SideBySide", "converted"]


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far what an operation made is from the same in the reference."""

    title: str  # "encoder.block.0 mul"
    error: float  # largest difference, relative to the largest magnitude of the reference
    error_before: float  # the largest of what it read
    source: Source | None = None

    def __str__(self) -> str:
        where = f" ({self.source.place})" if self.source else ""
        made = f"an error of {self.error:.2g}" if self.error < math.inf else "an inf or a NaN"
        return f"{self.title}{where} made {made} out of {self.error_before:.2g}"


def converted(values: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in another dtype."""
    return pytree.tree_map_only(
        Tensor, lambda x: x.detach().to(dtype) if _is_float(x) else x, values
    )


class SideBySide:
    """One run of a graph, once more in two precisions, in step."""

    def __init__(self, run: GraphRun, reference: torch.dtype) -> None:
        self.run_before = run
        self.graph = without_marks(run.graph_module)
        self.low = Interpreter(self.graph)
        self.high = _Reference(self.low, self.graph, reference)
        self.errors: dict[Node, float] = {}
        self.deviations: list[Deviation] = []
        self.by_name = {node.name: node for node in self.graph.graph.nodes}
        # What is measured after a node has run, and the operation that made it.
        self.after: dict[str, list[tuple[Step, list[Check]]]] = {}
        for step in run.plan.steps:
            if not step.counts:
                continue
            slots = [run.plan.values[value].slot for value in step.outputs]
            checks = [run.plan.checks[slot] for slot in slots if slot is not None]
            if checks and not checks[0].inside:
                self.after.setdefault(checks[0].after, []).append((step, checks))

    def run(self, references: Sequence[Any]) -> Sequence[Any]:
        """Run it, and return what leaves it in the reference."""
        if self.run_before.random_state is not None:
            self.run_before.random_state.restore()
        given = zip(copies_of(self.run_before), references, strict=True)
        *body, output = self.graph.graph.nodes
        for node in body:
            if node.op == "placeholder":
                low, high = next(given)
                high = high.clone() if _is_float(low) else low
            else:
                before = self.random_state()
                low = self.low.run_node(node)
                drawn = before != self.random_state()
                high = self.high.run_beside(node, low, drawn)
            self.low.env[node], self.high.env[node] = low, high
            self.compare(node, low, high)
        returned: Any = self.high.map_nodes_to_values(output.args[0], output)
        return list(returned)

    def random_state(self) -> list[bytes]:
        """Of all generators: dropout draws in training, and not in evaluation."""
        assert self.run_before.args is not None
        state = RandomState.now(self.run_before.args)
        return [bytes(each.numpy()) for each in (state.cpu, *state.devices.values())]

    def compare(self, node: Node, low: Any, high: Any) -> None:
        """Note how far apart the two results of a node are."""
        before = max((self.errors[one] for one in node.all_input_nodes), default=0.0)
        self.errors[node] = _largest_error(low, high)
        for step, checks in self.after.get(node.name, ()):
            if node in self.high.not_compared:
                continue
            error = 0.0
            for check in checks:
                made = self.by_name[check.node]  # another node, where its memory was written
                self.errors[made] = _largest_error(self.low.env[made], self.high.env[made])
                error = max(error, self.errors[made])
            title = step.title
            self.deviations.append(Deviation(title, error, before, step.source))


class _Reference(Interpreter):
    """Computes in the reference's precision, whatever dtype a node asks for.

    What is no floating-point number is the same tensor in both runs, and computed once.
    """

    def __init__(self, low: Interpreter, module: GraphModule, dtype: torch.dtype) -> None:
        super().__init__(module)
        self.low = low
        self.dtype = dtype
        self.not_compared: set[Node] = set()
        self.without_kernel = 0

    def run_beside(self, node: Node, low: Any, drawn: bool) -> Any:
        """Run a node, given what it made in the other precision.

        Args:
            node: of the graph.
            low: what it made.
            drawn: whether it drew random numbers for that.
        """
        made = [x for _, x in elements_of(low)]
        call = read_node(node, self.low.module)  # type: ignore[arg-type]
        written = [operand for operand in call.written if _is_float(self.low.env[operand])]
        if not written and not any(map(_is_float, made)):
            return low  # also a size, or the beginning or end of a region such as that of autocast
        if node.op == "get_attr":
            return converted(low, self.dtype)
        if drawn:
            return self.taken_over(node, low, written)
        if call.casts:
            read = self.fetch_args_kwargs_from_env(node)[0][0]
            return read.to(self.dtype, copy=True)
        try:
            with torch.autocast(made[0].device.type if made else "cpu", enabled=False):
                result = self.run_node(node)
        except (RuntimeError, NotImplementedError):  # grouped matrix products, for one
            self.without_kernel += 1
            return self.taken_over(node, low, written)
        return pytree.tree_map(self.chosen, low, result)

    def taken_over(self, node: Node, low: Any, written: Sequence[Node]) -> Any:
        """What the other run has made, and written."""
        self.not_compared.add(node)
        for operand in written:
            self.env[operand].copy_(self.low.env[operand])
        return self.env[written[0]] if written else converted(low, self.dtype)

    def chosen(self, low: Any, high: Any) -> Any:
        """The precise result where it is a floating-point number, else that of the other run."""
        if not _is_float(high):
            return low
        return high if high.dtype is self.dtype else high.to(self.dtype)

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        return pytree.tree_map_only(
            torch.dtype,
            lambda dtype: self.dtype if dtype.is_floating_point else dtype,
            super().fetch_args_kwargs_from_env(n),
        )


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _largest_error(low: Any, high: Any) -> float:
    pairs = zip(elements_of(low), elements_of(high), strict=True)
    return max((_error(one, other) for (_, one), (_, other) in pairs), default=0.0)


def _error(low: Tensor, high: Tensor) -> float:
    """``max |low - high| / max |high|``; inf where only ``low`` is not finite."""
    low, high = without_levels(low), without_levels(high)
    if not low.is_floating_point() or low.numel() == 0 or low.layout is not torch.strided:
        return 0.0
    finite = high.isfinite()
    low, high = low.to(high.dtype)[finite], high[finite]
    if not bool(low.isfinite().all()):
        return math.inf
    difference = float((low - high).abs().amax()) if high.numel() else 0.0
    return difference / float(high.abs().amax()) if difference else 0.0
