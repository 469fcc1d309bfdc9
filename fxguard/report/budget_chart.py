"""An error budget as a drawing: shares and own errors against depth. Knows nothing of torch."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxguard.report.in_words import percent

__all__ = ["STYLE", "Bar", "budget_chart"]

WIDTH, LEFT, RIGHT = 640, 58, 16
LABELLED = 3  # of the largest shares
LABEL = 17  # height of the line of a label
SHARES = 120  # height of each panel
ERRORS = 130
GAP = 44  # above each panel, for its title
BELOW = 30
SHORT = 38  # characters of a label
LEAST = 0.01  # a share that is labelled
TOPS = (0.02, 0.05, 0.1, 0.2, 0.5)  # of the scale of shares, where none is larger; else 1
WIDEST = 22.0
DOTS = 80  # up to this many rows have large dots

# Of the drawing, with the colours of a plain page.
STYLE = """
.drawing { overflow-x: auto; } .drawing svg { min-width: 28rem; max-width: 50rem; }
rect.share { fill: var(--own); } svg text.panel { fill: var(--text); font-weight: 600; }
.leader { stroke: var(--quiet); stroke-width: .8; } circle.roundings { fill: var(--inherited);
  stroke-width: 0; } svg text.label { fill: var(--own); font-weight: 600; stroke: var(--ground);
  stroke-width: 4px; paint-order: stroke; }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One row in the drawing."""

    label: str  # "arange rope.py:14"
    told: str  # what a pointer that rests there is shown
    share: float  # of the error, between 0 and 1
    own: float


@dataclass(frozen=True, slots=True)
class _Panel:
    """Maps rows and their numbers to positions in the drawing."""

    count: int
    top: float
    height: float

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, index: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (index + 0.5) / self.count

    def y(self, part: float) -> float:
        return self.bottom - self.height * min(max(part, 0.0), 1.0)


def budget_chart(bars: Sequence[Bar]) -> str:
    """The drawing as SVG.

    Args:
        bars: at least one, in order of execution.
    """
    largest = sorted(range(len(bars)), key=lambda index: -bars[index].share)[:LABELLED]
    labelled = [index for index in largest if bars[index].share >= LEAST]
    top = next((top for top in TOPS if top >= bars[largest[0]].share), 1.0)
    shares = _Panel(len(bars), GAP + LABEL * len(labelled), SHARES)
    errors = _Panel(len(bars), shares.bottom + GAP, ERRORS)
    said = f"share and own error of {len(bars)} rows, in order of execution"
    return "\n".join(
        [
            f'<div class="drawing"><svg viewBox="0 0 {WIDTH} {errors.bottom + BELOW:.0f}" '
            f'role="img" aria-label="{said}">',
            *_shares(bars, shares, top),
            *_errors(bars, errors),
            *_labels(bars, labelled, shares, top),
            f'<text x="{WIDTH / 2}" y="{errors.bottom + 22:.0f}" text-anchor="middle">'
            f"in order of execution, 1 to {len(bars)}</text>",
            "</svg></div>",
        ]
    )


def _shares(bars: Sequence[Bar], panel: _Panel, top: float) -> Iterator[str]:
    yield f'<text class="panel" x="{LEFT - 52}" y="18">share of the error</text>'
    for part in (0.0, 0.5, 1.0):
        yield from _grid(panel, part, f"{100 * top * part:g} %")
    width = max(1.0, min(WIDEST, 0.7 * (WIDTH - LEFT - RIGHT) / panel.count))
    for index, bar in enumerate(bars):
        y = panel.y(bar.share / top)
        yield (
            f'<rect class="share" x="{panel.x(index) - width / 2:.1f}" y="{y:.1f}" '
            f'width="{width:.1f}" height="{panel.bottom - y:.1f}">{_told(bar)}</rect>'
        )


def _errors(bars: Sequence[Bar], panel: _Panel) -> Iterator[str]:
    """Own errors, on a logarithmic scale."""
    known = [math.log10(bar.own) for bar in bars if 0 < bar.own < math.inf]
    low = math.floor(min(known, default=-3.0))
    high = max(math.ceil(max(known, default=-2.0)), low + 1)
    yield f'<text class="panel" x="{LEFT - 52}" y="{panel.top - 16:.1f}">own error</text>'
    for decade in range(low, high + 1, max(1, math.ceil((high - low) / 5))):
        yield from _grid(panel, (decade - low) / (high - low), f"1e{decade}")
    radius = 3.2 if len(bars) <= DOTS else 1.8
    for index, bar in enumerate(bars):
        if 0 < bar.own < math.inf:
            y = panel.y((math.log10(bar.own) - low) / (high - low))
            yield (
                f'<circle class="roundings" cx="{panel.x(index):.1f}" cy="{y:.1f}" r="{radius}">'
                f"{_told(bar)}</circle>"
            )


def _grid(panel: _Panel, part: float, said: str) -> Iterator[str]:
    y = panel.y(part)
    yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{said}</text>'


def _labels(
    bars: Sequence[Bar], labelled: Sequence[int], panel: _Panel, top: float
) -> Iterator[str]:
    """The largest shares by name, each in a line of its own, with a leader to its bar."""
    middle = WIDTH / 2
    # The leader of a label comes down beside those below it: these begin nearer to the middle.
    lines = sorted(labelled, key=lambda index: -abs(panel.x(index) - middle))
    texts = []
    for line, index in enumerate(lines):
        bar, x, y = bars[index], panel.x(index), GAP - 6 + LABEL * line
        end = panel.y(bar.share / top)
        yield f'<line class="leader" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 8}" y2="{end:.1f}"/>'
        anchor, at = ("start", x + 5) if x < middle else ("end", x - 5)
        label = bar.label if len(bar.label) <= SHORT else f"…{bar.label[1 - SHORT :]}"
        said = html.escape(f"{percent(bar.share)}  {label}")
        texts.append(
            f'<text class="label" x="{at:.1f}" y="{y}" text-anchor="{anchor}">{said}</text>'
        )
    yield from texts


def _told(bar: Bar) -> str:
    return f"<title>{html.escape(bar.told)}</title>"
