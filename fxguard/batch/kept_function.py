"""Autograd functions outside every graph: the gradients into and out of their backward.

No mode sees them applied, so they are on no tape. Their results are, with the autograd node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxguard.batch.autograd_nodes import function_of, functions_behind, metadata_of
from fxguard.batch.frames import row_with
from fxguard.measure import eager, traceable
from fxguard.measure.at_hand import dtype_of, own_arithmetic
from fxguard.measure.func_levels import has_levels
from fxguard.records import GRADIENT, Row, Source
from fxguard.source.lines import source_of_method

__all__ = ["FunctionHook", "KeptFunction", "keep_functions"]

HEARD = "fxguard.heard"  # key in the metadata of nodes, for their listener


@dataclass(slots=True, eq=False)
class KeptFunction:
    """One application of a function in the backward that is running."""

    kind: type[torch.autograd.Function]
    batch_number: int
    # Label, numbers and dtype of each gradient; the numbers may still be on their way.
    incoming: list[tuple[str, eager.Pair, str]] = field(default_factory=list)
    handed_back: list[tuple[str, eager.Pair, str]] = field(default_factory=list)

    @property
    def source(self) -> Source | None:
        """The source line of its backward."""
        return source_of_method(self.kind.backward)

    def rows(self) -> tuple[list[Row], list[Row]]:
        """The rows of the incoming gradients, and of the returned ones."""
        incoming, handed_back = (
            [
                row_with(label, traceable.decode(float(low), float(high)), dtype)
                for label, (low, high), dtype in measured
            ]
            for measured in (self.incoming, self.handed_back)
        )
        return incoming, handed_back


def keep_functions(
    tensor: Tensor, batch_number: int, arrived: Callable[[KeptFunction], object]
) -> Iterator[Any]:
    """Listen to the functions that made a tensor, if any.

    Args:
        tensor: computed from outputs of the model, or between its graphs.
        batch_number: number of the batch.
        arrived: called in the backward when a function has returned gradients.

    Yields:
        The nodes of functions that were not listened to before.
    """
    for node in functions_behind(tensor.grad_fn):
        kind, metadata = function_of(node), metadata_of(node)
        if kind is not None and (HEARD, arrived) not in metadata:
            metadata[HEARD, arrived] = True
            kept = KeptFunction(kind, batch_number)
            node.register_hook(FunctionHook(kept, arrived))
            yield node


@dataclass(slots=True, eq=False)
class FunctionHook:
    """An autograd hook that runs when a function has returned gradients."""

    kept: KeptFunction
    arrived: Callable[[KeptFunction], object]

    def __call__(
        self, handed_back: Sequence[Tensor | None], incoming: Sequence[Tensor | None]
    ) -> None:
        if torch.compiler.is_compiling():  # compiled autograd: the hook is not to be traced
            return
        with own_arithmetic():
            self.kept.incoming = list(_measured("output", incoming))
            self.kept.handed_back = list(_measured("input", handed_back))
        self.arrived(self.kept)


def _measured(
    what: str, gradients: Sequence[Tensor | None]
) -> Iterator[tuple[str, eager.Pair, str]]:
    for position, gradient in enumerate(gradients):
        if gradient is None or has_levels(gradient):
            continue
        is_only = what == "output" and len(gradients) == 1
        label = what if is_only else f"{what}[{position}]"
        yield GRADIENT + label, eager.abs_min_max(gradient), dtype_of(gradient)
