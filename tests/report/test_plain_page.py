"""Pages without a script: of a plan, a self-test, two precisions, two models."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxguard
from fxguard.report import plain_page
from fxguard.report.budget_chart import Bar, budget_chart
from fxguard.report.error_chart import Point, chart
from fxguard.report.self_test import SelfTest
from fxguard.testing import Deviation, Stability, numerically_stable
from fxguard.types import ErrorBudget, ErrorShare, PrecisionPlan, Source

MARKUP = "<script>alert(1)</script>\ud800"


def plan(**fields: Any) -> PrecisionPlan:
    given = ("float16", "model.half()", (f"{MARKUP}:mul",), 1, 2, True)
    return PrecisionPlan(*given, *(1e-3, math.nan, 1e-3, math.inf, 1e-7, 4), **fields)


def share(part: float, name: str = "", order: int = 0) -> ErrorShare:
    source = Source("/project/model.py", 3, "far = x + 90")
    return ErrorShare(name, "mul", source, part, 0.002, 31.0, 1, "cos model.py:4", order)


OF_MARKUP = (
    plan(),
    SelfTest(3, 2, 1, (MARKUP,), ((MARKUP, 2),)),
    Stability(torch.float16, torch.float64, 0.03, (Deviation(MARKUP, math.inf, 0.0),)),
    ErrorBudget("bfloat16", "the loss", 0.1, 2**-9, (share(0.9, MARKUP),), 1.0, 1),
)


@pytest.mark.parametrize("result", OF_MARKUP, ids=lambda result: type(result).__name__)
def test_text_of_a_model_is_text(result: Any, tmp_path: Path) -> None:
    """Escaped wherever it stands, and nothing in the page runs or loads."""
    result.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&#55296;" in page
    assert f'content="{plain_page.POLICY}"' in page
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize("healthy", [True, False])
def test_the_verdict_has_its_colour(healthy: bool) -> None:
    page = plain_page.plain_page("A title", ["first", "second"], [], healthy=healthy)
    state = "verdict" if healthy else "verdict ill"
    assert f'<div class="{state}"><p>first</p>\n<pre>second</pre></div>' in page


def test_a_table_marks_rows_and_gives_reasons() -> None:
    text = plain_page.table(
        ("a", "b"), [("1", "2"), ("3", "4")], marked=frozenset({1}), reasons=("", "why")
    )
    assert "<tr><td>1</td><td>2</td></tr>" in text
    assert '<tr class="marked"><td>3</td><td>4</td></tr>' in text
    assert '<tr class="marked"><td class="why" colspan="2">why</td></tr>' in text
    assert text.count("<tr") == 4


def test_a_plan_shows_the_change_and_the_errors(tmp_path: Path) -> None:
    """The call that keeps operations in float32 can be copied; each form has its error."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 2))
    found = fxguard.forecast(model, torch.full((3, 4), 1e3)).plan()
    found.to_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert found.advice in page
    for name in ("this plan", "float16 alone", "the model as it is"):
        assert f"<td>{name}</td>" in page
    assert ('class="verdict"' in page) == bool(found)


def test_a_stability_marks_what_is_over_the_tolerance(tmp_path: Path) -> None:
    """In the drawing and in the table, forward and backward apart."""

    def variance(x: torch.Tensor) -> torch.Tensor:
        return x.square().mean(-1) - x.mean(-1).square()

    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    found = numerically_stable(variance, x + 100, dtype=torch.float32, gradients=True)
    assert found.first is not None
    found.to_html(tmp_path / "stability.html")
    page = (tmp_path / "stability.html").read_text(encoding="utf-8")
    assert page.count("<svg") == page.count("<table") == 2
    assert f"first over the tolerance: sub, error {found.first.error:.1e}" in page
    over = sum(not each.error <= found.tolerance for each in found.deviations)
    assert page.count('<tr class="marked">') == over > 0
    assert page.count("<circle") == len(found.deviations)


def test_a_drawing_has_one_curve_or_two() -> None:
    """Own and inherited errors, where they are known apart."""
    points = [Point("a", 1e-3, 1e-4), Point("b", None, 1e-2), Point("c", 0.0, math.inf, True)]
    both = chart(points, "first significant")
    assert both.count("<path") == 2
    assert both.count("<circle") == 5
    assert "first significant: c, own error 0" in both
    one = chart(points, "first", apart=False)
    assert one.count("<path") == 1
    assert "inherited" not in one


def test_two_models_on_one_page(tmp_path: Path) -> None:
    """What differs is marked, with the reason below it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.mul_(2)
    found = fxguard.compare(model, other, torch.ones(2, 4))
    found.to_html(tmp_path / "comparison.html")
    page = (tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert found.first is not None
    reasons = [each.reason for each in found.significant if each.part != "weight"]
    assert page.count('<td class="why"') == len(reasons) > 0
    assert "A: Sequential" in page


def drawn_at(page: str) -> list[float]:
    """The heights of the bars of a budget, from left to right."""
    return [float(x) for x in re.findall(r'<rect class="share"[^>]* height="([\d.]+)"', page)]


def test_a_budget_is_drawn_in_the_order_of_execution(tmp_path: Path) -> None:
    """The table below it has the largest share first, each with its line of code."""
    rows = tuple(share(part, f"layer{order}", order) for part, order in ((0.6, 2), (0.4, 0)))
    rows += (share(0.0, "last", 7),)
    budget = ErrorBudget("bfloat16", "the output", 0.1, 2**-9, rows, 1.0, 3)
    budget.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    first, second, last = drawn_at(page)
    assert first == pytest.approx(second * 2 / 3, abs=0.1)
    assert last == 0
    assert "60 %  layer2 mul model.py:3</text>" in page
    table = page.partition("<table>")[2]
    assert table.index("layer2") < table.index("layer0")
    assert '<td class="why" colspan="7">far = x + 90</td>' in table


@pytest.mark.parametrize("count", [1, 2, 700])
def test_a_budget_of_any_size(count: int) -> None:
    """Nothing leaves the drawing."""
    bars = [
        Bar(f"{at} " + "long " * 40, "", 1 / count, 0.0 if at else math.inf) for at in range(count)
    ]
    text = budget_chart(bars)
    width, height = map(float, re.findall(r"viewBox=\"0 0 (\d+) (\d+)\"", text)[0])
    assert all(0 <= float(x) <= width for x in re.findall(r' x1?="([\d.-]+)"', text))
    assert all(0 <= float(y) <= height for y in re.findall(r' y1?="([\d.-]+)"', text))
    assert text.count('class="share"') == count


def test_a_budget_without_an_error_has_no_drawing(tmp_path: Path) -> None:
    ErrorBudget("bfloat16", "the output", 0.0, 2**-9, (), math.nan, 3).to_html(tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<svg" not in page
    assert "bfloat16 does not change the output" in page


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1200])
def test_a_budget_fits_a_phone(width: int, show: Callable[..., Any], tmp_path: Path) -> None:
    rows = tuple(share(1 / 40, f"encoder.layers.{at}.attention", at) for at in range(40))
    ErrorBudget("bfloat16", "the output", 0.1, 2**-9, rows, 1.0, 40).to_html(tmp_path / "a.html")
    page = show(tmp_path / "a.html", "svg", viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize(
    ("error", "said"),
    [(0.1, "1.0 of 2.4 digits are left"), (1e-5, "all 2.4 digits are left")],
)
def test_a_dtype_has_no_more_digits_than_it_has(error: float, said: str) -> None:
    """In a mean, errors cancel: it may be nearer than a rounding."""
    budget = ErrorBudget("bfloat16", "the loss", error, 2**-8, (share(1.0),), 1.0, 1)
    assert budget.verdict[0].endswith(said)
