"""Dropout that still drops in evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import Module

from fxguard.batch.events import GraphRun
from fxguard.graph.operations import name_of
from fxguard.plan.plan import Plan
from fxguard.quiet._modes import DROPOUTS
from fxguard.quiet._training import Training
from fxguard.source.lines import Place, calling_line, source_of_trace

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

    A copy of the trained model, such as one of averaged weights, is looked at in its own mode.

    A call that says ``training=True`` means it, as for Monte Carlo dropout, but not that of an
    ``nn.Dropout`` which ``eval()`` does not reach, because it is in a list.

    Args:
        training: of the model.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self._known: dict[int, tuple[Plan, _Dropped | None]] = {}

    def called(self, model: Module, runs: Sequence[GraphRun]) -> None:
        """Called when the model has run, in evaluation mode itself."""
        for run in runs:
            plan, found = self._known.get(id(run.plan), (None, None))
            if plan is not run.plan:
                found = _dropped_in(run.graph_module) if run.plan.random else None
                self._known[id(run.plan)] = run.plan, found
            if found is not None and not any(each.training for each in model.modules()):
                self.training.found(
                    "dropout in evaluation",
                    f"{found.what} drops while the whole model is in eval()",
                    place=found.place,
                    evidence=found.evidence,
                    advice=found.advice,
                )

    def copy_called(self, model: Module, others: Iterable[tuple[Module, int]]) -> None:
        """Called when a model has run in training mode.

        Args:
            model: it.
            others: all models, with the steps that an optimizer has made of each.
        """
        if torch.is_grad_enabled() or any(x.requires_grad for x in model.parameters()):
            return
        original = next(
            (
                other
                for other, steps in others
                if steps and other is not model and not other.training and _is_copy(model, other)
            ),
            None,
        )
        drops = [x for x in model.modules() if isinstance(x, DROPOUTS) and x.p > 0]
        if original is None or not drops:
            return
        count = f"{len(drops)} layer{'s' if len(drops) > 1 else ''} of dropout"
        self.training.found(
            "dropout in evaluation",
            "a copy of the trained model drops while the trained model is in eval()",
            place=calling_line(),
            evidence=f"the copy is in train(), with {count}; it is not trained, and runs under "
            "no_grad",
            advice="call eval() on the copy that is evaluated",
        )


def _is_copy(model: Module, other: Module) -> bool:
    if type(model) is not type(other):
        return False
    shapes = [{name: x.shape for name, x in each.named_parameters()} for each in (model, other)]
    return shapes[0] == shapes[1]


@dataclass(frozen=True, slots=True)
class _Dropped:
    """What drops in a graph."""

    what: str
    evidence: str
    advice: str
    place: Place | None


def _dropped_in(module: GraphModule) -> _Dropped | None:
    """The first dropout in a graph that nobody has told to drop in evaluation."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        kind = name_of(node.target)
        source = source_of_trace(node.meta.get("stack_trace"))
        place = None if source is None else (source.file, source.line)
        unsaid = "the call does not say whether the model trains"
        if kind in DROPS and _share(node, 1, "p", 0.5) > 0:
            if _is_of_module(node):
                if node.args[2:3] == (True,) or node.kwargs.get("training") is True:
                    evidence = "it is no submodule of the model, so eval() does not reach it"
                    advice = "keep it as an attribute or in nn.ModuleList"
                    return _Dropped("nn.Dropout", evidence, advice, place)
            elif len(node.args) < 3 and "training" not in node.kwargs:
                advice = "pass training=self.training, or use nn.Dropout"
                return _Dropped(kind, unsaid, advice, place)
        if kind == ATTENTION and _share(node, 4, "dropout_p") > 0:
            advice = "pass dropout_p=p if self.training else 0.0"
            return _Dropped(kind, unsaid, advice, place)
    return None


def _is_of_module(node: Node) -> bool:
    """Whether a module of dropout has made a call."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return bool(stack) and isinstance(stack[-1][1], type) and issubclass(stack[-1][1], DROPOUTS)


def _share(node: Node, position: int, name: str, default: Any = 0.0) -> float:
    given = node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
    return float(given) if isinstance(given, (int, float)) else 0.0
