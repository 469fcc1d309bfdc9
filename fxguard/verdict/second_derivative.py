"""Describes where the gradient of a gradient turned bad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxguard.batch.kept_run import KeptRun
from fxguard.findings import Fix, Origin
from fxguard.forgiving import or_else
from fxguard.graph.poles import plain
from fxguard.rerun.second_derivatives import Steep, steep_operations
from fxguard.source.lines import source_of_trace
from fxguard.source.named import operand_text

__all__ = ["origin_of_second_derivative"]

SMOOTH = {
    "std": "take (var + 1e-8).sqrt() in place of std: an eps behind it changes nothing",
    "pow": "({x} + 1e-6) ** y, or a power of 2 or more",
    "sqrt": "sqrt({x} + 1e-12)",
}


def origin_of_second_derivative(origin: Origin, kept: Sequence[KeptRun]) -> Origin:
    """The origin of bad gradients with the operation that has no second derivative, if there is.

    Args:
        origin: of the leaves.
        kept: graph runs whose gradients were differentiated.

    Returns:
        The same object if every operation of these has a second derivative.
    """
    nothing: list[Steep] = []
    for run in reversed(kept):
        if found := or_else(nothing, steep_operations, run):
            return _told(origin, found[0])
    return origin


def _told(origin: Origin, steep: Steep) -> Origin:
    name, source = plain(steep.kind), source_of_trace(steep.node.meta.get("stack_trace"))
    x = "x" if source is None else operand_text(source.code, name) or "x"
    at = f" at {list(steep.index)}" if steep.index else ""
    place = "" if source is None else f" ({source.place})"
    nth = "second " if steep.order == 2 else ""
    told = (
        f"it is a gradient of a gradient, and {name}{place} has no {nth}derivative{at}, where "
        f"it {'made' if steep.is_of_result else 'read'} {steep.number:.4g}"
    )
    keeps = f"keep what {name} reads away from where it has no {nth}derivative, by an eps"
    fix = Fix("advice", SMOOTH.get(name, keeps).format(x=x))
    return replace(origin, frame=replace(origin.frame, source=source), operands=told, fixes=(fix,))
