"""The layout is the architecture: read from the source with ``ast``."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import pydoc
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fxguard

PACKAGE = Path(fxguard.__file__).parent
ROOT = PACKAGE.parent


def the_house() -> ModuleType:
    """docs/house.py, which reads the source and holds the one list of packages."""
    spec = importlib.util.spec_from_file_location("house", ROOT / "docs" / "house.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["house"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


house = the_house()
PACKAGES = [name for name in house.PLACE if house.files_in(name)]
# All but integrations/ and testing/, whose docstrings are for users.
ROOMS = [name for name in PACKAGES if name not in ("integrations", "testing")]

# What is made and read without torch.
WITHOUT_TORCH = (
    *("given_out", "errors", "forgiving", "records", "findings", "formats", "globs", "types"),
    *(name for room in ("report", "trace", "advice") for name in house.files_in(room)),
    *("graph.tables", "plan.plan", "verdict.origins", "options"),
    *("graph.poles", "graph.evidence", "comparison.elements", "comparison.result"),
    *("history.history", "history.needed"),
    *(f"comparison._result_{form}" for form in ("page", "text")),
    *("cli.main", "cli._ending", "cli._processes", "cli._script", "cli._settings"),
    *("cli._run_record", "cli._statuses", "cli._summary", "cli._traces", *ROOMS),
)


def modules_of(source: str) -> set[str]:
    """Dotted names of all modules that a file imports when it runs, in functions too."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    return {name for _, name in house.imported_by(tree)}


def dotted_names(source: str) -> set[str]:
    """Every ``a.b.c`` that a file says, imports included."""
    found = {name for _, name in house.imported_by(ast.parse(source))}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return found


def compiler_names(source: str) -> set[str]:
    """Names of torch._dynamo and torch._inductor that a file uses."""
    return {
        name
        for name in dotted_names(source)
        if {"_dynamo", "_inductor"} & set(name.split(".")[:-1])
    }


def test_readers_of_this_file_find_what_is_there() -> None:
    """The readers see imports in functions and those for type checkers, and dotted names."""
    source = """
import os, torch._dynamo.config
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from fxguard.guard.guard import Guard
else:
    from fxguard.graph.marks import flatten
import fxguard
def f():
    from fxguard.cli._script import run_script
    from fxguard.batch import observer
    from torch import _dynamo
    _dynamo.reset()
    return torch._C._dynamo.eval_frame, torch._inductor.config
"""
    found = house.imports_of("plan.reader", source)
    assert {each.imported for each in found} == {
        *("guard.guard", "graph.marks", "__init__", "cli._script", "batch.observer"),
    }
    assert {each.imported for each in found if each.is_wrong} == {
        *("guard.guard", "__init__", "cli._script", "batch.observer"),
    }
    assert "fxguard.guard.guard.Guard" not in modules_of(source)
    assert "fxguard.graph.marks.flatten" in modules_of(source)
    assert compiler_names(source) == {
        "torch._dynamo.config",
        "_dynamo.reset",
        "torch._C._dynamo.eval_frame",
        "torch._inductor.config",
    }


def test_every_file_has_its_place() -> None:
    """A new package is given a place in the list."""
    assert {house.room_of(name) for name in house.FILES} == set(house.PLACE)


def test_packages_import_only_to_their_left() -> None:
    """In functions and for type checkers too."""
    wrong = [f"{each.file}:{each.line}" for each in house.all_imports() if each.is_wrong]
    assert wrong == []


def private_names(source: str) -> set[str]:
    """Private names of torch that a file says, such as ``torch._C`` and ``torch.utils._pytree``."""
    return {
        name
        for name in dotted_names(source)
        if name.startswith("torch.") and any(re.match("_[^_]", part) for part in name.split("."))
    }


def test_private_names_of_torch_have_one_home() -> None:
    """``torch_names.py`` says of each what breaks without it; ``capture/`` is TorchDynamo's."""
    homes = ("torch_names", "trees", "capture")
    outside = {
        name: found
        for name, path in house.FILES.items()
        if house.room_of(name) not in homes and (found := private_names(path.read_text()))
    }
    assert outside == {}
    assert private_names("import torch.utils._pytree as pytree\ntorch._C.f()") > {"torch._C.f"}


def broad_handlers(source: str) -> list[str]:
    """What catches every exception and does not raise it again at its end."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and not is_raised_again(node):
            found.append("except" if node.type is None else f"except {ast.unparse(node.type)}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            found.append(ast.unparse(node))
    return [each for each in found if re.search(r"\b(Base)?Exception\b|except$", each)]


def is_raised_again(handler: ast.ExceptHandler) -> bool:
    """Whether the last line of a handler raises what it has caught."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def without_a_reason(source: str) -> list[int]:
    """Lines with a forgiving handler or block and no comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    commented = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    return [
        number
        for number, line in enumerate(source.splitlines(), 1)
        if re.search(r"except theirs\(\)|with .*where_theirs_may_raise\(\)", line)
        and number not in commented
    ]


def test_broad_handlers_have_one_home() -> None:
    """``forgiving.py`` catches everything, and raises our mistakes in tests."""
    outside = {
        name: found
        for name, path in house.FILES.items()
        if name != "forgiving" and (found := broad_handlers(path.read_text()))
    }
    # The command line catches what ends a script, Ctrl-C too: it becomes the exit status.
    assert outside == {"cli.main": ["except BaseException"]}
    reasons = {name: without_a_reason(path.read_text()) for name, path in house.FILES.items()}
    assert {name: lines for name, lines in reasons.items() if lines and name != "forgiving"} == {}


def test_broad_handlers_are_found() -> None:
    """The clean twin: the readers above know each form, and what is none."""
    source = """
try:
    f()
except Exception as error:
    note(error)
except (ValueError, BaseException):
    raise OSError from None
except:
    pass
with suppress(Exception), contextlib.suppress(OSError):
    f()
"""
    assert broad_handlers(source) == [
        *("except Exception", "except (ValueError, BaseException)", "except"),
        "suppress(Exception)",
    ]
    assert broad_handlers("try:\n    f()\nexcept BaseException:\n    g()\n    raise") == []
    assert broad_handlers("try:\n    f()\nexcept theirs():\n    pass") == []
    assert without_a_reason("except theirs():  # it may\nexcept theirs() as error:") == [2]


def test_every_second_run_passes_the_gate() -> None:
    """Only ``rerun/start.py`` begins a walk through a captured graph."""
    found = []
    for name, path in house.FILES.items():
        tree = ast.parse(path.read_text())
        calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        if {"Walk", "run_both"} & {call.rpartition(".")[2] for call in calls}:
            found.append(name)
    assert sorted(found) == ["rerun.start", "rerun.walk"]  # a walk also goes through bodies


def test_no_files_import_each_other() -> None:
    """Nor for type checkers: there are no circles."""
    assert house.circles() == []


def test_private_files_are_for_their_own_package() -> None:
    """A file that begins with an underscore is imported by its neighbours only."""
    wrong = [
        f"{each.file}:{each.line}"
        for each in house.all_imports()
        if each.imported.rpartition(".")[2].startswith("_")
        and not each.imported.endswith("__")
        and each.rooms[0] != each.rooms[1]
    ]
    assert wrong == []


@pytest.mark.parametrize("room", ROOMS)
def test_packages_say_what_comes_in_and_out(room: str) -> None:
    """The docstring is all that an ``__init__`` holds."""
    assert all(house.flows(room))
    assert len(ast.parse(house.FILES[room].read_text()).body) == 1


def test_the_map_is_what_the_docstrings_say() -> None:
    """``./dev map`` would change nothing."""
    text = house.CONTRIBUTING.read_text()
    assert house.with_map(text) == text


def test_the_map_says_how_many_arrows_are_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """``./dev map`` ends with the two numbers that have to be 0."""
    before = house.CONTRIBUTING.read_text()
    assert house.main() == 0
    assert house.CONTRIBUTING.read_text() == before
    assert capsys.readouterr().out.endswith(" 0 to the right, 0 circles\n")


@pytest.mark.parametrize("name", sorted(house.FILES))
def test_every_file_says_what_it_is(name: str) -> None:
    """The first sentence of its docstring is its line on the map."""
    assert house.summary(name).endswith((".", "``", ")"))


def test_public_names_come_from_above() -> None:
    """What the package gives out lives in files that do not need the package."""
    for module in [*fxguard._HOME.values(), *fxguard.types._HOME.values()]:
        assert house.PLACE[house.room_of(module)] < house.PLACE["__init__"]


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_data_and_text_know_nothing_of_torch(name: str) -> None:
    """Records, reports, plans and verdicts are made and read without torch."""
    imported = modules_of(house.FILES[name].read_text())
    assert not [name for name in imported if name.partition(".")[0] == "torch"]


@pytest.mark.parametrize("what", ["", ".testing", *(f".{room}" for room in WITHOUT_TORCH)])
def test_import_does_not_import_torch(what: str) -> None:
    """Importing fxguard, or its torch-free files, leaves torch alone; using a name does not."""
    program = f"import sys, fxguard{what}; assert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, timeout=60)
    assert ended.returncode == 0


def test_instrument_imports_torch() -> None:
    """The clean twin: the check above would see torch if it were imported."""
    program = "import sys, fxguard; fxguard.instrument; sys.exit('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, timeout=60)
    assert ended.returncode == 1


@pytest.mark.parametrize("name", sorted(house.FILES))
def test_only_capture_knows_the_compiler(name: str) -> None:
    """Names of TorchDynamo and Inductor stand in ``capture/``."""
    found = compiler_names(house.FILES[name].read_text())
    assert not found or house.room_of(name) == "capture"


def test_capture_knows_the_compiler() -> None:
    """The clean twin: the reader above finds such names."""
    assert compiler_names(house.FILES["capture.dynamo"].read_text())


def test_public_names_are_those_of_the_specification() -> None:
    """Every public name resolves, is listed by dir, and an unknown one is an AttributeError."""
    promised = {
        *("instrument", "remove", "guard_of", "backend", "insert_checks"),
        *("DebugUnderflowOverflow", "detect_overflow", "get_abs_min_max"),
        *("FxguardError", "NonFiniteError", "BatchLimitReached"),
    }
    assert promised <= set(fxguard.__all__)
    assert {"Report", "Frame", "Row", "Origin", "Guard"} <= set(fxguard.types.__all__)
    for module in (fxguard, fxguard.types):
        for name in module.__all__:
            assert getattr(module, name) is not None
            assert name in dir(module)
        assert not hasattr(module, "detect_underflow")


def test_records_are_given_out_by_types_alone() -> None:
    """The package itself gives out what is called or caught: functions, errors, the drop-in."""
    given = {name: getattr(fxguard, name) for name in fxguard.__all__}
    classes = {name for name, value in given.items() if isinstance(value, type)}
    assert classes == {
        *("DebugUnderflowOverflow", "FxguardError", "NonFiniteError", "BatchLimitReached"),
        "HistoryEvent",
    }
    assert not set(given) & set(fxguard.types.__all__)
    others = {name for name, value in given.items() if not callable(value)}
    assert others == {"types", "__version__"}


def test_types_names_what_functions_return() -> None:
    """``fxguard.types`` has the class of everything that a function of the package gives."""
    x = torch.ones(2, 2)
    model = fxguard.instrument(torch.nn.Linear(2, 2))
    model(x)
    guard = fxguard.guard_of(model)
    frames = guard.frames()
    difference = fxguard.diff(frames, frames)
    forecast = fxguard.forecast(torch.nn.Linear(2, 2), x * 1e30)
    comparison = fxguard.compare(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), x)
    _, plan = fxguard.insert_checks(torch.fx.symbolic_trace(torch.nn.Linear(2, 2)))
    given = [guard, guard.selftest(), *frames, *frames[0].rows, fxguard.backend(), plan]
    given += [difference, *difference.batches, *difference.batches[0].matches]
    given += [forecast, *forecast.rows, forecast.plan(), comparison, *comparison.everything]
    listed = {getattr(fxguard.types, name) for name in fxguard.types.__all__}
    assert [each for each in given if not listed & set(type(each).__mro__)] == []


@pytest.mark.parametrize("name", sorted(set(house.FILES) - {"__init__"}))
def test_listed_names_exist(name: str) -> None:
    """Each file lists names that it has; a package only says what it is."""
    if name.endswith(("netcheck", "__main__")) or house.files_in(name):
        return
    if name == "measure._kernel":  # it is imported where there is Triton: tests/measure/test_gpu.py
        return
    module = importlib.import_module(f"fxguard.{name}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_no_file_is_called_utils() -> None:
    """A file is named after its idea; debug_utils keeps the name that transformers gave it."""
    assert {name for name in house.FILES if "util" in name} == {"debug_utils"}
    assert not {name.rpartition(".")[2] for name in house.FILES} & {"helpers", "common", "misc"}


def test_help_is_short_and_begins_with_what_to_call() -> None:
    """`help(fxguard)` names every public function, and `dir` still lists all of them."""
    assert len(pydoc.render_doc(fxguard.types).splitlines()) < 60
    text = pydoc.plain(pydoc.render_doc(fxguard))
    assert len(text.splitlines()) < 150
    first, _, contents = text.partition("PACKAGE CONTENTS")
    assert contents
    for name in ("instrument", "remove", "guard_of", "backend", "NonFiniteError", "compare"):
        assert name in first
        assert name in dir(fxguard)


# The tests.

TESTS = ROOT / "tests"
TEST_FILES = sorted(file.relative_to(TESTS) for file in TESTS.rglob("*.py"))
ACROSS = {"support", "whole", "repository"}  # what is used by tests, or is about all packages


def test_tests_mirror_the_packages() -> None:
    """A folder of tests is a package, or a file, of fxguard; or it is about all of them."""
    rooms = {house.room_of(name) for name in house.FILES}
    assert {file.parts[0] for file in TEST_FILES if len(file.parts) > 1} <= rooms | ACROSS
    alone = {file.stem.removeprefix("test_") for file in TEST_FILES if len(file.parts) == 1}
    assert alone <= rooms | {"conftest"}


def test_no_test_imports_a_test() -> None:
    """What several of them use stands in ``support/``, whose files are no tests."""
    # The golden program runs beside the tests of another checkout, so its files say "from here".
    files = [file for file in TEST_FILES if file.parts[:2] != ("support", "golden")]
    found = {
        str(file): [name for name in modules_of((TESTS / file).read_text()) if "test_" in name]
        for file in files
    }
    assert {file: names for file, names in found.items() if names} == {}
    assert not [file for file in TEST_FILES if file.parts[0] == "support" and "test_" in file.stem]
