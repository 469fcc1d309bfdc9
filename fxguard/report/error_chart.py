"""Relative errors of operations: as words, and drawn against depth. Knows nothing of torch."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["STYLE", "Point", "chart", "number"]

WIDTH, HEIGHT = 1080, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 90, 44, 58
LOWEST = 1e-12  # smaller errors are drawn here
SHORT = 46  # characters of a title in the chart
FEW = 80  # up to this many operations have large dots

# Of the drawing, with the colours of a plain page.
STYLE = """
svg { width: 100%; height: auto; display: block; } svg text { font: 12px system-ui, sans-serif;
  fill: var(--quiet); } .grid { stroke: var(--line); } .own { stroke: var(--own); }
.inherited { stroke: var(--inherited); } path { fill: none; stroke-width: 1.8; }
circle.own { fill: var(--own); } circle.inherited { fill: var(--inherited); }
circle { stroke-width: 0; } svg text.of-own { fill: var(--own); font-weight: 600; }
svg text.of-inherited { fill: var(--inherited); font-weight: 600; }
.first { stroke: var(--ill); stroke-dasharray: 5 4; } svg text.of-first { fill: var(--ill);
  font-weight: 600; }
"""


@dataclass(frozen=True, slots=True)
class Point:
    """One operation in the drawing."""

    title: str
    own: float | None  # None if it is not known
    inherited: float | None = None  # the error that came with its operands
    marked: bool = False  # whether the error is too large; the first of these gets a line


@dataclass(frozen=True, slots=True)
class _Curve:
    kind: str  # its class in STYLE, and its name at its end
    name: str  # "own error"
    errors: Sequence[float | None]


def number(value: float) -> str:
    """An error as shown in verdicts, tables and pages."""
    return "0" if value == 0 else f"{value:.1e}" if value == value and value < 1e300 else str(value)


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


def chart(operations: Sequence[Point], first: str, *, apart: bool = True) -> str:
    """The drawing as SVG.

    Args:
        operations: at least one, in order of execution.
        first: what the first marked operation is called: ``first significant``.
        apart: whether own and inherited errors are apart; else ``own`` is the whole error.
    """
    curves = [_Curve("own", "own error" if apart else "error", [each.own for each in operations])]
    if apart:
        inherited = [each.inherited for each in operations]
        curves.insert(0, _Curve("inherited", "inherited error", inherited))
    known = [e for curve in curves for e in curve.errors if e and math.isfinite(e)]
    low = math.floor(math.log10(max(min(known, default=1e-8), LOWEST)))
    high = max(math.ceil(math.log10(max([*known, LOWEST]))), low + 1)
    scale = _Scale(len(operations), low, high)
    of_what = "own and inherited error" if apart else "error"
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{of_what} of '
        f'{len(operations)} operations, on a logarithmic scale">',
        *_axes(scale),
        *(line for curve in curves for line in _line(curve, scale)),
        *_dots(operations, curves, scale),
        *(_ends(curves, scale) if apart else ()),
        *_first(operations, f"{first}: ", f", {curves[-1].name} ", scale),
        "</svg>",
    ]
    return "\n".join(parts)


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


def _line(curve: _Curve, scale: _Scale) -> Iterator[str]:
    points = [
        f"{scale.x(index):.1f} {scale.y(error):.1f}"
        for index, error in enumerate(curve.errors)
        if error is not None
    ]
    if points:
        yield f'<path class="{curve.kind}" d="M {" L ".join(points)}"/>'


def _dots(operations: Sequence[Point], curves: Sequence[_Curve], scale: _Scale) -> Iterator[str]:
    radius = 3.2 if len(operations) <= FEW else 1.8
    for index, each in enumerate(operations):
        for curve in curves:
            error = curve.errors[index]
            if error is None:
                continue
            title = html.escape(f"{each.title}: {curve.name} {number(error)}")
            yield (
                f'<circle class="{curve.kind}" cx="{scale.x(index):.1f}" cy="{scale.y(error):.1f}" '
                f'r="{radius}"><title>{title}</title></circle>'
            )


def _ends(curves: Sequence[_Curve], scale: _Scale) -> Iterator[str]:
    """The name of each curve at its end, moved apart if both end in the same place."""
    ends: dict[str, float] = {}
    for curve in curves:
        last = next((e for e in reversed(curve.errors) if e is not None), None)
        if last is not None:
            ends[curve.kind] = scale.y(last) + 4
    if len(ends) == 2 and abs(ends["own"] - ends["inherited"]) < 15:
        below = ends["own"] >= ends["inherited"]
        ends["own"] += 8 if below else -8
        ends["inherited"] += -8 if below else 8
    for kind, y in ends.items():
        yield f'<text class="of-{kind}" x="{WIDTH - RIGHT + 8}" y="{y:.1f}">{kind}</text>'


def _first(operations: Sequence[Point], before: str, between: str, scale: _Scale) -> Iterator[str]:
    """The first marked operation, with a line, its name and its error."""
    index = next((index for index, each in enumerate(operations) if each.marked), None)
    if index is None:
        return
    each, x = operations[index], scale.x(index)
    title = each.title if len(each.title) <= SHORT else f"{each.title[: SHORT - 1]}…"
    own = "" if each.own is None else f"{between}{number(each.own)}"
    anchor, at = ("start", x + 6) if x < WIDTH / 2 else ("end", x - 6)
    yield f'<line class="first" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 14}" y2="{HEIGHT - BOTTOM}"/>'
    said = html.escape(f"{before}{title}{own}")
    yield f'<text class="of-first" x="{at:.1f}" y="{TOP - 6}" text-anchor="{anchor}">{said}</text>'
