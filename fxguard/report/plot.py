"""Draws frames as a matplotlib chart: the range of every output over the depth of the model.

Knows nothing of torch. Imports matplotlib when something is drawn.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fxguard.errors import UsageError
from fxguard.formats import FORMATS, Format
from fxguard.records import Frame, Row, title_of
from fxguard.report.headroom import outputs_with_limits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot"]

MOST_NAMES = 32  # more could not be read below one another
LOWEST, HIGHEST = 1e-200, 1e200  # of the axis: beyond them its ticks would leave float64
MAX_COLOR, MIN_COLOR, BAD_COLOR, LIMIT_COLOR = "C0", "C1", "tab:red", "0.45"


def plot(frames: Sequence[Frame], ax: Axes | None = None, title: str = "") -> Axes:
    """Draw the largest and the smallest magnitude of every frame's outputs, in order of execution.

    The y axis is logarithmic. Dashed lines show the largest and the smallest normal number of each
    dtype of the frames. The axis covers the narrowest of these dtypes and everything that was
    measured; ``ax.set_ylim`` brings lines further out into view. Dots are values in the narrowest
    dtype, rings values in a wider one, which may lie beyond its lines. Outputs that hold an inf or
    a NaN are marked at the upper edge, zeros at the lower one. A frame without numbers is a gap.

    Args:
        frames: of one batch, such as ``guard_of(model).frames()``, ``report.frames`` or
            ``trace.batches[0].frames``.
        ax: where to draw; None makes a new figure with ``plt.subplots``.
        title: the title of the chart.

    Returns:
        The axes, to change and to save: ``ax.figure.savefig("ranges.png")``. Nothing is shown.

    Raises:
        UsageError: when matplotlib is not installed.

    Example:
        >>> ax = plot(fxguard.guard_of(model).frames(), title="batch 0")
        >>> ax.figure.savefig("ranges.png")
    """
    if ax is None:
        ax = _new_axes()
    outputs = [outputs_with_limits(frame) for frame in frames]
    largest = [_finite(row.abs_max for row in rows) for rows in outputs]
    smallest = [_finite(row.abs_min for row in rows) for rows in outputs]
    greatest = [max(values, default=math.nan) for values in largest]
    least = [min(values, default=math.nan) for values in smallest]
    formats = _formats(frames)

    ax.set_yscale("log")
    _draw(ax, greatest, MAX_COLOR, "abs max")
    _draw(ax, least, MIN_COLOR, "abs min")
    narrowest = min(formats, key=lambda form: form.max)
    wider = [any(_holds_more(row, narrowest) for row in rows) for rows in outputs]
    if any(wider):
        _hollow(ax, greatest, wider, MAX_COLOR, f"wider than {narrowest.name}")
        _hollow(ax, least, wider, MIN_COLOR, "_wider")  # no second entry in the legend
    _mark(ax, [_holds(rows, math.isinf) for rows in outputs], 1, "^", BAD_COLOR, "inf")
    _mark(ax, [_holds(rows, math.isnan) for rows in outputs], 1, "X", BAD_COLOR, "NaN")
    _mark(ax, [x == 0 for x in least], 0, "v", MIN_COLOR, "abs min is 0")
    _mark(ax, [x == 0 for x in greatest], 0, "v", MAX_COLOR, "abs max is 0")

    seen = [x for x in (*greatest, *least) if x > 0]
    low = min([*seen, narrowest.smallest_normal])
    high = max([*seen, narrowest.max])
    ax.set_ylim(max(low / 10, LOWEST), min(high * 10, HIGHEST))
    ax.set_xlim(-0.5, max(len(frames), 1) - 0.5)
    for form in formats:  # after set_ylim, which would add a margin beyond them
        for value in (form.max, form.smallest_normal):
            ax.axhline(value, color=LIMIT_COLOR, linestyle="--", linewidth=0.8, zorder=1)
    _name_limits(ax, formats)
    _name_frames(ax, frames)
    ax.set_xlabel("operations and modules, in order of execution")
    ax.set_ylabel("magnitude of the outputs")
    ax.set_title(title, loc="left", pad=26)  # above the legend
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.02),
        ncols=8,
        frameon=False,
        borderaxespad=0,
        fontsize="small",
    )
    return ax


def _new_axes() -> Axes:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UsageError("plot draws with matplotlib: pip install matplotlib") from error
    return plt.subplots(figsize=(10, 6), layout="constrained")[1]


def _finite(values: Iterable[float | None]) -> list[float]:
    return [x for x in values if x is not None and math.isfinite(x)]


def _formats(frames: Sequence[Frame]) -> list[Format]:
    known = {row.dtype for frame in frames for row in frame.rows} & set(FORMATS)
    return [form for name, form in FORMATS.items() if name in (known or {"float16"})]


def _holds_more(row: Row, form: Format) -> bool:
    return row.dtype in FORMATS and FORMATS[row.dtype].max > form.max


def _draw(ax: Axes, values: list[float], color: str, label: str) -> None:
    # A zero has no place on a logarithmic axis: it is a gap here and is marked at the edge.
    shown = [x if x > 0 else math.nan for x in values]
    ax.plot(shown, "o-", color=color, linewidth=0.7, markersize=3, label=label)


def _hollow(ax: Axes, values: list[float], where: list[bool], color: str, label: str) -> None:
    """Rings over the dots of values in wider dtypes, to which the narrowest limits do not apply."""
    shown = [x if x > 0 and ring else math.nan for x, ring in zip(values, where, strict=True)]
    face = ax.get_facecolor()
    ax.plot(shown, "o", color=color, markerfacecolor=face, markersize=3.5, mew=0.8, label=label)


def _holds(rows: list[Row], is_bad: Callable[[float], bool]) -> bool:
    return any(row.abs_max is not None and is_bad(row.abs_max) and not row.mask for row in rows)


def _mark(ax: Axes, where: list[bool], edge: int, marker: str, color: str, label: str) -> None:
    at = [position for position, is_there in enumerate(where) if is_there]
    if at:
        ax.plot(
            at,
            [edge] * len(at),
            marker,
            color=color,
            markersize=7 if edge else 4,
            label=label,
            transform=ax.get_xaxis_transform(),  # y counts from the lower edge, 0, to the upper, 1
            clip_on=False,
            zorder=3,
        )


def _name_limits(ax: Axes, formats: list[Format]) -> None:
    for what in ("max", "smallest_normal"):
        # Formats with equal exponents end at nearly the same place and share a label there.
        names: dict[float, list[str]] = {}
        for form in formats:
            names.setdefault(round(math.log10(getattr(form, what)), 1), []).append(form.name)
        for exponent, listed in names.items():
            ax.annotate(
                f"{what.replace('_', ' ')}\n{', '.join(listed)}",
                (1, 10.0 ** min(exponent, 308)),
                xycoords=ax.get_yaxis_transform(),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize="small",
                color=LIMIT_COLOR,
                annotation_clip=True,  # no label for a line that is out of view
            )


def _name_frames(ax: Axes, frames: Sequence[Frame]) -> None:
    if len(frames) <= MOST_NAMES:
        places = list(enumerate(map(_short_title, frames)))
    else:
        places = list(_blocks(frames))
        ax.grid(axis="x", color=LIMIT_COLOR, alpha=0.25, linewidth=0.6)
    ax.set_xticks(
        [position for position, _ in places],
        [name for _, name in places],
        rotation=45,
        ha="right",
        rotation_mode="anchor",
        fontsize="small",
        parse_math=False,  # a "$" in a name does not begin a formula
    )


def _short_title(frame: Frame) -> str:
    """``DenseReluDense.wi_1 Linear``: neighbours differ only in the last parts of their names."""
    return title_of(".".join(frame.name.split(".")[-2:]), frame.kind_and_phase)


def _blocks(frames: Sequence[Frame]) -> Iterator[tuple[int, str]]:
    """Where the top-level blocks begin: the longest ones, as many as can be read."""
    runs = []
    start = 0
    for name, run in itertools.groupby(_block_of(frame.name) for frame in frames):
        length = len(list(run))
        runs.append((length, start, name))
        start += length
    taken: list[int] = []
    for _, start, name in sorted(runs, key=lambda run: -run[0]):
        if name and all(abs(start - other) >= len(frames) / MOST_NAMES for other in taken):
            taken.append(start)
            yield start, name


def _block_of(name: str) -> str:
    """``encoder.block.0`` of ``encoder.block.0.layer.1``: up to the first part with a number."""
    parts = name.split(".")
    numbered = (i for i, part in enumerate(parts) if re.search(r"\d$", part))
    return ".".join(parts[: next(numbered, len(parts)) + 1])
