"""Dropout that still drops in evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch.nn.functional
from torch.fx import GraphModule, Node
from torch.nn import Module

from fxguard.batch.events import GraphRun
from fxguard.graph.operations import name_of
from fxguard.plan.plan import Plan
from fxguard.quiet._training import Training
from fxguard.source.lines import Place, source_of_trace

__all__ = ["DropoutInEvaluation"]

# Those of torch.nn.functional that drop unless they are told not to.
DROPS = frozenset(
    name
    for name in (
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_alpha_dropout",
    )
    if inspect.signature(getattr(torch.nn.functional, name)).parameters["training"].default is True
)
ATTENTION = "scaled_dot_product_attention"


class DropoutInEvaluation:
    """Looks at graphs that run while every module of the model is in evaluation mode.

    A call that says ``training=True`` means it, as for Monte Carlo dropout.

    Args:
        training: of the model.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self._known: dict[int, tuple[Plan, tuple[str, Place | None] | None]] = {}

    def called(self, model: Module, runs: Sequence[GraphRun]) -> None:
        """Called when the model has run, in evaluation mode itself."""
        for run in runs:
            plan, found = self._known.get(id(run.plan), (None, None))
            if plan is not run.plan:
                found = _dropped_in(run.graph_module) if run.plan.random else None
                self._known[id(run.plan)] = run.plan, found
            if found is not None and not any(each.training for each in model.modules()):
                kind, place = found
                self.training.found(
                    "dropout in evaluation",
                    f"{kind} drops while the whole model is in eval()",
                    place=place,
                    evidence="the call does not say whether the model trains",
                    advice="pass dropout_p=p if self.training else 0.0"
                    if kind == ATTENTION
                    else "pass training=self.training, or use nn.Dropout",
                )


def _dropped_in(module: GraphModule) -> tuple[str, Place | None] | None:
    """The first dropout in a graph that nobody has told to drop in evaluation, and its line."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        kind = name_of(node.target)
        if (kind in DROPS and _drops(node)) or (kind == ATTENTION and _share(node, 4, "dropout_p")):
            source = source_of_trace(node.meta.get("stack_trace"))
            return kind, None if source is None else (source.file, source.line)
    return None


def _drops(node: Node) -> bool:
    """Whether a call leaves its argument ``training`` at the default."""
    is_said = len(node.args) > 2 or "training" in node.kwargs
    return not is_said and _share(node, 1, "p", 0.5) > 0


def _share(node: Node, position: int, name: str, default: Any = 0.0) -> float:
    given = node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
    return float(given) if isinstance(given, (int, float)) else 0.0
