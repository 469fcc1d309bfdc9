"""The worked example of docs/how-it-works.md: one RMSNorm that overflows, from graph to verdict.

    python docs/worked_example.py            # prints every section
    python docs/worked_example.py --write    # and puts each into the page, under its marker

Runs on a CPU in seconds. tests/repository/test_worked_example.py holds the page against it.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fxguard
from fxguard.plan.plan import RowPlan

PAGE = Path(__file__).with_name("how-it-works.md")
# The text block that follows a marker is the section of that name.
SECTION = re.compile(r"(<!-- worked example: (\w+) -->\n```\w+\n)(.*?)(^```$)", re.DOTALL | re.M)


class RMSNorm(torch.nn.Module):
    """Root mean square layer normalization, as it is often written."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean_square = x.square().mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(mean_square + 1e-6)


class Model(torch.nn.Module):
    """The norm with a linear layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(4)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


class InnerBackend:
    """A compiler that compiles nothing, and keeps the graph that it is handed and its last run."""

    def __call__(self, graph_module: GraphModule, example_inputs: list[Any]) -> Any:
        self.graph_module = graph_module
        return self.run

    def run(self, *args: Any) -> Any:
        self.output = self.graph_module(*args)
        return self.output


def graph_text(graph_module: GraphModule) -> Iterator[str]:
    """One line for each node: its name, and the call that makes it. Long lines are wrapped."""
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            yield f"{node.name} = placeholder"
        elif node.op == "output":
            yield f"return {written(node.args[0])}"
        else:
            arguments = [*map(written, node.args)]
            arguments += [f"{name}={written(value)}" for name, value in node.kwargs.items()]
            if node.op == "call_method":
                called = f"{arguments.pop(0)}.{node.target}"
            else:
                called = node.target.__name__
            line = f"{node.name} = {called}({', '.join(arguments)})"
            yield from textwrap.wrap(line, width=96, subsequent_indent="    ")


def written(argument: Any) -> str:
    """An argument of a node: nodes by name, lists and tuples entered."""
    if isinstance(argument, Node):
        return argument.name
    if isinstance(argument, (list, tuple)):
        return f"({', '.join(map(written, argument))})"
    return repr(argument)


def plan_text(plan: fxguard.types.Plan) -> Iterator[str]:
    """The Plan, a line for each value, step, frame and check."""
    yield "values"
    for index, value in enumerate(plan.values):
        slot = "no row" if value.slot is None else f"row {value.slot}"
        yield f"  {index:>2}  {value.role.value:<6}  {value.name:<11}  {value.dtype}  {slot}"
    yield "steps"
    for step in plan.steps:
        place = "" if step.source is None else step.source.place
        reads = f"reads {', '.join(map(str, step.inputs))}"
        makes = f"makes {', '.join(map(str, step.outputs))}"
        yield f"  {step.kind:<6}  in {step.module}  {reads:<14} {makes:<8}  {place}"
    yield "frames"
    for frame in plan.frames:
        title = f"{frame.name} {frame.kind}".strip()
        yield f"  {title:<12}  {', '.join(map(row_text, frame.rows))}"
    yield "checks"
    for number, check in enumerate(plan.checks):
        yield f"  row {number}: {check.node}, after {check.after}"


def row_text(row: RowPlan) -> str:
    """``output = 2``: the label, and the index of the value."""
    return f"{row.label} = {row.value}"


def frames_text(frames: list[fxguard.types.Frame]) -> Iterator[str]:
    """Every frame of a batch, with its ranges."""
    for frame in frames:
        yield frame.title
        for row in frame.rows:
            yield f"  {row.abs_min:8.2e} {row.abs_max:8.2e} {row.label}"


def sections() -> dict[str, str]:
    """Name of each section to its text."""
    torch.manual_seed(0)
    model = Model().half()
    x = torch.tensor([[1.0, 2.0, 3.0, 400.0]], dtype=torch.float16)
    inner = InnerBackend()

    reports: list[fxguard.types.Report] = []
    guarded = fxguard.instrument(model, on_detect=reports.append)
    compiled = torch.compile(guarded, backend=inner)
    output = compiled(x)
    guard = fxguard.guard_of(model)
    texts: dict[str, Iterable[str]] = {
        "model": [inspect.getsource(RMSNorm), "", inspect.getsource(Model).rstrip()],
        "graph": graph_text(next(iter(guard.captures.graphs()))[0]),
        "plan": plan_text(guard.plans[0]),
        "checked": graph_text(inner.graph_module),
        "statistics": (
            f"row {row}: {low:8.2e} {high:8.2e}"
            for row, (low, high) in enumerate(inner.output[-1].tolist())
        ),
        "frames": frames_text(guard.frames()),
        "output": [str([round(number, 3) for number in output.flatten().tolist()])],
        "report": [str(reports[0])],
    }
    return {name: "\n".join(lines) + "\n" for name, lines in texts.items()}


def with_sections(page: str, found: dict[str, str]) -> str:
    """The page with the text of each section under its marker."""
    return SECTION.sub(lambda block: block[1] + found[block[2]] + block[4], page)


def main() -> None:
    """Print every section, and write the page where that is asked for."""
    found = sections()
    for name, text in found.items():
        print(f"== {name} ==\n{text}")
    if "--write" in sys.argv[1:]:
        PAGE.write_text(with_sections(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
