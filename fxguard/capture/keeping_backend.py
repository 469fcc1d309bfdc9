"""Turns a captured graph into one that keeps operations in float32, without checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from torch._dynamo.backends.registry import lookup_backend
from torch.fx import GraphModule

from fxguard.capture import dynamo
from fxguard.capture.float32_weights import Float32Weights
from fxguard.capture.keeping import Keeping
from fxguard.capture.try_blocks import leave_try_blocks
from fxguard.graph.torch_settings import changes_settings, settings_now
from fxguard.passes.checkpointing import with_repeatable_checkpoints
from fxguard.passes.unmark import without_marks
from fxguard.plan.plan import Plan
from fxguard.plan.reader import make_plan
from fxguard.records import Role
from fxguard.torch_names import DisableTorchFunction

__all__ = ["KeepingBackend"]


class KeepingBackend:
    """A TorchDynamo backend around another one, whose graphs check nothing.

    If no compiler follows and the globs of ``keeping`` are replaced, graphs are rewritten at their
    next run without a new capture by TorchDynamo.

    Args:
        inner: the name of a backend, or a backend.
        keeping: the operations to keep.
        names: ``id(module)`` to qualified name.
        tensors: ``id(parameter or buffer)`` to its role and its qualified name.
        refresh: brings both up to date; called before a graph is read.
        weights_stay: whether weights exist between two runs.
        follows_python: whether nobody asked for a compiler.
    """

    def __init__(
        self,
        inner: str | dynamo.Backend,
        keeping: Keeping,
        names: Mapping[int, str],
        tensors: Mapping[int, tuple[Role, str]],
        refresh: Callable[[], None],
        *,
        weights_stay: bool = True,
        follows_python: bool = False,
    ) -> None:
        self.inner: dynamo.Backend = lookup_backend(inner) if isinstance(inner, str) else inner
        self.is_eager = self.inner is lookup_backend("eager")
        self.keeping = keeping
        self.names = names
        self.tensors = tensors
        self.refresh = refresh
        self.weights_stay = weights_stay
        self.follows_python = follows_python
        self.left: set[CodeType] = set()  # functions that were left to Python

    def __call__(self, graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        if self.follows_python:
            leave_try_blocks(graph_module)
        self.refresh()
        dynamo.let_backend_fail(graph_module)
        with DisableTorchFunction():
            arguments = {
                position: self.tensors[id(example)]
                for position, example in enumerate(example_inputs)
                if id(example) in self.tensors
            }
            plan = make_plan(graph_module, self.names, arguments, has_marks=False)
        restores = self.follows_python and changes_settings(graph_module)
        globs = self.keeping.globs
        kept = self.keeping.kept_of(graph_module, plan)
        compiled, weights = self.compiled(graph_module, plan, example_inputs)

        def run(*args: Any) -> Any:
            nonlocal compiled, weights, globs, kept
            if self.is_eager and globs is not self.keeping.globs:
                globs, before = self.keeping.globs, kept
                kept = self.keeping.kept_of(graph_module, plan)
                if kept != before:
                    compiled, weights = self.compiled(graph_module, plan, args)
            restore = settings_now() if restores else None
            try:
                return compiled(*args, *weights.of(args))
            except Exception:
                if restore is not None:
                    restore()
                raise

        return run

    def compiled(
        self, graph_module: GraphModule, plan: Plan, example_inputs: Any
    ) -> tuple[Callable[..., Any], Float32Weights]:
        """A function that runs a graph, and one that gives its extra inputs."""
        with DisableTorchFunction():
            rewritten, weights = self.keeping.rewritten(
                graph_module, plan, weights_stay=self.weights_stay
            )
            if self.is_eager:
                rewritten = with_repeatable_checkpoints(without_marks(rewritten))
            given = [*example_inputs, *weights.of(example_inputs)]
        return self.inner(rewritten, given), weights
