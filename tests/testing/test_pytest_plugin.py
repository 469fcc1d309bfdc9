"""The pytest plugin, in test runs of its own."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from fxguard.testing import numerically_stable

pytestmark = pytest.mark.slow

MODELS = """
import pytest
import torch
from torch import nn

class Square(nn.Module):
    def forward(self, x):
        return x * x

class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Square()

    def forward(self, x):
        return self.inner(x) + 1

LARGE = torch.full((2,), 1e30)
"""


@pytest.fixture(scope="module", autouse=True)
def _everything_imported() -> None:
    """A test run inside of one forgets what it has imported, and torch is not imported twice."""
    numerically_stable(torch.nn.Linear(1, 1), torch.ones(1))
    torch._dynamo.reset()


@pytest.fixture
def run(pytester: pytest.Pytester):
    """Run a test file in this process, with the plugin as it is installed."""

    def run(tests: str, *args: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=MODELS + tests)
        return pytester.runpytest("-p", "no:cacheprovider", *args)

    return run


def test_the_fixture(run) -> None:
    """It instruments, fails the test with the report, and leaves the model as it was."""
    result = run("""
model = Outer()

def test_fails(fxguard):
    guarded = fxguard.instrument(model)
    assert guarded is model
    guarded(LARGE)

def test_afterwards():
    assert "_fxguard" not in model.__dict__
    model(LARGE)

def test_is_the_module_too(fxguard):
    with pytest.raises(fxguard.NonFiniteError):
        fxguard.instrument(model)(LARGE)
    fxguard.remove(model)
""")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "E * batch 0: mul in inner made inf (test_it.py:7): overflow",
            "*- fxguard report -*",
            "mul in inner made inf (test_it.py:7): overflow",
            "Detected inf/nan during batch_number=0",
            "*inner Square",
        ]
    )
    assert result.stdout.str().count("Detected inf/nan") == 1  # not among what was printed, too
    assert "/delivery.py" not in result.stdout.str()  # nothing of how it was found
    assert "guard.py" not in result.stdout.str()


def test_nothing_happens_unasked(run) -> None:
    run("def test(): Outer()(LARGE)").assert_outcomes(passed=1)


def test_the_marker(run) -> None:
    """Every outermost module is guarded, with the options of the markers, nearest one last."""
    result = run("""
class Absorbs(nn.Module):
    def forward(self, x):
        return 1 / (x * x)

pytestmark = pytest.mark.fxguard

def test_absorbed():
    Absorbs()(LARGE)

@pytest.mark.fxguard(strict=True)
def test_strict():
    Absorbs()(LARGE)

@pytest.mark.fxguard(strict=True, ignore=["*:mul"])
def test_ignored():
    Absorbs()(LARGE)

@pytest.mark.fxguard(strict=True)
def test_with_the_fixture(fxguard):
    fxguard.instrument(Absorbs())(LARGE)

def test_late(fxguard):
    model = Outer()
    model(LARGE / 1e30)  # guarded by the marker from here on
    fxguard.instrument(model, on_detect="warn")
    with pytest.warns(RuntimeWarning, match="mul in inner made inf"):
        model(LARGE)
""")
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(["*FAILED test_it.py::test_strict*"])
    result.stdout.fnmatch_lines(["*FAILED test_it.py::test_with_the_fixture*"])


def test_wrong_options(run) -> None:
    result = run("""
@pytest.mark.fxguard(on_detect="explode")
def test(): Outer()(LARGE)
""")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*nothing is checked: on_detect has to be*"])


SUITE = """
@pytest.fixture(scope="module")
def shared():
    return Outer()

@pytest.mark.parametrize("x", [LARGE / 1e30, LARGE], ids=["well", "large"])
@pytest.mark.parametrize("again", [1, 2, 3])
def test(shared, x, again):
    assert "_fxguard" not in shared.__dict__
    shared(x)

def test_without_a_model():
    pass
"""


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.campaign)])
def test_the_option(run, pytester: pytest.Pytester, workers: str) -> None:
    """`--fxguard` guards every test of a run, under xdist too; JUnit's file says what was found."""
    result = run(SUITE, "--fxguard", "-n", workers, "--junitxml=junit.xml")
    result.assert_outcomes(passed=4, failed=3)
    assert result.stdout.str().count("fxguard report") == 3
    root = ElementTree.parse(pytester.path / "junit.xml").getroot()
    found = {
        case.get("name"): [(p.get("name"), p.get("value")) for p in case.iter("property")]
        for case in root.iter("testcase")
    }
    origin = ("fxguard_origin", "batch 0: mul in inner made inf (test_it.py:7)")
    coverage = ("fxguard_coverage", "Outer: checked 2 of 2 operations in 1 graph")
    for name, properties in found.items():
        if name == "test_without_a_model":
            assert properties == []
        else:
            assert coverage in properties
            assert (origin in properties) == ("large" in name)


def test_profiles(run, pytester: pytest.Pytester) -> None:
    """`--fxguard-update` writes them, and nothing else does."""
    tests = """
from fxguard.testing import check_profile

def test():
    check_profile(Outer(), torch.ones(2), "profiles/outer.txt")
"""
    result = run(tests)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*there is no profile*--fxguard-update*"])
    run(tests, "--fxguard-update").assert_outcomes(passed=1)
    assert "inner mul" in (pytester.path / "profiles" / "outer.txt").read_text()
    run(tests).assert_outcomes(passed=1)


def test_assertions_of_numerics_show_the_report(run) -> None:
    result = run("""
from fxguard.testing import assert_finite, numerically_stable

def test_finite():
    assert_finite(Outer(), LARGE)

def test_stable():
    assert numerically_stable(Outer(), LARGE / 1e27, dtype=torch.float16)
""")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "E * mul in inner made inf (test_it.py:7): overflow",
            "*- fxguard report -*",
            "Detected inf/nan during batch_number=0",
        ]
    )
    result.stdout.fnmatch_lines(
        ["E * assert not stable in float16: inner mul (test_it.py:7) made*"]
    )
    assert "torch.__trace" not in result.stdout.str()


COLLECT = """
import sys
import pytest

class After:
    def pytest_unconfigure(self):
        print("imported:", *sorted({"fxguard", "torch", "hypothesis"} & set(sys.modules)))
        print("plugin:", "_fxguard_pytest" in sys.modules)

sys.exit(pytest.main(["--collect-only", "-q", *sys.argv[1:]], plugins=[After()]))
"""


def collected(folder: Path, pytester: pytest.Pytester, *args: str) -> str:
    """What an empty project prints when it collects its tests."""
    script = folder / "collect.py"
    script.write_text(COLLECT)
    ran = pytester.run(sys.executable, script, "-p", "no:cacheprovider", *args)
    assert ran.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    return ran.stdout.str()


def test_an_empty_project_imports_nothing(tmp_path: Path, pytester: pytest.Pytester) -> None:
    """With the package installed and unused, neither fxguard nor torch is imported."""
    text = collected(tmp_path, pytester, "-p", "no:hypothesispytest")
    assert "plugin: True" in text
    assert "imported:\n" in text + "\n"


@pytest.mark.parametrize("module", ["fxguard", "torch"])
def test_the_test_above_can_fail(tmp_path: Path, pytester: pytest.Pytester, module: str) -> None:
    """A plugin that does import one of them is noticed."""
    pytester.makepyfile(careless=f"import {module}")
    text = collected(tmp_path, pytester, "-p", "no:hypothesispytest", "-p", "careless")
    assert f"{module}\n" in text.partition("imported:")[2]
