"""Runs of a model in another dtype, as many as needed, each from the same start."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn import Module

from fxguard.capture.keeping import Keeping
from fxguard.errors import UsageError
from fxguard.graph.random_state import random_state_kept
from fxguard.graph.wide_form import converted, is_float
from fxguard.guard.guard import Guard
from fxguard.guard.instrument import remove
from fxguard.guard.instrumented import find_guard
from fxguard.guard.keeper import Keeper
from fxguard.guard.options import Options
from fxguard.guard.plugins import Plugins
from fxguard.measure.at_hand import name_of_dtype
from fxguard.precision._graphs import Graphs
from fxguard.rerun.differences import relative_error

__all__ = ["Trials"]


class Trials:
    """A copy of a model in a dtype, and what it is given.

    Args:
        model: in its own dtype.
        args: what it is given.
        kwargs: likewise.
        dtype: the other one.

    Attributes:
        runs: how often the model or its copy has run.
    """

    def __init__(
        self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
    ) -> None:
        self.model = model
        self.dtype = dtype
        self.runs = 0
        self.given = (args, kwargs)
        low = copy.deepcopy(model)
        if find_guard(low) is not None:
            remove(low)
        self.low = low.to(dtype)
        self.outputs: list[Tensor] = []  # of the copy as it is
        self.repaired: list[Tensor] = []  # the same, where nothing of it fails
        self.wanted: list[Tensor | None] = []  # the same in float64
        self.keeping = Keeping(())
        self.keeper = Keeper(self.low, self.keeping)
        self._buffers = {name: x.clone() for name, x in self.low.named_buffers()}

    def forecast(self) -> tuple[Graphs, int]:
        """Run the copy as it is.

        Returns:
            What was found, and how many operations ran between graphs.

        Raises:
            FxguardError: where it does not run, or nothing of it was captured.
        """
        graphs, outputs, between = self.judged()
        if not graphs.operations:
            raise UsageError(
                "there is nothing to forecast: TorchDynamo captured no operation of this "
                f"{type(self.model).__name__}"
            )
        found = [graphs.reference_of(output) for output in outputs]
        self.wanted = [None if pair is None else pair[0] for pair in found]
        self.outputs = outputs
        pairs = zip(outputs, found, strict=True)
        self.repaired = [output if pair is None else pair[1] for output, pair in pairs]
        return graphs, between

    def judged(self, globs: Collection[str] = ()) -> tuple[Graphs, list[Tensor], int]:
        """Run the copy with operations kept in float32, and look at each operation.

        Args:
            globs: which ones.

        Returns:
            What was found, what the model returned, how many operations ran between graphs.
        """
        given = self._start()
        graphs = Graphs(_tensors_of(self.model), _pairs(given, self.given))
        options = Options(on_detect=lambda report: None, backward=False)
        guard = Guard(self.low, options, Plugins(hear=graphs.hear))
        guard.captures.keep(Keeping(tuple(globs)))
        guard.install()
        try:
            outputs = self._run(self.low, given)
        finally:
            guard.uninstall()
        return graphs, outputs, guard.counted().between

    def error(self, globs: Collection[str]) -> float:
        """How far the outputs are from those in float64, where operations are kept in float32.

        Args:
            globs: which ones.

        Returns:
            The largest error of an output, relative to its largest magnitude; inf where one is not
            finite and should be.
        """
        self.keeping.globs = tuple(globs)
        self.keeper.install()
        try:
            return self.distance(self._run(self.low, self._start()))
        finally:
            self.keeper.put_away()

    def error_wide(self) -> float:
        """The same of the model in its own dtype."""
        with torch.no_grad(), random_state_kept(self.given):
            model = copy.deepcopy(self.model)  # whose buffers may be written
            if find_guard(model) is not None:
                remove(model)
            given = pytree.tree_map_only(Tensor, torch.clone, self.given)
            outputs = self._run(model, given)
        self.wanted = [  # the reference took over what the dtype has spoiled, where it had to
            output if wanted is None or _is_worse(wanted, output) else wanted
            for wanted, output in zip(self.wanted, outputs, strict=True)
        ]
        return self.distance(outputs)

    def distance(self, outputs: list[Tensor]) -> float:
        """How far outputs are from those in float64."""
        pairs = zip(outputs, self.wanted, strict=True)
        errors = (
            relative_error(output, wanted.to(torch.float64))
            for output, wanted in pairs
            if wanted is not None
        )
        return max(errors, default=math.nan)

    def _start(self) -> Any:
        """Put the copy back to where it began, and give what it is given."""
        with torch.no_grad():
            for name, buffer in self.low.named_buffers():
                if name in self._buffers:
                    buffer.copy_(self._buffers[name])
        return pytree.tree_map(  # the model may write what it is given
            lambda x: x.clone() if isinstance(x, Tensor) else x, converted(self.given, self.dtype)
        )

    def _run(self, model: Module, given: Any) -> list[Tensor]:
        self.runs += 1
        with torch.no_grad(), random_state_kept(given):
            try:
                output = model(*given[0], **given[1])
            except RuntimeError as error:
                name, dtype = type(self.model).__name__, name_of_dtype(self.dtype)
                raise UsageError(f"{name} does not run in {dtype}: {error}") from error
        return [x for x in pytree.tree_leaves(output) if is_float(x)]


def _is_worse(one: Tensor, other: Tensor) -> bool:
    return int(one.isfinite().sum()) < int(other.isfinite().sum())


def _tensors_of(model: Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _pairs(low: Any, given: Any) -> list[tuple[Tensor, Tensor]]:
    """Each floating-point tensor of the inputs, in the dtype and as it was given."""
    leaves = zip(pytree.tree_leaves(low), pytree.tree_leaves(given), strict=True)
    return [pair for pair in leaves if is_float(pair[0])]
