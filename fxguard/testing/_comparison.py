"""Compares one call of a model in two precisions: each graph in turn, then the backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxguard.batch.events import GraphRun
from fxguard.errors import UsageError
from fxguard.graph.outputs import to_differentiate
from fxguard.graph.wide_form import converted, is_float
from fxguard.measure.at_hand import version_of
from fxguard.rerun.start import Start
from fxguard.testing._both_gradients import BothGradients
from fxguard.testing.side_by_side import Deviation, SideBySide

__all__ = ["Comparison"]


class Comparison:
    """Runs each graph again, after it has run, in both precisions.

    Args:
        reference: the precision that the model's precision is compared with.
        backward: whether to also compare gradients.

    Attributes:
        compared: each run of a graph.
    """

    def __init__(self, reference: torch.dtype, backward: bool) -> None:
        self.reference = reference
        self.gradients = BothGradients() if backward else None
        self.compared: list[SideBySide] = []  # one for each run of a graph
        # Tensors that a graph was given or returned, by `id`.
        self.known: dict[int, _Known] = {}
        self.unread: dict[int, _Known] = {}  # returned by a graph and not read by a later one

    def hear(self, run: GraphRun, outputs: Sequence[Any] | None) -> None:
        """Compare one run of a graph after it has returned."""
        if outputs is None:
            return
        both, start = SideBySide(run, self.reference, self.gradients), Start(run)
        if reason := start.why_not():
            raise UsageError(f"there is no run in two precisions: {reason}")
        assert run.args is not None
        pairs = [self.given(*each) for each in zip(run.args, start.copies(), strict=True)]
        with start.alone():
            returned = both.run([low for low, _ in pairs], [wide for _, wide in pairs])
        self.compared.append(both)
        for output, low, wide in zip(outputs, *returned, strict=True):
            if is_float(output):
                known = _Known(output, version_of(output), low, wide)
                self.known[id(output)] = self.unread[id(output)] = known

    def given(self, argument: Any, copy: Any) -> tuple[Any, Any]:
        """An argument of a graph for its second run, and its counterpart in the reference."""
        if not is_float(argument):
            return copy, copy
        known = self.known.get(id(argument))
        if known is None or known.version != version_of(argument):
            known = self.begin(argument)
        else:
            self.unread.pop(id(argument), None)
        low = copy if self.gradients is None else known.low
        # Arguments that are not copies are not written.
        return low if copy is argument else low.clone(), known.wide.clone()

    def begin(self, argument: Tensor) -> _Known:
        """Start the reference from the value of a graph's argument."""
        low, wide = argument.detach(), converted(argument, self.reference)
        if self.gradients is not None and argument.requires_grad:
            self.gradients.add_input(low.requires_grad_(), wide.requires_grad_())
        known = _Known(argument, version_of(argument), low, wide)
        self.known[id(argument)] = known
        return known

    def differentiate(self, output: Any, *, is_cut: bool) -> None:
        """Run the backward in both precisions.

        Args:
            output: what the model returned.
            is_cut: whether operations ran between graphs. No gradient gets past them: the backward
                begins anew at tensors that a graph returned and no graph was given.
        """
        assert self.gradients is not None
        returned = {id(x): self.known.get(id(x)) for x in to_differentiate(output)}
        known = {**returned, **self.unread} if is_cut else returned
        found = [each for each in known.values() if each is not None and each.low.requires_grad]
        if not found:
            raise UsageError("there is nothing to differentiate in what the model returned")
        generator = torch.Generator().manual_seed(0)
        incoming = []
        for each in found:
            gradient = torch.ones(each.low.shape, dtype=each.wide.dtype)
            if each.low.numel() != 1:
                gradient = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
            incoming.append(gradient.to(each.low))
        self.gradients.differentiate(
            [each.low for each in found], [each.wide for each in found], incoming
        )

    def deviations(self) -> Iterator[Deviation]:
        """The deviations of all operations, in order of execution."""
        for both in self.compared:
            yield from both.deviations
        for both in reversed(self.compared):
            yield from both.deviations_of_backward


class _Known(NamedTuple):
    """A tensor that a graph was given or has returned."""

    tensor: Tensor  # the model's; kept alive, so that no other tensor gets its identity
    version: int | None  # how often it had been written
    low: Tensor  # the same in the second run
    wide: Tensor  # the same in the reference
