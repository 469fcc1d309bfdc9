"""Plants one bad element at any operation of a guarded model, and says what has to be blamed.

Captured graphs are rewritten before fxguard plans them: each operation turns into a function of the
same name that runs it and then, where the switch says so, spoils the last element of what it made.
The switch is data, one integer, so that a graph is compiled once for all plantings. Operations
between graphs are replaced likewise, just before fxguard observes them.

What has to be blamed is read from the graph, or from the Python frames that run; no Plan is asked.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os.path
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

import fxguard
from fxguard.batch import observer
from fxguard.capture.backend import CheckingBackend
from fxguard.capture.try_blocks import leave_try_blocks
from fxguard.graph import marks

__all__ = ["ENTERED", "FAULTS", "NOTHING", "Planter", "Site"]

FAULTS = {"nan": math.nan, "inf": math.inf}
NOTHING = -1  # the site of a run without a planting

# Higher-order operations whose bodies are planted too: those that fxguard enters.
ENTERED = frozenset({"tag_activation_checkpoint"})

# The result has every element of the operand and no other: no place for a new bad element.
MOVES = frozenset(
    """
    _reshape_alias _unsafe_view alias clone contiguous detach expand expand_as flatten permute
    reshape squeeze t transpose unflatten unsqueeze view view_as
    """.split()
)
CASTS = frozenset(["_to_copy", "float", "to", "type_as"])  # to the dtype that is there already
READS = frozenset("__get__ __set__ item requires_grad_ size tolist".split())  # make no tensor

# Take or join parts: fxguard measures the result, and shows it in the rows of what reads it.
PARTS = frozenset(
    """
    cat chunk gather getitem index_select masked_select narrow repeat_interleave select slice split
    stack tril triu unbind unfold
    """.split()
)

ADDITIONS = frozenset(["add", "add_", "sub", "sub_"])

METHODS = {
    operator.iadd: "add_",
    operator.isub: "sub_",
    operator.imul: "mul_",
    operator.itruediv: "div_",
}

SWITCH = "planting_switch"  # the buffer of a graph, and the argument of its operations

NOT_THE_MODEL = (os.path.dirname(torch.__file__), os.path.dirname(fxguard.__file__), __file__, "<")
ENTRY = re.compile(r'File "([^"]+)", line (\d+), in ')

Line = tuple[str, int]  # file, line
Path = tuple[int, ...]  # indices, where an operation makes several results


@dataclass
class Site:
    """One floating-point result of one operation: a place for a bad element."""

    kind: str
    module: str
    line: Line | None
    operation: object  # the same for all results of one operation
    infinite_literal: bool
    held: set[str] = field(default_factory=set)  # "nan", "inf", "mask": see Planter.note

    @property
    def has_frame(self) -> bool:
        return self.kind not in PARTS

    def excuse(self, fault: str) -> str | None:
        """Why a fault at this place need not be blamed on the operation."""
        if "nan" in self.held:
            return "that make NaN anyway"
        if fault == "nan":
            return None
        if self.infinite_literal:
            return "given an infinite number"
        if "inf" in self.held:
            return "that make inf anyway"
        if "mask" in self.held and self.kind in ADDITIONS:
            return "that add a mask"
        return None


class Planter:
    """Replaces the operations of one model, and notes each place for a fault."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.sites: list[Site] = []  # in order of execution
        self.operations = 0  # how many there are, those without a site included
        first = next(model.parameters(), None)
        self.switch = torch.tensor(NOTHING, device=None if first is None else first.device)
        self.recording = True  # the first run, which plants nothing
        self.handed_on: list[list[int]] = []  # how bad the outputs of each graph that ran are
        self.without_fault: list[list[int]] = []  # the same of the first run
        self.between: list[int] = []  # sites between graphs, in order of execution
        self.coming: Iterator[int] = iter(())  # those that have not run yet

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """What is captured and observed in the meantime is replaced."""
        capture, observe = CheckingBackend.__call__, observer.observe

        def planted_capture(backend: Any, graph_module: GraphModule, inputs: list[Any]) -> Any:
            if backend.follows_python:
                leave_try_blocks(graph_module)  # then there is no such graph
            self.rewrite(graph_module)
            compiled = capture(backend, graph_module, inputs)

            def run(*args: Any) -> Any:
                if self.recording:
                    run_on_copies(graph_module, args)
                outputs = compiled(*args)
                self.handed_on.append(severities(outputs))
                return outputs

            return run

        def planted_observe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return observe(self.planted_between(func), args, kwargs)

        # To fxguard this function is a frame of the model, unless it is in no file.
        code = planted_observe.__code__.replace(co_filename="<planted>")
        planted_observe.__code__ = code
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CheckingBackend, "__call__", planted_capture)
            patch.setattr(observer, "observe", torch.compiler.disable(planted_observe))
            yield

    def begin(self, site: int, fault: str) -> None:
        """A forward is about to run, with a fault at one site."""
        if self.recording and self.handed_on:
            self.without_fault = self.handed_on
        self.handed_on = []
        self.switch.fill_(NOTHING if site == NOTHING else code_of(site, fault))
        self.recording = self.recording and site == NOTHING
        self.coming = iter(self.between)

    def reached_an_output(self) -> bool:
        """Whether the last fault made an output of a captured graph worse than it is without.

        A graph that the fault kept from running, as an exception does, has no output.
        """
        pairs = zip(self.handed_on, self.without_fault, strict=False)
        return any(now > before for pair in pairs for now, before in zip(*pair, strict=True))

    # Captured graphs.

    def rewrite(self, graph_module: GraphModule) -> None:
        """Replace every operation of a graph, in place."""
        graph = graph_module.graph
        written = {memory_of(operand) for node in graph.nodes for operand in written_by(node)}
        switch = None
        for node in list(graph.nodes):
            bodies = bodies_of(node, graph_module)
            for body in bodies:
                self.rewrite(body)
            if bodies or not is_operation(node):
                continue  # what runs a body makes nothing else
            self.operations += 1
            if name_of(node.target) in PARTS and memory_of(node) in written:
                continue  # later writes through this view would miss a copy of it
            if switch is None:
                switch = self.switch_of(graph_module)
            self.replace(node, switch)
        graph_module.recompile()

    def switch_of(self, graph_module: GraphModule) -> Node:
        """The node that reads the switch."""
        graph_module.register_buffer(SWITCH, self.switch)
        graph = graph_module.graph
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first):
            node = graph.get_attr(SWITCH)
        node.meta["example_value"] = self.switch
        return node

    def replace(self, node: Node, switch: Node) -> None:
        """Turn an operation into one that spoils what it makes."""
        kind = name_of(node.target)
        at: list[tuple[Path, int]] = []
        for path, _ in floats_of(made_by(node)):
            at.append((path, len(self.sites)))
            line = line_of_trace(node.meta.get("stack_trace") or "")
            infinite = has_infinity((node.args, node.kwargs))
            self.sites.append(Site(kind, self.module_of(node), line, node, infinite))
        run = getattr(Tensor, node.target) if node.op == "call_method" else node.target
        node.op, node.target = "call_function", self.planted(run, kind, at, bool(written_by(node)))
        node.kwargs = {**node.kwargs, SWITCH: switch}

    def planted(
        self, run: Any, kind: str, at: list[tuple[Path, int]], in_place: bool
    ) -> Callable[..., Any]:
        """An operation of a graph that spoils what it makes, where the switch says so."""

        def operation(*args: Any, planting_switch: Tensor, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            made = args[0] if result is None else result
            if self.recording and type(planting_switch) is Tensor:
                self.note([site for _, site in at], (args, kwargs), made)
            for path, site in at:
                made = spoiled(made, path, site, planting_switch, in_place)
            return None if result is None else made

        operation.__name__ = kind
        return operation

    def module_of(self, node: Node) -> str:
        """The innermost module call around a node; the root's name where there is none."""
        stack = node.meta.get("nn_module_stack")
        if not stack:  # a graph that begins in the middle, in the module that runs now
            return self.running_module()
        return self.names[int(list(stack)[-1].partition("@")[0])]

    def note(self, sites: list[int], read: Any, made: Any) -> None:
        """Note what an operation made without a planting, and whether it read a mask."""
        held = set()
        for _, tensor in floats_of(made):
            largest = tensor.abs().max()
            held.add("nan" if largest.isnan() else "inf" if largest.isinf() else "")
        for _, tensor in floats_of(read):
            held.add("mask" if tensor.abs().max() == torch.finfo(tensor.dtype).max else "")
        for site in sites:
            self.sites[site].held |= held

    # Between graphs.

    def planted_between(self, func: Any) -> Callable[..., Any]:
        """A torch function that spoils what it makes, where the switch says so."""
        kind = name_of(func)

        def operation(*args: Any, **kwargs: Any) -> Any:
            result = func(*args, **kwargs)
            in_place = writes(kind, kwargs)
            made = args[0] if result is None and in_place else result
            if not makes_floats(kind, args, made) or is_own_arithmetic():
                return result
            paths = [path for path, _ in floats_of(made)]
            if self.recording:
                numbers = self.found_between(kind, paths, args, kwargs)
                self.note(numbers, (args, kwargs), made)
            else:
                numbers = [next(self.coming) for _ in paths]
            for path, site in zip(paths, numbers, strict=True):
                if site == int(self.switch) // len(FAULTS):
                    made = spoiled(made, path, site, self.switch, in_place)
            return None if result is None else made

        operation.__name__ = kind
        return operation

    def found_between(self, kind: str, paths: list[Path], args: Any, kwargs: Any) -> list[int]:
        """Add the sites of an operation that runs between graphs."""
        self.operations += 1
        infinite = has_infinity((args, kwargs))
        module, line, operation = self.running_module(), running_line(), object()
        numbers = list(range(len(self.sites), len(self.sites) + len(paths)))
        self.sites += [Site(kind, module, line, operation, infinite) for _ in paths]
        self.between += numbers
        return numbers

    def running_module(self) -> str:
        """The innermost module call that runs; the root's name where there is none."""
        calls = (frame for frame in running_frames() if frame.f_code.co_name == "_call_impl")
        names = (self.names.get(id(call.f_locals["self"])) for call in calls)
        return next((name for name in names if name is not None), "")


# Values.


def code_of(site: int, fault: str) -> int:
    """The switch's number for a planting."""
    return site * len(FAULTS) + list(FAULTS).index(fault)


def spoiled(made: Any, path: Path, site: int, switch: Tensor, in_place: bool) -> Any:
    """A result whose last element, of the tensor at ``path``, is bad if the switch says so."""
    if path:
        items = list(made)
        items[path[0]] = spoiled(items[path[0]], path[1:], site, switch, in_place)
        return items if isinstance(made, list) else tuple(items)
    if not in_place:
        made = made.clone()
    with torch.no_grad():
        element = made.detach()
        for _ in range(made.dim()):
            element = element.select(0, -1)
        value = element
        for fault, bad in FAULTS.items():
            value = torch.where(switch == code_of(site, fault), bad, value)
        element.copy_(value)
    return made


def floats_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every floating-point tensor that has elements, with the indices that lead to it."""
    for found, tensor in tensors_of(value, path):
        if tensor.is_floating_point() and tensor.numel():
            yield found, tensor


def severities(outputs: Any) -> list[int]:
    """Of each output of a graph: 0 for finite, 1 where it holds an inf, 2 for a NaN."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return [
            2 if tensor.isnan().any() else int(tensor.isinf().any())
            for _, tensor in floats_of(outputs)
        ]


def tensors_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (tuple, list, dict)):
        for index, item in enumerate(value.values() if isinstance(value, dict) else value):
            yield from tensors_of(item, (*path, index))


def has_infinity(value: Any) -> bool:
    """Whether an infinite Python number is among nested arguments."""
    if isinstance(value, (tuple, list, dict)):
        return any(map(has_infinity, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and math.isinf(value)


def run_on_copies(graph_module: GraphModule, args: tuple[Any, ...]) -> None:
    """Run a graph eagerly, for what the operations note, and leave no trace of it."""
    copies = [arg.detach().clone() if isinstance(arg, Tensor) else arg for arg in args]
    with torch._C.DisableTorchFunction(), torch.random.fork_rng(), torch.no_grad():
        graph_module(*copies)


# Operations.


def name_of(target: Any) -> str:
    """What an operation is called."""
    if isinstance(target, str):
        name = target
    elif isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.rpartition("::")[2]
    else:
        name = METHODS.get(target) or target.__name__
    return name if name in READS else name.removeprefix("__").removesuffix("__")


def writes(kind: str, kwargs: dict[str, Any]) -> bool:
    """Whether an operation changes its first operand."""
    in_place = kind.endswith("_") and not kind.endswith("__") and kind not in READS
    return in_place or kind == "setitem" or kwargs.get("inplace") is True


def makes_floats(kind: str, args: Any, made: Any) -> bool:
    """Whether an operation makes floating-point numbers, and does not only move them."""
    if kind in READS or not any(tensor.is_floating_point() for _, tensor in tensors_of(made)):
        return False
    if kind == "getitem" and isinstance(args[0], (tuple, list)):
        return False
    return kind not in MOVES and not (kind in CASTS and args[0].dtype == made.dtype)


def written_by(node: Node) -> list[Node]:
    """The operand that a node changes."""
    called = node.op in ("call_function", "call_method")
    return [node.args[0]] if called and writes(name_of(node.target), node.kwargs) else []


def made_by(node: Node) -> Any:
    """The fake result of a node, or what it changed where it returns nothing."""
    made = node.meta.get("example_value")
    written = written_by(node)
    return written[0].meta.get("example_value") if made is None and written else made


def is_operation(node: Node) -> bool:
    """Whether a node of a captured graph makes floating-point numbers."""
    if node.op not in ("call_function", "call_method"):
        return False
    if node.target in (marks.module_returned, marks.value_named):
        return False
    args = map_arg(node.args, lambda operand: operand.meta.get("example_value"))
    return makes_floats(name_of(node.target), args, made_by(node))


def memory_of(node: Node) -> int | None:
    """What nodes share that are views of one another."""
    for _, tensor in tensors_of(node.meta.get("example_value")):
        return tensor.untyped_storage()._cdata
    return None


def bodies_of(node: Node, graph_module: GraphModule) -> list[GraphModule]:
    """The graphs that a node runs, where they are to be planted."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    if name_of(node.target) not in ENTERED:
        return []
    named = [str(operand.target) for operand in node.all_input_nodes if operand.op == "get_attr"]
    found = [getattr(graph_module, name) for name in named]
    return [body for body in found if isinstance(body, GraphModule)]


# Lines.


def line_of_trace(trace: str) -> Line | None:
    """The innermost line of a stack trace that belongs to the model."""
    own = [entry for entry in ENTRY.findall(trace) if not entry[0].startswith(NOT_THE_MODEL)]
    return (own[-1][0], int(own[-1][1])) if own else None


def running_line() -> Line | None:
    """The innermost running line that belongs to the model."""
    for frame in running_frames():
        if not frame.f_code.co_filename.startswith(NOT_THE_MODEL):
            return frame.f_code.co_filename, frame.f_lineno
    return None


def running_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_own_arithmetic() -> bool:
    """Whether fxguard is measuring, which an observer from below sees too."""
    own = ("fxguard.measure.traceable", "fxguard.graph.closer_look")
    return any(frame.f_globals.get("__name__") in own for frame in running_frames())
