"""A program runs once more with a patch, in a copy of its folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fxguard.errors import UsageError
from fxguard.patch import program_trial
from fxguard.patch.program_trial import Program, run_patched

FINE = """
import os, sys
import torch
import part
print(os.environ["WANDB_MODE"], sys.argv[1:])
open("written.txt", "w").write("x")
torch.nn.Linear(2, 2)(torch.ones(2) * part.factor())
"""
PART = "def factor():\n    return 1.0\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(program_trial.__file__).parents[2]))
    (tmp_path / "train.py").write_text(FINE)
    (tmp_path / "part.py").write_text(PART)
    return tmp_path


def run(text: str = PART, file: str = "part.py", seconds: float = 100.0) -> str:
    return run_patched(Program(None, ["train.py", "--epochs", "1"], (), seconds), file, text)


def test_it_runs_to_its_end_and_leaves_the_folder_alone(here: Path) -> None:
    before = sorted(os.listdir(here))
    told = run()
    assert told.startswith("with the patch the program ran to its end without an inf or a NaN: ")
    assert "checked 1 batch of Linear" in told
    assert sorted(os.listdir(here)) == before


def test_the_patched_file_is_the_one_that_runs(here: Path) -> None:
    told = run(PART.replace("1.0", "float('inf')"))
    assert told.startswith("with the patch the program still finds an inf or a NaN: ")
    told = run(PART.replace("return 1.0", "raise OSError('here')"))
    assert told == "with the patch the program ended with status 1: OSError: here"
    assert (here / "part.py").read_text() == PART


def test_it_is_stopped_after_twice_the_time(here: Path) -> None:
    text = "import time\n" + PART.replace("return", "time.sleep(60)\n    return")
    told = run(text, seconds=0.5)
    assert told.startswith("with the patch the program was stopped after 1 s: ")


def test_a_large_folder_is_not_copied(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_trial, "MOST_BYTES", 10)
    with pytest.raises(UsageError, match="at most 100 MB are copied"):
        run()


def test_a_file_outside_of_the_folder_is_refused(here: Path) -> None:
    with pytest.raises(UsageError, match="is outside of"):
        run(file=__file__)


def test_one_of_several_processes_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="one process of several"):
        run()


def test_the_folder_is_that_of_the_script_or_the_one_around_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "sub").mkdir()
    assert Program(None, ["sub/train.py"], (), 1.0).folder == Path(os.path.realpath(here))
    monkeypatch.chdir(here / "sub")
    assert Program(None, ["../train.py"], (), 1.0).folder == Path(os.path.realpath(here))
    assert Program("package.train", [], (), 1.0).folder == Path(os.path.realpath(here / "sub"))
