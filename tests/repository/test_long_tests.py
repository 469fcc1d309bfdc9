"""The list of long tests is true of what pytest has collected in this run."""

from __future__ import annotations

import pytest

from support.long_tests import ALL, CI, LONG, MANY, OTHERS, SAMPLED, Long, collected, marks_of


def cases_of(test: str) -> dict[str, str]:
    """The cases of a test, or of a file, and their marks."""
    return {
        name: mark
        for name, mark in collected.items()
        if test in (name.partition("[")[0], name.partition("::")[0])
    }


def skip_unless_collected(*tests: str) -> None:
    """A run of some files says nothing about others."""
    files = {name.partition("::")[0] for name in collected}
    if not {test.partition("::")[0] for test in tests} <= files:
        pytest.skip("its file is not in this run")


@pytest.mark.parametrize("long", LONG, ids=lambda long: long.test)
def test_each_change_runs_it_or_something_in_its_place(long: Long) -> None:
    """CI runs what it is to run; the campaign's cases have others, or another test, beside them."""
    covering = long.test if long.covered_by in (CI, OTHERS) else long.covered_by
    skip_unless_collected(long.test, covering)
    marks = cases_of(long.test)
    listed = set(marks) if long.cases == ALL else {f"{long.test}[{case}]" for case in long.cases}
    assert listed
    assert listed <= marks.keys()
    if long.covered_by == CI:
        assert {marks[case] for case in listed} - {"campaign"} == {"slow"}
    else:
        assert {marks[case] for case in listed} == {"campaign"}
    assert set(cases_of(covering).values()) - {"campaign"}


@pytest.mark.parametrize("file", SAMPLED)
def test_a_sample_stays_in_each_test(file: str) -> None:
    """At least a third of what CI runs, of every test with many cases."""
    skip_unless_collected(file)
    tests = {name.partition("[")[0] for name in cases_of(file)}
    sampled = 0
    for marks in map(cases_of, tests):
        kept, left_out = (sum(mark == m for mark in marks.values()) for m in ("", "slow"))
        if left_out > 1 and kept + left_out >= MANY:
            assert kept >= left_out / 2 - 1
            sampled += 1
    assert sampled


def test_marks() -> None:
    """A campaign stays one where a sample leaves it out, too; of many cases every third stays."""
    test = "whole/no_false_alarm/test_twins.py::test_them"
    many = {f"{test}[{i}]": "" for i in range(MANY)}
    assert list(marks_of(many).values()) == ["", "slow", "slow"] * (MANY // 3)
    few = {**many, f"{test}[1]": "campaign"}
    assert list(marks_of(few).values()) == list(few.values())
    long = next(long for long in LONG if long.covered_by == OTHERS)
    case = f"{long.test}[{long.cases[0]}]"
    assert marks_of({case: "slow"}) == {case: "campaign"}
    case = "measure/test_inductor.py::test_any[1]"
    assert marks_of({case: ""}) == {case: "slow"}
    assert marks_of({case: "campaign"}) == {case: "campaign"}
