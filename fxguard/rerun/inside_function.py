"""Finds the operation of an autograd function's own backward that made a bad gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fxguard.graph.autograd_functions import BACKWARD, FORWARD, is_function
from fxguard.graph.closer_look import evidence_alone
from fxguard.graph.evidence import Evidence
from fxguard.graph.nodes import leaves
from fxguard.graph.operations import read_node
from fxguard.graph.wide_form import Ran, is_float
from fxguard.records import Source
from fxguard.rerun.edges import Look
from fxguard.source.lines import source_of_trace

__all__ = ["Inside", "inside_of", "is_random"]


@dataclass(frozen=True, slots=True)
class Inside:
    """An operation in the backward of a function."""

    source: Source | None
    evidence: Evidence


def is_random(ran: Ran) -> bool:
    """Whether an operation draws random numbers, so that it cannot be repeated."""
    halves = (ran.args[half] for half in (FORWARD, BACKWARD)) if is_function(ran.target) else ()
    nodes = (node for half in halves for node in half.graph.nodes)
    called = (node for node in nodes if node.op in ("call_function", "call_method"))
    return ran.call.random or any(read_node(node).random for node in called)


def inside_of(look: Look) -> Inside | None:
    """The operation that made something bad from good operands, on the way to a bad gradient.

    Args:
        look: the look at a function whose backward made a bad gradient.

    Returns:
        None if it is not an autograd function, or was given something bad.
    """
    args = look.seen.args
    if not is_function(look.seen.target):
        return None
    forward, backward = args[FORWARD], args[BACKWARD]
    with torch.no_grad():
        made, saved = Interpreter(forward).run(*args[2:])
        gradients = [look.incoming.get(i, _zeros(x)) for i, x in enumerate(leaves(made))]
        half = _Kept(backward)
        half.run(*gradients, *saved)
    node = half.first_bad()
    if node is None or node.op not in ("call_function", "call_method"):
        return None
    args, kwargs = half.fetch_args_kwargs_from_env(node)
    target: Any = getattr(Tensor, str(node.target)) if node.op == "call_method" else node.target
    call = replace(read_node(node), args=args, kwargs=kwargs)
    with torch.no_grad():
        evidence = None if call.written else evidence_alone(call, target, half.env[node])
    source = source_of_trace(node.meta.get("stack_trace"))
    return None if evidence is None else Inside(source, evidence)


def _zeros(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, Tensor) else None


class _Kept(Interpreter):
    """Runs a graph, and keeps all of its results."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)

    def first_bad(self) -> Node | None:
        """The node where something bad begins that reaches a result; None if nothing is bad."""
        (output,) = self.module.graph.find_nodes(op="output")  # type: ignore[union-attr,operator]
        node: Node | None = output
        bad = self._bad(output.all_input_nodes)
        while bad:
            node = bad[0]
            bad = self._bad(node.all_input_nodes)
        return None if node is output else node

    def _bad(self, nodes: Sequence[Node]) -> list[Node]:
        return [node for node in nodes if any(map(_is_bad, leaves(self.env[node])))]


def _is_bad(value: Any) -> bool:
    return is_float(value) and not bool(value.isfinite().all())
