"""The trials of a model for a forecast: its copy in the dtype, with every operation examined."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fxguard import trees
from fxguard.errors import UsageError
from fxguard.forecasting._graphs import Graphs
from fxguard.graph.wide_form import is_float
from fxguard.in_dtype.trials import Loss, Trials, loss_of, outputs_of, pairs_of, tensors_of

__all__ = ["Examined"]


class Examined(Trials):
    """A copy of a model in a dtype, of which each operation is examined.

    Args:
        model: see :class:`~fxguard.in_dtype.trials.Trials`.
        args: likewise.
        kwargs: likewise.
        dtype: likewise.
        loss: likewise.
        autocast: likewise.
    """

    def __init__(
        self,
        model: Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtype: torch.dtype,
        loss: Loss | None = None,
        *,
        autocast: bool = False,
    ) -> None:
        super().__init__(model, args, kwargs, dtype, loss, autocast=autocast)
        self.dtypes: list[torch.dtype] = []  # dtype of each output of the copy
        self.repaired: list[Tensor] = []  # outputs of the copy with all failures repaired
        self.between = 0  # how many operations ran between graphs
        self.not_judged = False  # whether the float64 run took over results of the copy

    def forecast(self, gradients: Sequence[Tensor | None] | None = None) -> tuple[Graphs, int]:
        """Run the copy without keeping anything in float32.

        Args:
            gradients: gradients of its outputs, if known; else those of the loss are used.

        Returns:
            What was found, and how many operations ran between graphs.

        Raises:
            FxguardError: when it does not run, or nothing of it was captured.
        """
        if gradients is None and self.loss is not None:
            gradients = self._output_gradients()
        graphs, outputs, between = self.judged(keeps_runs=gradients is not None)
        if not graphs.operations:
            raise UsageError(
                "there is nothing to forecast: TorchDynamo captured no operation of this "
                f"{type(self.model).__name__}"
            )
        if gradients is not None:
            pairs = zip(outputs, gradients, strict=True)
            graphs.look_back([(output, x) for output, x in pairs if x is not None])
        self.dtypes = [output.dtype for output in outputs]
        found = [graphs.reference_of(output) for output in outputs]
        self.wanted.outputs = [None if pair is None else pair[0] for pair in found]
        self.between = between
        self.not_judged = bool(between or graphs.found.not_judged)
        self.repaired = [
            output if pair is None else pair[1] for output, pair in zip(outputs, found, strict=True)
        ]
        return graphs, between

    def judged(
        self, globs: Collection[str] = (), *, keeps_runs: bool = False
    ) -> tuple[Graphs, list[Tensor], int]:
        """Run the copy with operations kept in float32, and examine each operation.

        Args:
            globs: which ones.
            keeps_runs: whether the backward is examined afterwards.

        Returns:
            What was found, what the model returned, and how many operations ran between graphs.
        """
        given = self.start()
        graphs = Graphs(
            tensors_of(self.model),
            pairs_of(given, self.given),
            keeps_runs=keeps_runs,
            float8=self.float8,
        )
        output, between = self.heard(given, graphs.hear, globs)
        return graphs, outputs_of(output), between

    def _output_gradients(self) -> list[Tensor | None]:
        """The gradient of the loss with respect to each output, in the model's own dtype."""
        assert self.loss is not None
        output = self._plain_output()
        apart = trees.tree_map(lambda x: x.detach().requires_grad_() if is_float(x) else x, output)
        with torch.enable_grad():
            loss = loss_of(apart, self.loss)
            leaves = [x for x in trees.tree_leaves(apart) if is_float(x)]
            return list(torch.autograd.grad(loss, leaves, allow_unused=True))

    def outputs_beyond(self) -> list[str]:
        """The outputs in the dtype that the dtype cannot hold, whatever is kept."""
        found = []
        for number, (dtype, wanted) in enumerate(
            zip(self.dtypes, self.wanted.outputs, strict=True)
        ):
            if wanted is None or wanted.is_complex() or not wanted.numel():
                continue
            needed = float(wanted.abs().where(wanted.isfinite(), 0).max())
            if needed > torch.finfo(dtype).max:
                found.append(f"output {number}, which needs {needed:.6g}")
        return found
