"""The program that measures how much the tests see."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fxguard import globs
from support.lines_run import LinesRun
from support.mutant_trials import ROOT, Known, in_order, in_parts
from support.mutants import SEEN, seen_before
from support.mutations import Mutant, mutants_of


def changes(source: str) -> list[tuple[str, str, str]]:
    return [(each.kind, each.before, each.after) for each in mutants_of("a.py", source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", [("boundary", "a < b", "a <= b"), ("comparison", "a < b", "a >= b")]),
        ("a is None", [("comparison", "a is None", "a is not None")]),
        ("a and b", [("and/or", "a and b", "a or b")]),
        ("x = a if b else c", [("condition", "b", "not b")]),
        ("x = [a for a in b if c(a)]", [("condition", "c(a)", "not c(a)")]),
        ("if not a:\n    pass", [("condition", "not a", "a")]),
        ("x = 1, 0.0", [("number", "1", "2"), ("number", "0.0", "1.0")]),
        ("x = 0.5", [("number", "0.5", "1.0")]),
        ("def f() -> bool:\n    return True", [("return", "True", "False")]),
        ("def f() -> bool:\n    return g()", [("return", "g()", "not g()")]),
        ("def f() -> list[int]:\n    return g()", [("return", "g()", "[]")]),
        ("def f() -> int | None:\n    return g()", [("return", "g()", "None")]),
        ("def f(a: Literal[1]) -> Literal[2]: ...", []),
        ("if TYPE_CHECKING:\n    x = 1", []),
        ("def f() -> None:\n    return None", []),
        ("def f() -> str:\n    return ''", []),
    ],
)
def test_an_expression_is_changed_in_its_own_way(
    source: str, expected: list[tuple[str, str, str]]
) -> None:
    assert changes(source) == [(kind, one, other) for kind, one, other in expected]


def test_a_fault_stays_in_its_place_and_moves_no_line() -> None:
    source = "é = 'ü'; x = (a\n    and b  # a reason\n)\ny = 3\n"
    changed = {each.after: each.applied_to(source.encode()) for each in mutants_of("a.py", source)}
    assert changed["a or b"].decode() == "é = 'ü'; x = ((a or b\n)  # a reason\n)\ny = 3\n"
    assert changed["4"].decode() == source.replace("3", "(4)")


def test_each_mutant_of_a_file_is_another_program() -> None:
    source = (ROOT / "fxguard" / "verdict" / "bounds.py").read_text(encoding="utf-8")
    trees = [
        ast.dump(ast.parse(each.applied_to(source.encode()))) for each in mutants_of("", source)
    ]
    assert len(trees) > 20
    assert len({*trees, ast.dump(ast.parse(source))}) == len(trees) + 1


def test_lines_that_run_are_noted_once() -> None:
    before = sys.gettrace(), threading.gettrace()
    lines = LinesRun()
    lines.begin()
    try:
        assert globs.matches("a.*", "a.b", "")
    finally:
        sys.settrace(before[0])
        threading.settrace(before[1])
    first = globs.matches.__code__.co_firstlineno
    assert lines.take()["globs.py"] >> first & 0b11111
    assert lines.take() == {}


def mutant_at(line: int, in_function: bool = True) -> Mutant:
    return Mutant("plan/x.py", line, line + 1, in_function, "number", "1", "2", (0, 1))


def test_a_mutant_meets_the_tests_that_run_its_lines() -> None:
    test = Known("tests/plan/test_x.py::test", 1.0, {"plan/x.py": 1 << 7})
    assert [line for line in range(12) if test.runs(mutant_at(line))] == [6, 7]
    assert test.runs(mutant_at(20, in_function=False))
    assert not Known("", 1.0, {}).runs(mutant_at(20, in_function=False))


def test_some_of_each_file_come_before_more_of_one() -> None:
    """Those of the mutated package come earlier; what does not run the line does not come."""
    lines = {"plan/x.py": 1 << 7}
    names = [*(f"tests/cli/test_a.py::{n}" for n in range(3)), "tests/cli/test_b.py::0"]
    names += ["tests/plan/test_x.py::0"]
    tests = [Known(name, 1.0, lines) for name in names] + [Known("other", 0.1, {})]
    found = [test.name.rpartition("/")[2] for test in in_order(tests, mutant_at(7))]
    assert found == ["test_x.py::0", *("test_a.py::0", "test_b.py::0"), "test_a.py::1",
                     "test_a.py::2"]  # fmt: skip


def test_tests_run_in_growing_parts_up_to_the_limit() -> None:
    tests = [Known(str(number), 1.0, {}) for number in range(100)]
    parts = list(in_parts(tests, 60))
    assert [len(part) for part in parts] == [3, 12, 45]
    assert [test for part in parts for test in part] == tests[:60]
    long = Known("long", 100.0, {})
    assert list(in_parts([long], 60)) == [[long]]


def test_a_fault_of_an_earlier_campaign_is_found_by_its_text() -> None:
    """Near the line where it was; none where the expression has gone."""
    file = "verdict/bounds.py"
    mutants = mutants_of(file, (ROOT / "fxguard" / file).read_text(encoding="utf-8"))
    for wanted in mutants[:: len(mutants) // 9]:
        twins = [each for each in mutants if str(each) == str(wanted)]
        known = {"file": file, "line": wanted.line, "nth": twins.index(wanted)}
        known |= {"before": wanted.before, "after": wanted.after}
        found = seen_before(known)
        assert found == wanted
        assert seen_before({**known, "before": "gone"}) is None
        assert seen_before({**known, "file": "verdict/gone.py"}) is None


def test_each_fault_of_the_campaign_has_a_test_or_a_reason() -> None:
    """And stands there once."""
    faults = [json.loads(line) for line in SEEN.read_text(encoding="utf-8").splitlines()]
    assert len(faults) > 300
    assert all(bool(fault["by"]) != bool(fault.get("why")) for fault in faults)
    assert len({tuple(fault[key] for key in ("file", "line", "before", "after", "nth"))
                for fault in faults}) == len(faults)  # fmt: skip


SOURCE = "def larger(a, b):\n    return a > b\n"
TESTS = """
from pathlib import Path

space = {}
exec(Path("fxguard/plan/x.py").read_text(), space)

def test_of_equal_numbers(): assert not space["larger"](2, 2)
def test_of_others(): assert space["larger"](3, 2)
def test_that_always_fails(): assert False
"""
JUDGE = """
import json, sys
from pathlib import Path
from support.mutant_trials import Known, Worker
from support.mutations import mutants_of

worker, names = Worker(Path(sys.argv[1])), sys.argv[2:]
tests = [Known("tests/test_x.py::" + name, 1.0, {}) for name in names]
for mutant in mutants_of("plan/x.py", (worker.tree / "fxguard/plan/x.py").read_text()):
    found = worker.judge(mutant, tests, 60)
    print(json.dumps([mutant.kind, found["outcome"], found["by"].rpartition("::")[2]]))
"""


@pytest.mark.parametrize(
    ("tests", "boundary", "comparison"),
    [
        (["test_of_equal_numbers"], "test_of_equal_numbers", "test_of_equal_numbers"),
        (["test_of_others"], None, "test_of_others"),
        (["test_that_always_fails"], None, None),
    ],
)
def test_a_mutant_is_killed_by_a_test_that_passes_without_it(
    tmp_path: Path, tests: list[str], boundary: str | None, comparison: str | None
) -> None:
    tree = tmp_path / "tree"
    for name, text in {"fxguard/plan/x.py": SOURCE, "tests/test_x.py": TESTS}.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "judge.py").write_text(JUDGE)
    ended = subprocess.run(
        [sys.executable, tmp_path / "judge.py", str(tmp_path), *tests],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    found = {kind: [what, by] for kind, what, by in map(json.loads, ended.stdout.splitlines()[-2:])}
    for kind, by in (("boundary", boundary), ("comparison", comparison)):
        assert found[kind] == (["killed", by] if by else ["alive", ""]), ended.stderr
    assert (tree / "fxguard/plan/x.py").read_text() == SOURCE
