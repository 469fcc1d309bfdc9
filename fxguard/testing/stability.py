"""One model in two precisions, operation by operation, on the same input."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import Module

from fxguard import operations
from fxguard.batch import GraphRun, RandomState
from fxguard.errors import UsageError
from fxguard.guard import Guard, remove
from fxguard.insert import without_marks
from fxguard.instrumented import find_guard, unwrapped
from fxguard.nodes import elements_of
from fxguard.options import Options
from fxguard.plan import Check, Step
from fxguard.records import Source
from fxguard.regions import unwrapped as unwrapped_level
from fxguard.replay import copies_of
from fxguard.testing.watch import Model, as_module

__all__ = ["Deviation", "Stability", "numerically_stable"]

ROUNDINGS = 32  # the default tolerance, in units of the dtype's eps


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


@dataclass(frozen=True, slots=True, repr=False)
class Stability:
    """What came of comparing two precisions. True when every operation stayed within ``rtol``."""

    dtype: torch.dtype
    reference: torch.dtype
    rtol: float
    deviations: tuple[Deviation, ...]  # one for each operation, in order of execution
    between: int = 0  # operations that ran between graphs, and were not compared
    taken_over: int = 0  # operations that draw random numbers or have no kernel for the reference

    def __bool__(self) -> bool:
        return self.first is None

    @property
    def first(self) -> Deviation | None:
        """The first operation whose error is over ``rtol``."""
        return next((d for d in self.deviations if not d.error <= self.rtol), None)

    @property
    def worst(self) -> Deviation | None:
        """The operation with the largest error."""
        return max(self.deviations, key=lambda d: d.error, default=None)

    def __str__(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.reference)]
        counted = f"{len(self.deviations)} operations compared"
        if self.between:
            counted += f", {self.between} between graphs not"
        if self.taken_over:
            counted += f", {self.taken_over} random ones or without a kernel for {names[1]} not"
        if self.first is not None:
            text = f"not stable in {names[0]}: {self.first}, against {names[1]}"
            if self.first.source is not None and self.first.source.code:
                text += f"\n  {self.first.source}"
        else:
            text = f"stable in {names[0]}, against {names[1]}: the worst is {self.worst}"
        return f"{text}\n  rtol {self.rtol:.2g}; {counted}"

    __repr__ = __str__  # what pytest shows of `assert numerically_stable(...)`


@torch.no_grad()
def numerically_stable(
    model: Model,
    *args: Any,
    dtype: torch.dtype = torch.float16,
    reference: torch.dtype = torch.float64,
    rtol: float | None = None,
    **kwargs: Any,
) -> Stability:
    """Compare every operation of a model in one dtype with the same in a more precise one.

    Weights and floating-point inputs are rounded to ``dtype``; the reference starts from the
    rounded ones, so that only what the operations lose is counted. Each captured graph runs in
    both precisions, node by node; in the reference, casts between floating-point dtypes are left
    out. Integers, booleans and random numbers are taken over from the run in ``dtype``: a mask or
    an index that comes out differently is no error by itself.

    The error of a tensor is ``max |x - reference| / max |reference|``.

    Args:
        model: any module, or a function of tensors. A copy of it runs, without gradients.
        args: what it is given.
        dtype: the precision that is tested.
        reference: the precision that it is held against.
        rtol: the largest error that is allowed; 32 times the dtype's ``eps`` where not given.
        kwargs: what it is given by name.

    Returns:
        True or False, and as text the first operation whose error is larger.

    Raises:
        FxguardError: when nothing could be compared, or the reference is not more precise.

    Warns:
        RuntimeWarning: when operations were not compared, because they ran between graphs or have
            no kernel for ``reference``.

    Example:
        >>> assert numerically_stable(model, x, dtype=torch.bfloat16)
        >>> print(numerically_stable(RMSNorm(64), x * 1000))
        not stable in float16: pow (norm.py:12) made an inf or a NaN out of 0, against float64
    """
    if not torch.finfo(reference).eps < torch.finfo(dtype).eps:
        raise UsageError(f"{reference} is not more precise than {dtype}")
    tested = copy.deepcopy(unwrapped(as_module(model))).to(dtype)
    if find_guard(tested) is not None:
        remove(tested)
    comparison = _Comparison(tested, reference)
    comparison.install()
    tested(*_converted(args, dtype), **_converted(kwargs, dtype))
    if not comparison.deviations:
        raise UsageError(
            "there is nothing to compare: TorchDynamo captured no operation of this "
            f"{type(tested).__name__}"
        )
    assert comparison.recorder.last_batch is not None
    between = comparison.recorder.between(comparison.recorder.last_batch)
    rtol = ROUNDINGS * torch.finfo(dtype).eps if rtol is None else rtol
    found = Stability(
        dtype, reference, rtol, tuple(comparison.deviations), between, comparison.taken_over
    )
    if between or comparison.without_kernel:
        warnings.warn(f"not every operation was compared: {found}", RuntimeWarning, stacklevel=3)
    return found


def _converted(values: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in another dtype."""
    return pytree.tree_map_only(
        Tensor, lambda x: x.detach().to(dtype) if _is_float(x) else x, values
    )


class _Comparison(Guard):
    """Runs each graph again when it has run, in both precisions."""

    def __init__(self, model: Module, reference: torch.dtype) -> None:
        super().__init__(model, Options(on_detect=lambda report: None))
        self.reference = reference
        self.deviations: list[Deviation] = []
        self.taken_over = self.without_kernel = 0
        # What a graph was given or has returned, and the same in the reference, by `id`.
        self.known: dict[int, tuple[Tensor, Any]] = {}

    def _graph_ran(self, run: GraphRun, outputs: Sequence[Any] | None) -> None:
        assert run.args is not None
        if outputs is not None:
            both = _Both(run, self.reference)
            returned = both.run([self.in_reference(arg) for arg in run.args])
            self.deviations += both.deviations
            self.without_kernel += both.high.without_kernel
            self.taken_over += len(both.high.not_compared)
            for output, reference in zip(outputs, returned, strict=True):
                self.known[id(output)] = (output, reference)
        super()._graph_ran(run, outputs)

    def in_reference(self, value: Any) -> Any:
        if id(value) not in self.known:
            self.known[id(value)] = (value, _converted(value, self.reference))
        return self.known[id(value)][1]


class _Both:
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
            title = f"{step.module} {step.kind}".strip()
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
        written = [
            node for node in operations.written_operands(node) if _is_float(self.low.env[node])
        ]
        if not written and not any(map(_is_float, made)):
            return low  # also a size, or the beginning or end of a region such as that of autocast
        if node.op == "get_attr":
            return _converted(low, self.dtype)
        if drawn:
            return self.taken_over(node, low, written)
        if operations.name_of(node.target) in operations.CASTS:
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
        return self.env[written[0]] if written else _converted(low, self.dtype)

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
    low, high = unwrapped_level(low), unwrapped_level(high)
    if not low.is_floating_point() or low.numel() == 0 or low.layout is not torch.strided:
        return 0.0
    finite = high.isfinite()
    low, high = low.to(high.dtype)[finite], high[finite]
    if not bool(low.isfinite().all()):
        return math.inf
    difference = float((low - high).abs().amax()) if high.numel() else 0.0
    return difference / float(high.abs().amax()) if difference else 0.0
