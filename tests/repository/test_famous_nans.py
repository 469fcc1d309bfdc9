"""The gallery of famous NaNs: its page, its verdicts and its fixes are what runs here."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import torch
from torch import Tensor

import fxguard
from fxguard.guard.guard import GuardedModel
from fxguard.report.text import cause_text
from support.answers import expect_no_contradiction
from support.loading import the_gallery
from support.needs import CLAMP_STOPS_AT_BOUNDS, needs
from support.same_text import same_text

needs("transformers")
SLACK = 8  # times the dtype's eps, relative to the largest magnitude


gallery = the_gallery()
STORIES = gallery.STORIES
NEED_CLAMP = ("acos_one", "log1p_saturated")  # a gradient that goes through it at its bound


def report_of(name: str) -> fxguard.types.Report:
    """The report on the model of a story."""
    report: fxguard.types.Report | None = gallery.report(name)
    assert report is not None, "no report"
    return report


@pytest.mark.sampled
@pytest.mark.parametrize("name", STORIES)
def test_five_lines_suffice(name: str) -> None:
    """The right operation and cause, and what to do about it, stand above everything else."""
    if name in NEED_CLAMP and CLAMP_STOPS_AT_BOUNDS:
        assert gallery.report(name) is None
        return
    report = report_of(name)
    first = report.origins[0]
    assert (first.what, first.cause) == (STORIES[name].operation, STORIES[name].cause)
    expect_no_contradiction(report)
    lines = "\n".join(str(report).splitlines()[:5])
    assert first.fixes
    for word in (first.what, cause_text(first), first.fixes[0].text):
        assert word in lines, lines


@pytest.mark.sampled
@pytest.mark.parametrize("name", STORIES)
def test_the_fixed_model_is_healthy(name: str) -> None:
    """The fix leaves nothing to report, and the output is finite."""
    assert gallery.report(name, "_fixed") is None
    output = gallery.model(name, "_fixed")(*gallery.part(name, "_inputs")())
    assert result_of(output).isfinite().all()


@pytest.mark.parametrize("name", [name for name, story in STORIES.items() if story.exact])
def test_an_exact_fix_is_the_function_in_float64(name: str) -> None:
    """It gives what the broken model gives in float64, to the precision of its dtype."""
    model, inputs = gallery.model(name, "_fixed"), gallery.part(name, "_inputs")()
    fixed = result_of(model(*inputs))
    wide = result_of(gallery.model(name).double()(*map(widened, inputs)))
    eps = torch.finfo(inputs[0].dtype).eps
    assert (fixed - wide).abs().max() <= SLACK * eps * wide.abs().max()


def widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def result_of(output: Any) -> Tensor:
    """The output of a model, or the last hidden state in it."""
    return getattr(output, "last_hidden_state", output)


def test_batch_norm_of_one_sample_raises_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch says it before anything is NaN; the last batch can be dropped."""
    monkeypatch.setattr(GuardedModel, "fallback", True)  # TorchDynamo cannot capture what raises
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        gallery.report("batchnorm_one")
    outputs = list(gallery.batchnorm_one_fixed(torch.randn(9, 4)))
    assert len(outputs) == 2
    assert all(output.isfinite().all() for output in outputs)


def test_the_page_shows_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change: ``python docs/famous_nans.py --write``."""
    monkeypatch.setattr(GuardedModel, "fallback", True)  # for the one that raises
    page = gallery.PAGE.read_text(encoding="utf-8")
    shown = {block[2]: block[3] for block in gallery.SECTION.finditer(page)}
    printed = gallery.sections()
    assert shown.keys() == printed.keys()
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    torch_version, transformers_version = (".".join(v.split(".")[:2]) for v in versions)
    same = f"torch {torch_version} and transformers {transformers_version} " in page
    for name, text in printed.items():
        if same or not name.endswith(("report", "table") if CLAMP_STOPS_AT_BOUNDS else "report"):
            assert same_text(shown[name], text), f"{name}\n{text}"


def test_every_story_has_a_link() -> None:
    """Who tells it, and where: a full address."""
    page = gallery.PAGE.read_text(encoding="utf-8")
    parts = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    assert parts.keys() == set(gallery.ALL)
    for name, text in parts.items():
        assert "](https://" in text, name
