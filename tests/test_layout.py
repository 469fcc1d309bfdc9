"""The layout is the architecture: read from the source with ``ast``."""

from __future__ import annotations

import ast
import importlib
import pydoc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fxguard

PACKAGE = Path(fxguard.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Top to bottom, as data flows: a file may import the ones above it. A folder is one room.
ROOMS = (
    "errors",
    "records",
    "formats",
    "tables",
    "compact",
    "page",
    "plot",
    "console",
    "report",
    "report_file",
    "traces",
    "trace_file",
    "align",
    "batch_diff",
    "trace_diff",
    "stats",
    "bits",
    "iterations",
    "regions",
    "joined",
    "torch_state",
    "sources",
    "sharding",
    "ranks",
    "nodes",
    "operations",
    "random_state",
    "closer_look",
    "marks",
    "plan",
    "options",
    "higher_order",
    "spoiled",
    "values",
    "module_frames",
    "bodies",
    "planner",
    "insert",
    "checkpointing",
    "cause",
    "arguments",
    "standing",
    "batch",
    "frames",
    "explain",
    "replay",
    "second_run",
    "precedents",
    "judgment",
    "last_frames",
    "recorder",
    "selftest",
    "gaps",
    "module_calls",
    "plain_python",
    "dynamo",
    "conclude",
    "hooks",
    "instrumented",
    "pickled",
    "stand_in",
    "guard",
    "compiler_backend",
    "compare_models",
    "debug_utils",
    "__init__",  # gives out the names of those above
    "settings",
    "summary",
    "processes",
    "ending",
    "run",
    "outermost",
    "session",
    "autoload",
    "rendezvous",
    "netcheck",
    "cli_traces",
    "cli",
    "__main__",
    "integrations",
    "testing",
)
WITHOUT_TORCH = (
    *ROOMS[: ROOMS.index("stats")],
    *("plan", "cause", "options", "settings", "summary", "processes", "ending", "run"),
    *("cli_traces", "cli"),
)


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node of a module but what stands under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from (other, *statements(other))
            continue
        yield child
        yield from statements(child)


def modules_of(source: str) -> set[str]:
    """Dotted names of all modules that a file imports, in functions too, when it runs."""
    found: set[str] = set()
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names = [alias.name for alias in node.names]
            found.update(f"{node.module}.{name}" for name in names)
    return found


def rooms_of(source: str) -> set[str]:
    """The rooms of this package that a file imports."""
    rooms = set()
    for module in modules_of(source):
        top, _, rest = module.partition(".")
        if top == "fxguard":
            room = rest.partition(".")[0]
            rooms.add(room if room in ROOMS else "__init__")
    return rooms


def dotted_names(source: str) -> set[str]:
    """Every ``a.b.c`` that a file says, imports included."""
    found = modules_of(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return found


def dynamo_names(source: str) -> set[str]:
    """Names of torch._dynamo that a file uses, without the bare package itself."""
    return {name for name in dotted_names(source) if "_dynamo" in name.split(".")[:-1]}


def test_readers_of_this_file_find_what_is_there() -> None:
    """The readers see imports in functions, not those for type checkers, and dotted names."""
    source = """
import os, torch._dynamo.config
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from fxguard.guard import Guard
else:
    from fxguard.marks import flatten
import fxguard
def f():
    from fxguard.run import run_script
    from fxguard import gaps
    from torch import _dynamo
    _dynamo.reset()
    return torch._C._dynamo.eval_frame
"""
    assert rooms_of(source) == {"marks", "run", "gaps", "__init__"}
    assert dynamo_names(source) == {
        "torch._dynamo.config",
        "_dynamo.reset",
        "torch._C._dynamo.eval_frame",
    }


def test_every_file_has_its_place() -> None:
    """A new file is given a place in the order above."""
    assert {room_of(file) for file in FILES} <= set(ROOMS)
    assert len(set(ROOMS)) == len(ROOMS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_up_the_list(file: Path) -> None:
    """A file imports only what stands above it, in functions too; so there are no cycles."""
    above = ROOMS[: ROOMS.index(room_of(file))]
    assert rooms_of(file.read_text()) - {room_of(file)} <= set(above)


def test_public_names_come_from_above() -> None:
    """What the package gives out lives in files that do not need the package."""
    above = ROOMS[: ROOMS.index("__init__")]
    assert set(fxguard._HOME.values()) <= set(above)


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_data_and_text_know_nothing_of_torch(room: str) -> None:
    """Records, reports, plans and verdicts are made and read without torch."""
    path = PACKAGE.joinpath(f"{room}.py")
    path = path if path.exists() else PACKAGE.joinpath(room, "__init__.py")
    imported = modules_of(path.read_text())
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


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_only_two_files_know_dynamo(file: Path) -> None:
    """Names of TorchDynamo stand in two files; elsewhere only the type of its wrapper is asked."""
    found = dynamo_names(file.read_text())
    if file.name in ("dynamo.py", "plain_python.py"):
        assert found
    else:
        assert found <= {"torch._dynamo.OptimizedModule"}


def test_public_names_are_those_of_the_specification() -> None:
    """Every public name resolves, is listed by dir, and an unknown one is an AttributeError."""
    promised = {
        *("instrument", "remove", "guard_of", "backend", "insert_checks"),
        *("DebugUnderflowOverflow", "detect_overflow", "get_abs_min_max"),
        *("Report", "Frame", "Row", "Origin"),
        *("FxguardError", "NonFiniteError", "BatchLimitReached"),
    }
    assert promised <= set(fxguard.__all__)
    for name in fxguard.__all__:
        assert getattr(fxguard, name) is not None
        assert name in dir(fxguard)
    assert not hasattr(fxguard, "detect_underflow")


@pytest.mark.parametrize("room", [r for r in ROOMS if PACKAGE.joinpath(f"{r}.py").exists()])
def test_listed_names_exist(room: str) -> None:
    """Each file lists names that it has."""
    module = importlib.import_module("fxguard" if room == "__init__" else f"fxguard.{room}")
    assert module.__doc__
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_no_file_is_called_utils() -> None:
    """A file is named after its idea; debug_utils keeps the name that transformers gave it."""
    assert {file.name for file in FILES if "util" in file.name} == {"debug_utils.py"}
    assert not [file for file in FILES if file.stem in ("helpers", "common", "misc")]


def test_help_is_short_and_begins_with_what_to_call() -> None:
    """`help(fxguard)` names every public function, and `dir` still lists all of them."""
    text = pydoc.plain(pydoc.render_doc(fxguard))
    assert len(text.splitlines()) < 150
    first, _, contents = text.partition("PACKAGE CONTENTS")
    assert contents
    for name in ("instrument", "remove", "guard_of", "backend", "NonFiniteError", "compare"):
        assert name in first
        assert name in dir(fxguard)
