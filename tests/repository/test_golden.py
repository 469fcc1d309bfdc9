"""The program that holds the reports of one checkout against those of another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxguard
from support.golden.differences import apart, differences, in_groups
from support.golden.families import FAMILIES, cases_of
from support.golden.records import Record, of_reports, raised_by, recorded
from support.golden.second_runs import second_runs
from support.golden.sides import is_in_sample


def exploding() -> Record:
    """One batch of a model whose exponential overflows."""
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(lambda x: (x * 100).exp() * 2, on_detect=reports.append)
    model(torch.ones(2))
    return of_reports(reports)


def test_a_record_is_the_same_twice_and_counts_second_runs() -> None:
    """What is printed, as data and as text, and how often the graph ran again."""
    one, two = recorded(exploding), recorded(exploding)
    assert one == two
    assert one["runs"] > 0
    assert "exp made inf" in one["texts"][0]
    assert one["reports"][0]["origins"][0]["what"] == "exp"


def test_a_line_that_depends_on_the_time_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A capture that takes long is told. The lines around it stay."""
    monkeypatch.setattr("fxguard.capture.long_captures.AFTER", 0.0)
    monkeypatch.setattr("fxguard.guard.guard.GuardedModel.fallback", True)  # as outside of tests

    def run() -> Record:
        print("before")
        model = fxguard.instrument(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        model(torch.ones(1, 2))
        print("after")
        return {}

    run()
    assert "fxguard: capturing Sequential" in capsys.readouterr().err
    assert recorded(run)["printed"] == "before\nafter\n"


def test_who_began_a_second_run_is_named() -> None:
    """By file and function, the innermost first; afterwards nothing is counted."""
    with second_runs() as runs:
        exploding()
    assert runs
    assert all(", for " in run for run in runs)
    before = list(runs)
    exploding()
    assert runs == before


def said(ours: dict[str, Record], theirs: dict[str, Record]) -> list[str]:
    """All differences as text."""
    return [str(each) for each in differences(ours, theirs)]


def test_every_difference_is_shown_and_fewer_second_runs_are_none() -> None:
    record = {"texts": ["a"], "runs": 3}
    assert said({"x": record}, {"x": record}) == []
    assert said({"x": record | {"runs": 2}}, {"x": record}) == []
    assert said({"x": record | {"runs": 4}}, {"x": record}) == ["x: 4 second runs instead of 3"]
    [changed] = said({"x": record | {"texts": ["b"]}}, {"x": record})
    assert changed == "x: texts[0]\n  before 'a'\n  now    'b'"
    texts = [{"k": "one\ntwo"}], [{"k": "one\ntree"}]
    assert [*apart(*texts)] == [("[0]['k'][1]", "'two'", "'tree'")]
    assert said({"x": record}, {}) == ["x: only on one side"]


def test_a_new_key_and_a_new_line_hide_nothing() -> None:
    """What is on one side only is one difference; the rest is compared."""
    before, now = {"a": 1, "b": [1, 2]}, {"new": 0, "a": 1, "b": [1, 3]}
    assert [*apart(before, now)] == [("b[1]", "2", "3"), ("new", "'(nothing)'", "0")]
    assert [*apart("a\nb\nc", "a\nx\nb\nc")] == [("[1]", "'b'", "'x'")]
    assert [*apart(["a"], ["a", "b"])] == [("[1]", "'(nothing)'", "'b'")]


def test_differences_of_one_kind_are_one_group() -> None:
    """The words that changed count, and not what stands around them."""
    before = {str(i): {"text": f"{i} rtol, {i}", "runs": 1} for i in range(3)}
    now = {
        name: {"text": each["text"].replace("rtol", "tolerance"), "runs": 1 + (name == "2")}
        for name, each in before.items()
    }
    groups = in_groups(differences(now, before))
    assert [(group[0].change, len(group)) for group in groups] == [
        (("rtol", "tolerance"), 3),
        (("2 second runs instead of 1", ""), 1),
    ]


def test_what_a_change_of_fxguard_does_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another word in a report; one second run more."""
    [(name, run)] = cases_of("stories", lambda name: name == "stories/cosh/eager")
    before = recorded(run)
    assert said({name: recorded(run)}, {name: before}) == []

    def twice() -> Record:
        run()
        return run()

    [line] = said({name: recorded(twice)}, {name: before})
    assert line == f"{name}: {2 * before['runs']} second runs instead of {before['runs']}"
    text = fxguard.types.Report.__str__
    monkeypatch.setattr(fxguard.types.Report, "__str__", lambda r: text(r).replace("made", "makes"))
    [line] = said({name: recorded(run)}, {name: before})
    assert line.startswith(f"{name}: texts[0][0]\n  before 'cosh made inf")


def test_an_exception_is_a_record() -> None:
    def fails() -> Record:
        raise ValueError("no")

    assert recorded(fails)["raised"] == raised_by(fails)["raised"] == "ValueError: no"


def test_a_sample_is_chosen_by_name() -> None:
    """The same cases on both sides, whatever else there is; about one of so many."""
    names = [str(number) for number in range(1000)]
    taken = [name for name in names if is_in_sample(name, 4)]
    assert 200 < len(taken) < 300
    assert all(is_in_sample(name, 1) for name in names)


def test_each_family_has_cases() -> None:
    """Names are read here, and nothing runs."""
    for family in FAMILIES:
        asked: list[str] = []
        assert [*cases_of(family, lambda name, asked=asked: bool(asked.append(name)))] == []
        assert len(asked) == len(set(asked)) > 10, family
