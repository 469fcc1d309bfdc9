"""The program that holds the reports of one checkout against those of another."""

from __future__ import annotations

import torch

import fxguard
from support import golden


def exploding() -> golden.Record:
    """One batch of a model whose exponential overflows."""
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(lambda x: (x * 100).exp() * 2, on_detect=reports.append)
    model(torch.ones(2))
    return golden.of_reports(reports)


def test_a_record_is_the_same_twice_and_counts_second_runs() -> None:
    """What is printed, as data and as text, and how often the graph ran again."""
    one, two = golden.recorded(exploding), golden.recorded(exploding)
    assert one == two
    assert one["runs"] > 0
    assert "exp made inf" in one["texts"][0]
    assert one["reports"][0]["origins"][0]["what"] == "exp"


def test_every_difference_is_shown_and_fewer_second_runs_are_none() -> None:
    record = {"texts": ["a"], "runs": 3}
    assert golden.differences({"x": record}, {"x": record}) == []
    assert golden.differences({"x": record | {"runs": 2}}, {"x": record}) == []
    assert golden.differences({"x": record | {"runs": 4}}, {"x": record}) == [
        "x: 4 second runs instead of 3"
    ]
    [changed] = golden.differences({"x": record | {"texts": ["b"]}}, {"x": record})
    assert changed == "x: texts[0]\n  before 'a'\n  now    'b'"
    texts = [{"k": "one\ntwo"}], [{"k": "one\ntree"}]
    assert golden.first_difference(*texts) == ("[0]['k'][1]", "'two'", "'tree'")
    assert golden.differences({"x": record}, {}) == ["x: only on one side"]


def test_an_exception_is_a_record() -> None:
    def fails() -> golden.Record:
        raise ValueError("no")

    assert golden.recorded(fails)["raised"] == "ValueError: no"
