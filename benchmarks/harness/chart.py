"""Scores to one picture, that reads on a light page and on a dark one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.cases import FORWARD, TRAINING
from harness.machine import title
from harness.models import MODELS
from harness.summary import TIME
from harness.tools import FXGUARD, PLAIN

__all__ = ["draw"]

INK, QUIET, OTHERS, OURS, OURS_TOO = "#1f2328", "#656d76", "#b6bec8", "#0b6bcb", "#5aa2e6"
NAMES = {"eager": "Eager", "inductor": "Inductor"}
HEADINGS = {FORWARD: "forward", TRAINING: "training step"}
NOT_DRAWN = frozenset({"plain again", "torch.compile eager"})  # they look for nothing
TICKS = (1, 1.5, 2, 3, 5, 10, 20, 50, 100)

Group = tuple[str, str]  # a mode, and forward or training


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw what each tool makes of a call's time, in the first dtype that was measured.

    Bars are geometric means over models, dots the models.

    Args:
        record: what ``overhead.py`` writes as JSON.
        path: of the picture; the ending says what it is, such as ``.png`` or ``.svg``.
    """
    scores = [s for s in record["scores"] if s["what"] == TIME and s["tool"] not in NOT_DRAWN]
    if not scores:
        raise ValueError("nothing to draw: only the tiny MLP was measured")
    dtype = scores[0]["dtype"]
    groups: dict[Group, dict[str, float]] = {}
    for score in scores:
        if score["dtype"] == dtype:
            groups.setdefault((score["mode"], score["work"]), {})[score["tool"]] = score["value"]
    dots = ratios_of_models(record, dtype)
    most = max(max(each) for each in dots.values())
    height = 0.25 * sum(map(len, groups.values())) + 0.4 * len(groups) + 1.1
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 9.5, "text.color": INK}):
        figure, panels = pyplot.subplots(
            len(groups),
            figsize=(9, height),
            height_ratios=[len(bars) + 0.2 for bars in groups.values()],
            sharex=True,
            squeeze=False,
        )
        for panel, (group, bars) in zip(panels[:, 0], groups.items(), strict=True):
            draw_group(panel, group, bars, dots)
        scale(panels[-1, 0], most)
        models = [m.title for name, m in MODELS.items() if name in models_in(record, dtype)]
        figure.subplots_adjust(
            left=0.235, right=0.985, top=1 - 0.72 / height, bottom=0.72 / height, hspace=0.42
        )
        figure.text(
            0.02, 1 - 0.3 / height, "What looking for inf and NaN costs", weight="bold", size=13
        )
        figure.text(
            0.02,
            0.13 / height,
            f"Time of a call, times the plain model's; logarithmic. Bars: geometric means of "
            f"{', '.join(models)} in {dtype}; dots: each of them.\n{title(record['environment'])}",
            size=8,
            color=QUIET,
            linespacing=1.4,
        )
        figure.savefig(path, dpi=200, facecolor="white")
        pyplot.close(figure)


def draw_group(
    panel: Axes, group: Group, bars: dict[str, float], dots: dict[tuple[Group, str], list[float]]
) -> None:
    """One mode with a bar for each tool, the cheapest on top."""
    mode, work = group
    panel.text(
        1,
        1.03,
        f"{NAMES.get(mode, mode)}, {HEADINGS[work]}",
        transform=panel.get_xaxis_transform(),
        weight="bold",
        va="bottom",
    )
    tools = sorted(bars, key=lambda tool: bars[tool])
    for position, tool in enumerate(tools):
        value, each = bars[tool], dots[group, tool]
        ours = tool.startswith(FXGUARD)
        color = OTHERS if not ours else OURS if tool == FXGUARD else OURS_TOO
        panel.barh(position, value - 1, left=1, height=0.68, color=color)
        if len(each) > 1:
            panel.plot(each, [position] * len(each), "o", ms=3.4, color=INK, alpha=0.5, mew=0)
        panel.annotate(
            f"{value:.2f}×",
            (max(value, *each, 1.0), position),
            xytext=(6, 0),
            textcoords="offset points",
            va="center_baseline",
            weight="bold" if ours else "normal",
            color=OURS if ours else INK,
        )
    panel.set_yticks(range(len(bars)), tools)
    for label in panel.get_yticklabels():
        ours = label.get_text().startswith(FXGUARD)
        label.set(color=OURS if ours else INK, weight="bold" if ours else "normal")
    panel.set_ylim(len(bars) - 0.5, -0.6)
    panel.tick_params(axis="y", length=0, pad=6)
    panel.tick_params(axis="x", length=0, labelcolor=QUIET)
    panel.grid(axis="x", color="#e4e8ec", lw=0.8)
    panel.set_axisbelow(True)
    panel.axvline(1, color=INK, lw=1)
    panel.spines[:].set_visible(False)


def scale(panel: Axes, most: float) -> None:
    """A logarithmic axis from the plain model to the most expensive tool, and a label's width."""
    panel.set_xscale("log")
    most = max(most, 1.5)
    panel.set_xlim(0.97, most ** (1 / 0.91))  # room for the number beside the longest bar
    panel.xaxis.set_major_locator(FixedLocator([tick for tick in TICKS if tick <= most * 1.2]))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}×"))


def ratios_of_models(record: dict[str, Any], dtype: str) -> dict[tuple[Group, str], list[float]]:
    """What each model makes of each bar."""
    found: dict[tuple[Group, str], list[float]] = {}
    for result in measured(record, dtype):
        group = (result["case"]["mode"], result["case"]["work"])
        for tool in result["tools"]:
            if tool["tool"] != PLAIN:
                found.setdefault((group, tool["tool"]), []).append(tool["ratio"]["median"])
    return found


def models_in(record: dict[str, Any], dtype: str) -> set[str]:
    return {result["case"]["model"] for result in measured(record, dtype)}


def measured(record: dict[str, Any], dtype: str) -> list[dict[str, Any]]:
    """The results that are drawn."""
    cases = [(result, result["case"]) for result in record["results"]]
    return [r for r, case in cases if case["dtype"] == dtype and case["model"] != "mlp"]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage, in benchmarks: python -m harness.chart overhead.json overhead.png")
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
