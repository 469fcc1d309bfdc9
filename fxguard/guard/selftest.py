"""Plants a NaN in every measured value of a captured graph, and checks that it is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxguard.batch.assemble import assemble
from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun
from fxguard.forgiving import theirs
from fxguard.graph import nodes
from fxguard.measure.ways import TRACEABLE
from fxguard.passes.checks import with_checks
from fxguard.passes.faults import Planting
from fxguard.plan.blame import Blame
from fxguard.plan.plan import Plan
from fxguard.records import Role, Severity
from fxguard.report.self_test import SelfTest
from fxguard.verdict.judge import Judgment

__all__ = ["merged", "selftest_of"]

# Turns a name in a graph that was captured in one module into that of another that it runs for.
Running = Callable[[str], str]

NO_PLACE = "no place for a NaN there"
BAD_ALREADY = "NaN already, with made-up inputs"
RAISES = "that make the model raise"
BETWEEN = "between graphs"
CANNOT_RUN = "in graphs that made-up inputs cannot run"


def selftest_of(
    graph: GraphModule,
    plan: Plan,
    backend: Callable[..., Any],
    tensors: Mapping[tuple[Role, str], Tensor],
    running: Sequence[Running],
) -> SelfTest:
    """The self-test of one graph, for each module that it runs for.

    Args:
        graph: the graph as it was captured.
        plan: its plan.
        backend: compiles the graph.
        tensors: (role, qualified name) of a weight or buffer to the tensor.
        running: for each module, what turns a name in the graph into that of the module.
    """
    results = [_selftest_for(graph, plan, backend, tensors, name) for name in running]
    return replace(merged(results), graphs=max(result.graphs for result in results))


def _selftest_for(
    graph: GraphModule,
    plan: Plan,
    backend: Callable[..., Any],
    tensors: Mapping[tuple[Role, str], Tensor],
    running: Running,
) -> SelfTest:
    inputs = made_up_inputs(graph, plan, tensors, running)
    device = next((x.device for x in inputs if isinstance(x, Tensor)), torch.device("cpu"))
    switch = torch.full((), -1, dtype=torch.int64, device=device)
    planting = Planting(switch, {check: slot for slot, check in enumerate(plan.checks)})
    values = {v.slot: index for index, v in enumerate(plan.values) if v.slot is not None}
    wanted = [slot for slot, index in values.items() if plan.values[index].can_be_bad]
    try:
        with torch.no_grad():
            planted = with_checks(graph, plan, TRACEABLE, planting)
            compiled = backend(planted, inputs)
            healthy = _blames(graph, plan, compiled, inputs)
    except theirs():  # such as made-up numbers that are no valid index
        return SelfTest(0, 0, 0, (), ((CANNOT_RUN, len(wanted)),))
    found, missed = 0, []
    left_out = Counter(f"that are {v.note}" for v in plan.values if v.note and v.role is Role.MADE)
    for slot in wanted:
        if slot not in planting.planted:
            left_out[NO_PLACE] += 1
        elif any((b.value, b.severity) == (values[slot], Severity.NAN) for b in healthy):
            left_out[BAD_ALREADY] += 1
        else:
            switch.fill_(slot)
            try:
                blames = _blames(graph, plan, compiled, inputs)
            except theirs():  # such as a NaN that was cast to an index
                left_out[RAISES] += 1
                continue
            fresh = [blame for blame in blames if blame not in healthy]
            if fresh and fresh[0].value == values[slot]:
                found += 1
            else:
                missed.append(_name_of(plan, values[slot], running))
    count = found + len(missed)
    return SelfTest(count, found, 1, tuple(missed), tuple(sorted(left_out.items())))


def merged(results: Sequence[SelfTest], between: int = 0) -> SelfTest:
    """One self-test from those of several graphs and a number of operations between them."""
    left_out: Counter[str] = Counter({BETWEEN: between} if between else {})
    for result in results:
        left_out.update(dict(result.left_out))
    return SelfTest(
        planted=sum(result.planted for result in results),
        found=sum(result.found for result in results),
        graphs=sum(result.graphs for result in results),
        missed=tuple(name for result in results for name in result.missed),
        left_out=tuple(sorted(left_out.items())),
    )


@torch.no_grad()
def _blames(
    graph: GraphModule, plan: Plan, compiled: Callable[..., Any], inputs: list[Any]
) -> tuple[Blame, ...]:
    """What the NaN of one run is blamed on."""
    given = [x.clone() if isinstance(x, Tensor) else x for x in inputs]  # a graph may write them
    *_, statistics = compiled(*given)
    batch = Batch(0)
    batch.graph_ran(
        GraphRun(plan, graph, statistics, tuple(given), None, ("", ""), (), live=tuple(given)), ()
    )
    batch.read()
    flow = assemble(batch)
    blames = Judgment(batch, flow, lambda step: False).verdict.both
    return tuple(Blame(flow.keys[b.value].value, b.step, b.severity) for b in blames)


def made_up_inputs(
    graph: GraphModule, plan: Plan, tensors: Mapping[tuple[Role, str], Tensor], running: Running
) -> list[Any]:
    """The model's weights; halves for other floating-point inputs, zeros for indices."""
    standing = {
        value.argument: tensors.get((value.role, running(value.name))) for value in plan.values
    }
    inputs: list[Any] = []
    placeholders = (node for node in graph.graph.nodes if node.op == "placeholder")
    for position, node in enumerate(placeholders):
        example = nodes.example_of(node)
        tensor = standing.get(position)
        if tensor is not None:
            inputs.append(tensor.detach().to(example.dtype))  # kept copies have another dtype
        elif isinstance(example, Tensor):
            shape = [_hint(size) for size in example.shape]
            is_float = example.dtype.is_floating_point or example.dtype.is_complex
            fill = 0.5 if is_float else int(example.dtype is torch.bool)
            inputs.append(torch.full(shape, fill, dtype=example.dtype, device=example.device))
        else:
            inputs.append(_hint(example))
    return inputs


def _hint(size: Any) -> Any:
    """The number that the capture saw, if the size is a symbol now."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _name_of(plan: Plan, value: int, running: Running) -> str:
    for step in plan.steps:
        if value in step.outputs:
            return replace(step, module=running(step.module)).title
    return f"{plan.values[value].role.value} {running(plan.values[value].name)}"
