"""Autograd functions outside every graph: what comes into their backward, and what comes out of it.

No mode sees them applied, so they are on no tape. What they made is: it has their node of autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxguard.batch.autograd_nodes import function_of, functions_behind, metadata_of
from fxguard.batch.frames import row_with
from fxguard.graph.source_lines import source_of_method
from fxguard.measure import eager, traceable
from fxguard.measure.at_hand import dtype_of, own_arithmetic
from fxguard.measure.func_levels import has_levels
from fxguard.records import GRADIENT, Row, Source

__all__ = ["FunctionHook", "KeptFunction", "keep_functions"]

HEARD = "fxguard.heard"  # in the metadata of nodes, with who listens to them


@dataclass(slots=True, eq=False)
class KeptFunction:
    """One application of a function, in the backward that runs now."""

    kind: type[torch.autograd.Function]
    batch_number: int
    # Label, numbers and dtype of each gradient; nobody has waited for the numbers yet.
    incoming: list[tuple[str, eager.Pair, str]] = field(default_factory=list)
    handed_back: list[tuple[str, eager.Pair, str]] = field(default_factory=list)

    @property
    def source(self) -> Source | None:
        """Where its backward is written."""
        return source_of_method(self.kind.backward)

    def rows(self) -> tuple[list[Row], list[Row]]:
        """Of the gradients that came in, and of those that it handed back."""
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
    """Listen to the functions that have made a tensor, if any.

    Args:
        tensor: that has been made of what the model returned, or between its graphs.
        batch_number: of that batch.
        arrived: called in the backward, when a function has handed gradients back.

    Yields:
        The nodes of those that it did not listen to before.
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
    """A hook of autograd's that runs when a function has handed gradients back."""

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
