"""The command line says what is wrong before anything runs, and what may have been meant."""

from __future__ import annotations

import json
import subprocess
import sys
import webbrowser
from pathlib import Path
from typing import Any

import pytest
import torch

import fxguard
from fxguard.cli import _settings as settings
from fxguard.errors import UsageError
from support.command_line import status


@pytest.fixture
def here(here: Path) -> Path:
    """With a script in it."""
    here.joinpath("train.py").write_text("import sys\nprint('ran', sys.argv[1:])\n")
    return here


@pytest.mark.parametrize(
    ("argv", "usage", "meant"),
    [
        (["run", "--stric", "train.py"], "usage: fxguard run", "did you mean --strict?"),
        (["run", "--trace_to=x", "train.py"], "usage: fxguard run", "did you mean --trace-to?"),
        (["report", "--opne", "x.jsonl"], "usage: fxguard report", "did you mean --open?"),
        (["diff", "--fromat", "table", "a", "b"], "usage: fxguard diff", "did you mean --format?"),
        (["rnu", "train.py"], "usage: fxguard", "did you mean run?"),
        (["train.py"], "usage: fxguard", "to run a script, write: fxguard run train.py"),
        (["run", "--forecast", "fp17", "train.py"], "usage: fxguard run", "'float16'"),
    ],
)
def test_a_mistyped_word(here: Path, capsys: Any, argv: list[str], usage: str, meant: str) -> None:
    """The usage is that of the command, with the nearest option; nothing has run."""
    assert status(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(usage)
    assert meant in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--report", "."], "is a folder"),
        (["--report", "missing/report.html"], "no such folder"),
        (["--report", "/proc/report.html"], "cannot be written"),
        (["--json", "."], "the record needs a file"),
        (["--json", "missing/run.json"], "no such folder for the record"),
        (["--trace-to", "train.py"], "is a file"),
        (["--trace-to", "train.py/below"], "is a file"),
        (["--trace-to", "/proc/traces/new"], "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_run(
    here: Path, capsys: Any, options: list[str], words: str
) -> None:
    """A report or a trace that could not be written ends the command before the script begins."""
    assert status("run", *options, "train.py") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert status("run", "--report", "report.html", "--trace-to", "new/folder", "train.py") == 0
    assert capsys.readouterr().out == "ran []\n"
    assert sorted(path.name for path in here.iterdir()) == ["train.py"]  # nothing was left


def test_options_behind_the_script_are_the_scripts(here: Path, capsys: Any) -> None:
    """They go to the script; one that fxguard has too is pointed out, once."""
    assert status("run", "train.py", "--replay", "--lr=1", "--report=x.html") == 0
    out, err = capsys.readouterr()
    assert out == "ran ['--replay', '--lr=1', '--report=x.html']\n"
    assert err.count("--replay, --report after train.py went to the script") == 1
    assert status("run", "train.py", "--lr=1") == 0
    assert "went to the script" not in capsys.readouterr().err


# fxguard report


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy trace, and one with a detection."""
    folder = tmp_path_factory.mktemp("traces")
    healthy = fxguard.instrument(torch.nn.Linear(2, 2), trace_to=folder, trace_batch_nums=[0])
    healthy(torch.ones(1, 2))
    broken = fxguard.instrument(torch.nn.Tanh(), trace_to=folder, on_detect=lambda report: None)
    broken(torch.full((2,), torch.nan))
    return folder


def test_report_of_a_folder(traces: Path, capsys: Any) -> None:
    """Every trace gets its page beside it, and its verdict is printed under its name."""
    assert status("report", str(traces)) == 0
    out = capsys.readouterr().out
    for name in ("Linear-0", "Tanh-0"):
        assert f"{traces / name}.jsonl:\n" in out
        assert f"page: {traces / name}.html\n" in out
        assert traces.joinpath(f"{name}.html").read_text().startswith("<!doctype html>")
    assert "NaN" in out


def test_a_damaged_trace_in_a_folder(tmp_path: Path, traces: Path, capsys: Any) -> None:
    """It is named, the others get their pages, and the status is 2; so where there is no trace."""
    assert status("report", str(tmp_path)) == 2
    assert "no traces in the folder" in capsys.readouterr().err
    tmp_path.joinpath("a.jsonl").write_text("nonsense\n")
    tmp_path.joinpath("b.jsonl").write_text(traces.joinpath("Tanh-0.jsonl").read_text())
    assert status("report", str(tmp_path)) == 2
    out, err = capsys.readouterr()
    assert "a.jsonl:1: not a trace" in err
    assert f"page: {tmp_path / 'b.html'}" in out
    assert status("report", str(tmp_path), "-o", "page.html") == 2


def test_report_as_json(traces: Path, tmp_path: Path, capsys: Any) -> None:
    """``--json -`` prints a record of all pages, and ``--json FILE`` writes it beside the text."""
    assert status("report", "--json", "-", str(traces)) == 0
    linear, tanh = json.loads(capsys.readouterr().out)["pages"]
    assert (linear["healthy"], tanh["healthy"]) == (True, False)
    assert tanh["page"] == str(traces / "Tanh-0.html")
    assert "NaN" in tanh["verdict"][0]
    file = tmp_path / "pages.json"
    assert status("report", "--json", str(file), str(traces / "Tanh-0.jsonl")) == 0
    assert "page: " in capsys.readouterr().out
    assert json.loads(file.read_text()) == {"fxguard_pages": 1, "pages": [tanh], "damaged": []}


def test_report_opens_a_browser(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--open`` shows the page, of several the one with a detection; without it nothing opens."""
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    status("report", str(traces))
    assert opened == []
    status("report", "--open", str(traces))
    status("report", "--open", str(traces / "Linear-0.jsonl"))
    assert opened == [traces.joinpath(f"{name}.html").as_uri() for name in ("Tanh-0", "Linear-0")]


def test_netcheck_is_a_command() -> None:
    """``fxguard netcheck`` is ``python -m fxguard.netcheck``."""
    ends = [
        subprocess.run([sys.executable, "-m", *words, "--help"], capture_output=True, text=True)
        for words in (["fxguard", "netcheck"], ["fxguard.netcheck"])
    ]
    assert [end.returncode for end in ends] == [0, 0]
    assert ends[0].stdout == ends[1].stdout
    assert "--timeout" in ends[0].stdout


# [tool.fxguard]

TABLE = (
    '[tool.fxguard]\nstrict = true\nmax-frames-to-save = 3\nreport = "r.html"\nignore = ["a.*"]\n'
)


def project(folder: Path, text: str) -> Path:
    """A folder inside a project."""
    folder.joinpath("pyproject.toml").write_text(text)
    below = folder / "src" / "package"
    below.mkdir(parents=True)
    return below


def test_settings_are_found_upwards(tmp_path: Path) -> None:
    """Keys have hyphens or underscores; paths begin where the file is."""
    found = settings.settings_of_project(project(tmp_path, TABLE))
    report = str(tmp_path / "r.html")
    assert found == {
        "strict": True,
        "max_frames_to_save": 3,
        "report": report,
        "ignore": ["a.*"],
    }
    assert settings.options_of(found).strict
    (tmp_path / "src" / "pyproject.toml").write_text("[tool.other]\n")  # not the one that is meant
    assert settings.settings_of_project(tmp_path / "src")["report"] == report


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tool.fxguard]\nstrcit = true\n", "'strcit'; did you mean strict"),
        ("[tool.fxguard]\nenabled = true\n", "no option 'enabled'"),
        ("[tool.fxguard\n", "pyproject.toml"),
        ("[tool]\nfxguard = 3\n", "has to be a table, got 3"),
    ],
)
def test_wrong_settings(here: Path, capsys: Any, text: str, words: str) -> None:
    """They are told with the file and what was meant, and nothing runs."""
    here.joinpath("pyproject.toml").write_text(text)
    assert status("run", "train.py") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err


def test_values_are_checked_like_options(here: Path, capsys: Any) -> None:
    """``strict = "no"`` is refused; the command line goes before the file."""
    here.joinpath("pyproject.toml").write_text('[tool.fxguard]\nstrict = "no"\n')
    assert status("run", "train.py") == 2
    assert "strict has to be True or False" in capsys.readouterr().err
    assert status("run", "--no-strict", "train.py") == 0


def test_python_without_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither tomllib nor tomli is there, a table is said to be unread; none is fine."""
    monkeypatch.setattr(settings, "_toml", lambda: None)
    with pytest.raises(settings.UnreadError, match="was not read: Python 3"):
        settings.settings_of_project(project(tmp_path, TABLE))
    tmp_path.joinpath("pyproject.toml").write_text('[project]\nname = "uses fxguard"\n')
    assert settings.settings_of_project(tmp_path) == {}
    assert issubclass(settings.UnreadError, UsageError)
