"""The number that matters: in the model, in the float64 run, and in the one that chooses itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxguard import trees
from fxguard.budget._form import WIDE
from fxguard.budget._graphs import Graphs
from fxguard.errors import UsageError
from fxguard.graph.wide_form import is_float, widened

__all__ = ["Measured", "measured", "numbers_of", "relative"]

PROJECTIONS = 4  # of outputs with several elements


@dataclass(slots=True)
class Measured:
    """The number, in three runs. Tensors are in float64."""

    low: list[Tensor]
    wide: list[Tensor]  # with a gradient
    itself: list[Tensor]
    projections: list[list[Tensor]]  # of each, a tensor of factors for each tensor
    kept: list[int]  # positions of these tensors among all that matter
    name: str  # "the output", "the loss"

    @property
    def size(self) -> float:
        """The sum of the squares of the projections, as of independent elements."""
        return sum(
            float((wide.detach() * factor).nan_to_num(0, 0, 0).abs().square().sum())
            for drawn in self.projections
            for wide, factor in zip(self.wide, drawn, strict=True)
        )

    @property
    def error(self) -> float:
        """The distance from the run that chooses for itself."""
        return relative(self.low, self.itself)

    def true_errors(self) -> list[float]:
        """How far off each projection is, of what is finite."""
        found = []
        for drawn in self.projections:
            pairs = zip(self.low, self.wide, drawn, strict=True)
            gaps = (
                ((low - wide.detach()) * factor).nan_to_num(0, 0, 0) for low, wide, factor in pairs
            )
            found.append(sum(float(gap.real.sum()) for gap in gaps))
        return found


def numbers_of(output: Any, of: Callable[[Any], Any] | None) -> list[Tensor]:
    """The tensors that matter in what a model returned."""
    if of is not None:
        output = of(output)
    elif _has_loss(output):
        output = output.loss
    return [x for x in trees.tree_leaves(output) if is_float(x)]


def _has_loss(output: Any) -> bool:
    return isinstance(getattr(output, "loss", None), Tensor)


def _name_of(output: Any, of: Callable[[Any], Any] | None) -> str:
    if of is None:
        return "the loss" if _has_loss(output) else "the output"
    name = getattr(of, "__name__", "<lambda>")
    return "what `of` gives" if name == "<lambda>" else f"{name}(output)"


def measured(output: Any, graphs: Graphs, of: Callable[[Any], Any] | None) -> Measured:
    """The number that matters in all runs.

    Args:
        output: what the model returned.
        graphs: its graphs.
        of: see :func:`fxguard.budget.budget.error_budget`.

    Raises:
        FxguardError: when no captured graph returned what it is made of.
    """
    known = {
        id(x): pair
        for x in trees.tree_leaves(output)
        if is_float(x) and (pair := graphs.wide_of(x)) is not None
    }

    def number(form: int | None) -> list[Tensor]:
        """The tensors that matter in one run; what no graph returned is that of the model."""

        def other(x: Any) -> Any:
            if not is_float(x) or id(x) not in known or form is None:
                return widened(x, WIDE) if is_float(x) else x
            return known[id(x)][form]

        made = numbers_of(trees.tree_map(other, output), of)
        return [widened(x, WIDE, differentiable=True) for x in made]

    with torch.enable_grad():
        low, wide, itself = number(None), number(0), number(1)
    # Others are no function of what the graphs computed.
    kept = [at for at, x in enumerate(wide) if x.requires_grad]
    if not kept:
        raise UsageError("there is no error budget: no captured graph made what the model returned")
    return Measured(
        [low[at].detach() for at in kept],
        [wide[at] for at in kept],
        [itself[at].detach() for at in kept],
        list(_drawn_for([wide[at] for at in kept])),
        kept,
        _name_of(output, of),
    )


def _drawn_for(wide: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Factors of one number: 1. Of several: drawn from a normal distribution, four times."""
    if sum(x.numel() for x in wide) == 1:
        yield [torch.ones_like(x) for x in wide]
        return
    generator = torch.Generator().manual_seed(0)
    for _ in range(PROJECTIONS):
        yield [torch.randn(x.shape, generator=generator, dtype=WIDE).to(x.device) for x in wide]


def relative(values: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The relative root mean square of the distance; inf where one alone is not finite.

    NaN if it is not known what is wanted.
    """
    if any(bool(want.isnan().all()) for want in wanted if want.numel()):
        return math.nan
    gap = size = 0.0
    for value, want in zip(values, wanted, strict=True):
        if value.shape != want.shape:
            return math.nan
        finite = want.isfinite()
        if not bool((value.isfinite() | ~finite).all()):
            return math.inf
        gap += float((value - want)[finite].abs().square().sum())
        size += float(want[finite].abs().square().sum())
    if not size:
        return math.inf if gap else 0.0
    return math.sqrt(gap / size)
