"""``fxguard run`` says in its exit status what happened, and wrong use changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.command_line import status
from support.programs import run_python

ROOT = Path(__file__).resolve().parents[2]

SHOW_ARGUMENTS = "import sys\nprint('got', sys.argv[1:], __name__)\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "required"),
        (["walk"], "'walk'"),
        (["run"], "which script?"),
        (["run", "--strict"], "which script?"),
        (["run", "missing.py"], "missing.py"),
        (["run", "."], "no such script: ."),
        (["run", "-m", "fxguard_missing"], "fxguard_missing"),
        (["run", "-m", "fxguard_missing.part"], "fxguard_missing.part"),
        (["run", "-m"], "-m"),
        (["run", "--max-frames-to-save", "0", "script.py"], "max_frames_to_save"),
        (["run", "--max-frames-to-save", "many", "script.py"], "many"),
        (["run", "--trace-batch-nums", "x", "script.py"], "--trace-batch-nums"),
        (["run", "--trace-batch-nums", "1,x", "script.py"], "1,x"),
        (["run", "--trace-batch-nums", "7", "8", "script.py"], "no such script: 8"),
        (["run", "--trace-batch-nums=1,-1", "script.py"], "-1"),
        (["run", "--abort-after-batch-num=-1", "script.py"], "-1"),
        (["run", "--abort-after-batch-num", "1.5", "script.py"], "1.5"),
        (["run", "--on-detect", "explode", "script.py"], "explode"),
        (["run", "--granularity", "ops", "script.py"], "ops"),
        (["run", "--nonsense", "script.py"], "nonsense"),
    ],
)
def test_wrong_use_ends_with_status_two(
    here: Path, capsys: Any, argv: list[str], words: str
) -> None:
    """A wrong command line is told on stderr in a line with the value; no script has run."""
    here.joinpath("script.py").write_text(SHOW_ARGUMENTS)
    assert status(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "Traceback" not in err


def test_message_about_batch_numbers_is_in_words(capsys: Any) -> None:
    """The error about a bad list of batches names no function of fxguard's own."""
    assert status("run", "--trace-batch-nums", "1,x", "script.py") == 2
    assert " _" not in capsys.readouterr().err


SCRIPT_COMES_AFTER_OPTIONS = [
    [],
    ["--strict"],
    ["--max-frames-to-save", "3"],
    ["--trace-batch-nums", "7"],
    ["--trace-batch-nums", "7,8", "--strict"],
    ["--trace-batch-nums=7,8", "--abort-after-batch-num", "8"],
    ["--ignore", "decoder.*", "--ignore", "*:log"],
    ["--"],
]


@pytest.mark.parametrize("options", SCRIPT_COMES_AFTER_OPTIONS)
def test_script_gets_its_own_arguments(here: Path, capsys: Any, options: list[str]) -> None:
    """What stands behind the script is the script's, also where fxguard has such an option."""
    here.joinpath("script.py").write_text(SHOW_ARGUMENTS)
    own = ["--strict", "file", "--report", "--", "-m", "3"]
    assert status("run", *options, "script.py", *own) == 0
    out, err = capsys.readouterr()
    assert out == f"got {own} __main__\n"
    assert "nothing was checked" in err


@pytest.mark.parametrize(
    "own",
    [
        [],
        ["file", "--strict", "-x"],
        ["--epochs", "3"],
        ["--strict"],
    ],
)
def test_module_gets_its_own_arguments(here: Path, capsys: Any, own: list[str]) -> None:
    """What stands behind the name of the module is the module's, as with python -m."""
    here.joinpath("fxguard_tests_module.py").write_text(SHOW_ARGUMENTS)
    assert status("run", "-m", "fxguard_tests_module", *own) == 0
    out, err = capsys.readouterr()
    assert out == f"got {own} __main__\n"
    assert "nothing was checked" in err


def test_script_that_exits_and_calls_no_module_is_told_too(here: Path, capsys: Any) -> None:
    """A script that ends with sys.exit(main()) hears that nothing was checked."""
    here.joinpath("script.py").write_text("import sys\nsys.exit(0)\n")
    assert status("run", "script.py") == 0
    assert "nothing was checked" in capsys.readouterr().err


# The command line, with a model, as a process of its own.

MODEL = """\
import sys
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        doubled = x * 2
        return torch.log(doubled)

model = Model()
print("arguments", sys.argv[1:])
"""
LINE = 8  # of torch.log


def run_script(folder: Path, *argv: str, **files: str) -> SimpleNamespace:
    """Run ``fxguard run`` on files in a folder; ``a=...`` is the text of ``a.py``."""
    for name, text in files.items():
        folder.joinpath(f"{name}.py").write_text(text)
    ended = run_python(folder, "-m", "fxguard", "run", *argv)
    return SimpleNamespace(status=ended.returncode, out=ended.stdout, err=ended.stderr)


@pytest.fixture(scope="module")
def detection(tmp_path_factory: Any) -> SimpleNamespace:
    """A script whose second batch overflows, run with options and arguments."""
    folder = tmp_path_factory.mktemp("detection")
    script = MODEL + "model(torch.ones(2))\nmodel(torch.zeros(2))\nprint('not reached')\n"
    argv = ("--report", "report.json", "train.py", "--epochs", "3")
    ended = run_script(folder, *argv, train=script)
    ended.folder = folder
    return ended


def test_detection_ends_with_status_three_and_without_a_traceback(detection: Any) -> None:
    """The report is printed, the script goes no further, and no library frames are shown."""
    assert detection.status == 3
    assert "Traceback" not in detection.out + detection.err
    assert "Detected inf/nan during batch_number=1" in detection.err
    assert "     inf      inf output" in detection.err
    assert "not reached" not in detection.out


def test_detection_says_what_to_look_at(detection: Any) -> None:
    """One line names the file, the line and the code of the operation to blame."""
    (line,) = [line for line in detection.err.splitlines() if line.startswith("fxguard: ")]
    assert line.startswith("fxguard: look at ")
    assert f"train.py:{LINE}: return torch.log(doubled)" in line


def test_script_of_a_detection_got_its_arguments(detection: Any) -> None:
    """The script saw the arguments behind its name, and none of fxguard's."""
    assert "arguments ['--epochs', '3']\n" in detection.out


def test_report_file_is_json_where_its_name_says_so(detection: Any) -> None:
    """`--report file.json` writes the report as strict JSON."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    text = detection.folder.joinpath("report.json").read_text()
    report = json.loads(text, parse_constant=refuse)
    assert report["batch_number"] == 1
    assert report["origins"][0]["what"] == "log"
    assert report["origins"][0]["frame"]["source"]["line"] == LINE
    assert report["origins"][0]["neginf_count"] == 2


def test_report_file_is_text_otherwise(tmp_path: Path) -> None:
    """`--report file.txt` writes what is printed; a module run by name is checked, too."""
    ended = run_script(
        tmp_path,
        *("--report", "report.txt", "--max-frames-to-save", "1", "-m", "package", "x"),
        package=MODEL + "model(torch.zeros(2))\n",
    )
    assert ended.status == 3
    assert "arguments ['x']\n" in ended.out
    assert "Last 1 forward frames:" in ended.err
    report = tmp_path.joinpath("report.txt").read_text()
    assert report in ended.err
    assert "\nDetected inf/nan during batch_number=0\n" in report
    assert "Traceback" not in ended.err


def test_status_of_the_script_is_kept(tmp_path: Path) -> None:
    """A clean script that ends with sys.exit(5) ends with 5, and prints what it prints."""
    ended = run_script(tmp_path, "ok.py", ok=MODEL + "model(torch.ones(2))\nsys.exit(5)\n")
    assert ended.status == 5
    assert ended.out == "arguments []\n"
    assert ended.err.startswith("fxguard: checked 1 batch of Model")


@pytest.mark.parametrize("error", ["KeyError('mine')", "FileNotFoundError('mine')"])
def test_exception_of_the_script_is_kept(tmp_path: Path, error: str) -> None:
    """An exception of the script's own shows its traceback and fails, as without fxguard."""
    text = MODEL + f"model(torch.ones(2))\nraise {error}\n"
    ended = run_script(tmp_path, "own.py", own=text)
    assert ended.status == 1
    assert "Traceback (most recent call last)" in ended.err
    assert 'own.py", line 13' in ended.err
    *_, raised, checked = ended.err.splitlines()
    assert "mine" in raised
    assert checked == "fxguard: checked 1 batch of Model (2 operations); nothing found"
    assert "Detected" not in ended.err


def test_early_stop_is_a_success(tmp_path: Path) -> None:
    """`--abort-after-batch-num 1` stops behind batch 1, traced before, and exits with 0."""
    text = MODEL + "for i in range(9):\n    model(torch.zeros(2))\n    print('finished', i)\n"
    options = ("--trace-batch-nums", "1,2", "--abort-after-batch-num", "1")
    ended = run_script(tmp_path, *options, "loop.py", loop=text)
    assert ended.status == 0
    assert "*** Starting batch number=1 ***" in ended.out
    assert "*** Starting batch number=0 ***" not in ended.out
    assert "finished 0\n" in ended.out
    assert "finished 1\n" not in ended.out
    assert "batch 1 has finished" in ended.err
    assert "Traceback" not in ended.err


def test_report_that_cannot_be_written_is_no_traceback(tmp_path: Path) -> None:
    """Where the report cannot be written the command says so."""
    text = MODEL + "model(torch.zeros(2))\n"
    ended = run_script(tmp_path, "--report", "missing/report.json", "own.py", own=text)
    assert ended.status in (2, 3)
    assert "Traceback" not in ended.err
    assert "missing/report.json" in ended.err


def test_report_is_written_for_a_warning_too(tmp_path: Path) -> None:
    """`--on-detect warn --report FILE` writes the report and lets the script finish."""
    text = MODEL + "model(torch.zeros(2))\nprint('finished')\n"
    options = ("--on-detect", "warn", "--report", "report.txt")
    ended = run_script(tmp_path, *options, "own.py", own=text)
    assert ended.status == 0
    assert "finished" in ended.out
    assert "\nDetected inf" in tmp_path.joinpath("report.txt").read_text()
