"""Plants one difference in one of two models: in a weight, or in what an operation makes.

An operation turns into a function of the same name that runs it and then changes what it made, in
the graph that is captured, before fxguard plans it. What has to be found is read from the graph:
the module around the operation, its name, and its number among those of one name.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from fxguard.capture.backend import CheckingBackend
from fxguard.graph import wide_form
from support.planting import CASTS, MOVES, PARTS, is_operation, made_by, name_of, written_by

__all__ = ["FAULTS", "Planted", "copy_with", "planted_in", "weights_to_change", "with_noise"]


def _one_element(x: Tensor) -> Tensor:
    changed = x.detach().clone(memory_format=torch.contiguous_format)
    flat = changed.view(-1)
    flat[flat.numel() // 2] += flat.abs().max()
    return changed


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "permuted": lambda x: x.roll(1, -1),
    "negated": lambda x: -x,
    "scaled": lambda x: x * (1 + 2**-6),
    "one element": _one_element,
}


def with_noise(model: nn.Module) -> nn.Module:
    """No weight is constant: a bias of zeros is the same negated."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.02)
    return model


def weights_to_change(model: nn.Module, fault: str) -> list[str]:
    """The weights that a fault changes."""
    change = FAULTS[fault]
    return [n for n, x in model.named_parameters() if not torch.equal(change(x), x)]


def copy_with(model: nn.Module, name: str, fault: str) -> nn.Module:
    """A copy of a model with a fault in one weight."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        weight = other.get_parameter(name)
        weight.copy_(FAULTS[fault](weight))
    return other


@dataclass
class Planted:
    """One operation of one model that is to make something else."""

    fault: str
    chance: random.Random
    title: str = ""  # of the operation, once its graph was captured
    changed: bool = False  # whether what it made was another
    tried: list[str] = field(default_factory=list)

    def choose(self, backend: Any, graph: Any) -> None:
        """Change one operation of a graph."""
        count: Counter[tuple[str, str]] = Counter()
        sites: list[tuple[str, Node]] = []
        for node in graph.nodes:
            if not is_operation(node):
                continue
            kind, module = name_of(node.target), _module_of(node, backend.names)
            count[module, kind] += 1
            number = count[module, kind]
            title = f"{module} {kind}".strip() + (f" #{number}" if number > 1 else "")
            made = made_by(node)
            is_float = isinstance(made, Tensor) and made.is_floating_point() and made.numel() > 1
            if is_float and kind not in MOVES | PARTS | CASTS and not written_by(node):
                sites.append((title, node))
        if not sites or self.title:
            return
        self.title, node = self.chance.choice(sites)
        run = getattr(Tensor, node.target) if node.op == "call_method" else node.target
        kind = name_of(node.target)
        node.op, node.target = "call_function", self._changing(run, kind)

    def _changing(self, run: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            made = FAULTS[self.fault](result)
            if type(made) is Tensor:  # and no compiler traces it
                self.changed = self.changed or not torch.equal(made, result)
            return made

        operation.__name__ = kind
        return operation


@contextlib.contextmanager
def planted_in(model: nn.Module, planted: Planted) -> Iterator[None]:
    """What is captured of one model in the meantime has a fault in one operation."""
    capture = CheckingBackend.__call__

    def planting(backend: Any, graph_module: Any, inputs: list[Any]) -> Any:
        if any(id(module) in backend.names for module in model.children()):
            planted.choose(backend, graph_module.graph)
            graph_module.recompile()
        return capture(backend, graph_module, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckingBackend, "__call__", planting)
        # What it is made of is torch's own: another program, in float64 too.
        patch.setattr(wide_form, "is_custom", lambda target: False)
        yield


def _module_of(node: Node, names: Any) -> str:
    stack = node.meta.get("nn_module_stack")
    return names[int(list(stack)[-1].partition("@")[0])] if stack else ""
