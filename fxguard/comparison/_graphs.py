"""Compares the captured graphs of two models: every operation that both have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fxguard.batch.kept_run import versions_of
from fxguard.comparison._aligned import Aligned
from fxguard.comparison._arguments import Arguments
from fxguard.comparison._beside import Beside
from fxguard.comparison._culprits import first_alone
from fxguard.comparison._judged import Judge
from fxguard.comparison._recorded import Recorded, nodes_of, recorded
from fxguard.comparison._rounding import apart, beyond, unit_of
from fxguard.comparison._runs import ModelRun, unchanged
from fxguard.comparison._sides import Key, Named, placeholders, standing
from fxguard.comparison.elements import Compared
from fxguard.graph.operations import read_node
from fxguard.graph.wide_form import NotJudged, is_float
from fxguard.passes.unmark import without_marks
from fxguard.rerun.start import Start

__all__ = ["Graphs", "compare_graphs"]


@dataclass(slots=True)
class Graphs:
    """The result of comparing graphs."""

    found: list[Compared] = field(default_factory=list)  # in order of execution
    # Positions in ``found`` of what is another program in B, at an operation that does not read the
    # same in both, with that operation; or of shapes that differ. Only what the models return tells
    # whether the models were written in two ways or compute different things.
    suspects: dict[int, Key | None] = field(default_factory=dict)
    misshapen: dict[int, str] = field(default_factory=dict)  # positions, and how shapes differ
    # Positions of operations that are the first to read a weight that is not A's, with the
    # operation of B.
    reweighed: dict[int, Key] = field(default_factory=dict)
    not_compared: dict[str, str] = field(default_factory=dict)  # what, and why
    only_in_a: list[str] = field(default_factory=list)  # titles
    only_in_b: list[str] = field(default_factory=list)
    # A's value for each argument of each graph of B that was compared.
    arguments: list[list[Any]] = field(default_factory=list)

    def leave(self, found: list[Compared], both: Aligned) -> None:
        """Keep what turned out to be one operation in both models, and list the others."""
        self.found = found
        if not self.arguments:  # nothing is known of the operations of one model
            return
        self.only_in_a = _alone_in(both.a.named, both.of_a)
        self.only_in_b = _alone_in(both.b.named, both.of_b)


def compare_graphs(
    a: ModelRun,
    b: ModelRun,
    both: Aligned,
    known: Arguments,
    judge: Judge,
    form_of: type[Beside] = Beside,
) -> Graphs:
    """Compare all operations of two models.

    Args:
        a: a model that has run.
        b: likewise.
        both: their operations.
        known: what A has for what B's graphs read.
        judge: compares an operation.
        form_of: the second form of B's graphs.
    """
    graphs = Graphs()
    if not a.runs or not b.runs:
        side = "A" if not a.runs else "B"
        graphs.not_compared["operations"] = f"no graph of {side} was captured"
        return graphs
    changed = [each for each in (*a.runs, *b.runs) if not unchanged(each)]
    if changed:
        why = "an input of a captured graph was written after it had run"
        graphs.not_compared["operations"] = why
        return graphs
    try:
        kept = _recorded(a, form_of.whole_functions)
        form = form_of(kept, both, judge)
        for number in range(len(b.runs)):
            _compare_graph(number, b, known, form, graphs)
    except NotJudged as reason:
        graphs.not_compared["the operations that follow"] = str(reason)
    graphs.not_compared |= form.not_compared
    graphs.found += form.found
    graphs.suspects |= form.suspects
    graphs.misshapen |= form.misshapen
    graphs.reweighed |= form.reweighed
    if not any(each.is_significant for each in graphs.found):
        for alone in _outputs(both, kept, b, form.returned):
            graphs.suspects[len(graphs.found)] = None
            graphs.found.append(alone)
    return graphs


def _recorded(a: ModelRun, whole_functions: bool) -> list[Recorded]:
    """Run the graphs of A again, each on what the second runs of earlier graphs returned.

    The two runs may differ by roundings: the choice of kernels depends on whether gradients are
    wanted.
    """
    again: dict[int, Any] = {}  # by the identity of what the first runs returned
    found = []
    for each in a.runs:
        assert each.run.args is not None
        args = tuple(again.get(id(x), x) for x in each.run.args)
        found.append(recorded(replace(each.run, args=args), whole_functions=whole_functions))
        outputs = zip(each.outputs, each.output_versions, found[-1].outputs, strict=True)
        for output, version, other in outputs:
            if is_float(output) and versions_of([output]) == (version,):
                again[id(output)] = other
    return found


def _alone_in(named: Any, paired: Any) -> list[str]:
    return [each.title for key, each in named.items() if key not in paired and each.is_step]


def _compare_graph(
    number: int,
    b: ModelRun,
    known: Arguments,
    form: Beside,
    graphs: Graphs,
) -> None:
    """Run one graph of B, and each of its operations also on A's operands."""
    run = b.runs[number].run
    module = without_marks(run.graph_module)
    arguments = known.of(number, form.returned)
    graphs.arguments.append(arguments)
    writes = any(read_node(node, owner).written for _, node, owner in nodes_of(module))
    names = placeholders(run)
    weights = {names[position]: name for position, name in standing(run).items()}
    form.differing |= known.differing
    form.begin(number, weights, writes=writes)

    def second(low: list[Any]) -> list[Any]:
        return [
            x.detach().clone() if writes and isinstance(x, Tensor) and x is not y else x
            for x, y in zip(arguments, low, strict=True)
        ]

    form.returned.append(list(Start(run).again(form, others=second)[1]))


def _outputs(
    both: Aligned, kept: list[Recorded], b: ModelRun, returned: list[list[Any]]
) -> Iterator[Compared]:
    """What operations of only one model changed right before the last graph returned."""
    if len(returned) != len(b.runs) or len(returned[-1]) != len(kept[-1].outputs):
        return
    if not (both.a.is_whole and both.b.is_whole):  # what ran between graphs is in both, perhaps
        return
    last_a, last_b = len(kept) - 1, len(returned) - 1
    graphs = kept[-1].run.graph_module.graph, b.runs[-1].run.graph_module.graph
    output_a, output_b = (next(n for n in g.nodes if n.op == "output") for g in graphs)
    for a, other in zip(kept[-1].outputs, returned[-1], strict=True):
        if not is_float(a) or not is_float(other):
            continue
        if a.shape == other.shape and not beyond(a, other, unit_of(a), rounded=unit_of(a)):
            continue
        for node, graph, side_of, paired, side in (
            (output_b, last_b, both.b, both.of_b, "B"),
            (output_a, last_a, both.a, both.of_a, "A"),
        ):
            alone = first_alone(node, graph, (), side_of, paired)
            if alone is not None:
                yield _alone(alone, side, a, other)
                return


def _alone(alone: Named, side: Any, a: Tensor, b: Tensor) -> Compared:
    gap = apart(a, b) if a.shape == b.shape else None
    return Compared(
        alone.title,
        kind=alone.kind,
        module=alone.module,
        source=alone.source,
        own=gap,
        total=gap,
        only_in=side,
        reason=f"{side} alone has it, and the graph then returns other values",
    )
