"""Draws error against depth: own and inherited error, and the first significant operation.

Knows nothing of torch.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxguard.comparison._result_text import number
from fxguard.comparison.elements import Apart, Compared

__all__ = ["chart"]

WIDTH, HEIGHT = 1080, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 90, 44, 58
LOWEST = 1e-12  # smaller errors are drawn here
SHORT = 46  # characters of a title in the chart
FEW = 80  # up to this many operations have a dot each


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps operations and errors to positions in the drawing."""

    count: int
    low: int  # decades
    high: int

    def x(self, index: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (index + 0.5) / self.count

    def y(self, error: float) -> float:
        """The height of an error: 0 is a decade below the rest, inf and NaN half a decade above."""
        if error == 0:
            decade = self.low - 1.0
        elif not math.isfinite(error):
            decade = self.high + 0.5
        else:
            decade = min(max(math.log10(error), self.low), self.high)
        share = (decade - self.low + 1) / (self.high - self.low + 1.5)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def chart(operations: Sequence[Compared]) -> str:
    """The drawing as SVG."""
    curves = {
        "inherited": [_error(each.inherited) for each in operations],
        "own": [_error(each.own) for each in operations],
    }
    known = [e for errors in curves.values() for e in errors if e and math.isfinite(e)]
    low = math.floor(math.log10(max(min(known, default=1e-8), LOWEST)))
    high = max(math.ceil(math.log10(max([*known, LOWEST]))), low + 1)
    scale = _Scale(len(operations), low, high)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="own and inherited error of '
        f'{len(operations)} operations, on a logarithmic scale">',
        *_axes(scale),
        *(line for name, errors in curves.items() for line in _curve(name, errors, scale)),
        *_dots(operations, curves, scale),
        *_ends(curves, scale),
        *_first(operations, scale),
        "</svg>",
    ]
    return "\n".join(parts)


def _error(apart: Apart | None) -> float | None:
    return None if apart is None else apart.relative


def _axes(scale: _Scale) -> Iterator[str]:
    right = WIDTH - RIGHT
    step = max(1, (scale.high - scale.low) // 8)
    for decade in range(scale.low, scale.high + 1, step):
        y = scale.y(10.0**decade)
        yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{decade}</text>'
    y = scale.y(0.0)
    yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
    yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">0</text>'
    yield f'<text x="{LEFT - 52}" y="{TOP - 26}">relative error</text>'
    middle = (LEFT + right) / 2
    said = f"operations in order of execution, 1 to {scale.count}"
    yield f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">{said}</text>'


def _curve(name: str, errors: Sequence[float | None], scale: _Scale) -> Iterator[str]:
    points = [
        f"{scale.x(index):.1f} {scale.y(error):.1f}"
        for index, error in enumerate(errors)
        if error is not None
    ]
    if points:
        yield f'<path class="{name}" d="M {" L ".join(points)}"/>'


def _dots(
    operations: Sequence[Compared], curves: dict[str, list[float | None]], scale: _Scale
) -> Iterator[str]:
    radius = 3.2 if len(operations) <= FEW else 1.8
    for index, each in enumerate(operations):
        for name, errors in curves.items():
            error = errors[index]
            if error is None:
                continue
            title = html.escape(f"{each.heading}: {name} error {number(error)}")
            yield (
                f'<circle class="{name}" cx="{scale.x(index):.1f}" cy="{scale.y(error):.1f}" '
                f'r="{radius}"><title>{title}</title></circle>'
            )


def _ends(curves: dict[str, list[float | None]], scale: _Scale) -> Iterator[str]:
    """The name of each curve at its end, moved apart if both end in the same place."""
    ends: dict[str, float] = {}
    for name, errors in curves.items():
        last = next((e for e in reversed(errors) if e is not None), None)
        if last is not None:
            ends[name] = scale.y(last) + 4
    if len(ends) == 2 and abs(ends["own"] - ends["inherited"]) < 15:
        below = ends["own"] >= ends["inherited"]
        ends["own"] += 8 if below else -8
        ends["inherited"] += -8 if below else 8
    for name, y in ends.items():
        yield f'<text class="of-{name}" x="{WIDTH - RIGHT + 8}" y="{y:.1f}">{name}</text>'


def _first(operations: Sequence[Compared], scale: _Scale) -> Iterator[str]:
    """The first significant operation, with a line and its name."""
    places = (index for index, each in enumerate(operations) if each.is_significant)
    index = next(places, None)
    if index is None:
        return
    each, x = operations[index], scale.x(index)
    title = each.heading if len(each.heading) <= SHORT else f"{each.heading[: SHORT - 1]}…"
    own = "" if each.own is None else f", own error {number(each.own.relative)}"
    anchor, at = ("start", x + 6) if x < WIDTH / 2 else ("end", x - 6)
    yield f'<line class="first" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 14}" y2="{HEIGHT - BOTTOM}"/>'
    said = html.escape(f"first significant: {title}{own}")
    yield f'<text class="of-first" x="{at:.1f}" y="{TOP - 6}" text-anchor="{anchor}">{said}</text>'
