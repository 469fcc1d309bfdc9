"""``fxguard report`` and ``fxguard diff``."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor, nn

import fxguard
from fxguard.cli import main
from fxguard.trace.writer import TraceWriter
from fxguard.types import Frame, Report, Row, Source, TracedBatch
from support.residual_net import Net, X


class Overflows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp() * 2


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace or a report in JSON; the page stands beside it, or where -o says."""
    reports: list[Report] = []
    model = fxguard.instrument(Overflows(), trace_to=tmp_path, on_detect=reports.append)
    model(X * 200)
    [report] = reports
    assert main.main(["report", str(tmp_path / "Overflows-0.jsonl")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("batch 0: ")
    assert said[-1] == f"page: {tmp_path / 'Overflows-0.html'}"
    assert report.origins[0].message.partition(" (")[0] in said[0]
    (tmp_path / "report.json").write_text(report.to_json())
    assert main.main(["report", str(tmp_path / "report.json"), "-o", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").read_text().count("<html") == 1


HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e"


@pytest.mark.parametrize("command", ["report", "diff", "table", "damaged"])
def test_names_in_files_of_others_command_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Escape sequences in names and file names are shown as escapes, in a pipe as well."""
    for name, verdict, largest in (("a", (), 5.0), ("b", (HOSTILE,), math.inf)):
        rows = (Row("input[0]", 1.0, 2.0), Row("output", 0.0, largest))
        frame = Frame(HOSTILE, "mul", True, rows, source=Source(HOSTILE, 3, HOSTILE))
        writer = TraceWriter(tmp_path / name, "Net", HOSTILE)
        writer.write(
            TracedBatch(0, (frame,), verdict=verdict, blamed=(0,) if verdict else ()), None
        )
    paths = [str(tmp_path / name / "Net-0.jsonl") for name in "ab"]
    if command == "report":
        assert [main.main(["report", path]) for path in paths] == [0, 0]
    elif command == "damaged":
        path = tmp_path / f"{HOSTILE}.jsonl"
        path.write_text(f"{HOSTILE}\n")
        assert main.main(["report", str(path)]) == 2
    else:
        kind = {"diff": "text", "table": "table"}[command]
        assert main.main(["diff", *paths, "--format", kind]) in (0, 1)
    said = "".join(capsys.readouterr())
    assert not set("\x1b\x07\u202e") & set(said)
    assert "\\x1b]0;owned\\x07" in said


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "{}\n", "a.jsonl:1: not a trace of fxguard"),
        ("a.json", "{}", "a.json: not a report of fxguard: it lacks 'batch_number'"),
        ("a.json", "[" * 100_000, "a.json: not a report of fxguard"),
        ("a.json", '{"batch_number": "0", "frames": [], "origins": []}', "is not of type int"),
        ("a.json", '{"batch_number": 0, "frames": [{}], "origins": []}', "it lacks 'name'"),
        ("a.txt", "plain\n", "a.txt:1: not a trace of fxguard"),
    ],
)
def test_report_of_damaged_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, message: str
) -> None:
    """One line, status 2, and no page."""
    (tmp_path / name).write_text(text)
    assert main.main(["report", str(tmp_path / name)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_diff_of_two_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is in both: that is said, what there is is listed, and the status is not "equal"."""
    paths = []
    for name, kind in (("encoder", "softmax"), ("head.3", "conv2d")):
        frames = (Frame(name, kind, True, (Row("output", 0.0, 1.0, dtype="float32"),)),)
        TraceWriter(tmp_path, kind, "2.13.0").write(TracedBatch(0, frames), None)
        paths.append(str(tmp_path / f"{kind}-0.jsonl"))
    assert main.main(["diff", *paths]) == 2
    assert "nothing could be compared" in capsys.readouterr().out
    assert main.main(["diff", paths[0], paths[0]]) == 0


@pytest.fixture
def traces(tmp_path: Path) -> tuple[str, str]:
    """Two files with three batches each: the third differs."""
    paths = []
    for scale in (1.0, 2.0):
        folder = tmp_path / str(scale)
        model = fxguard.instrument(Net(), trace_batch_nums=range(3), trace_to=folder)
        for number in range(3):
            model(X * (scale if number == 2 else 1.0))
        paths.append(str(folder / "Net-0.jsonl"))
    return paths[0], paths[1]


def test_diff(traces: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1 when they differ, 0 when not, 2 for wrong use."""
    a, b = traces
    assert main.main(["diff", a, b]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"A: {a}\nB: {b}\n\nthey part at blocks.0.linear Linear, batch 2\n")
    assert main.main(["diff", a, a]) == 0
    assert "ranges and fingerprints agree: 0 of " in capsys.readouterr().out
    assert main.main(["diff", a, b, "--tolerance", "1"]) == 0
    assert main.main(["diff", a, b, "--batches", "0,1"]) == 0
    assert main.main(["diff", b, "--batches", "0,2"]) == 1
    assert "batch 0 against 2" in capsys.readouterr().out


def test_formats_of_diff(traces: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["diff", *traces, "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["a"] == traces[0]
    assert main.main(["diff", *traces, "--format", "table"]) == 1
    assert capsys.readouterr().out.startswith("| batch ")


def test_wrong_use_of_diff(
    traces: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that says what is wrong, and status 2."""
    a, b = traces
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}\n")
    for args, message in (
        ([a], "with one file, --batches N,M says which of its batches to compare"),
        ([a, b, "--batches", "0,7"], f"{b} has no batch 7; it has 0, 1, 2"),
        ([a, str(tmp_path / "none")], f"no such file: {tmp_path / 'none'}"),
        ([a, str(broken)], f"{broken}:1: not a trace of fxguard: the first line does not say"),
        ([a, b, "--tolerance", "-1"], "tolerance has to be 0 or more, got -1.0"),
        ([a, b, "--html", str(tmp_path)], "the page could not be written: "),
    ):
        assert main.main(["diff", *args]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"fxguard: {message}")
    with pytest.raises(SystemExit):
        main.main(["diff", a, "--batches", "0"])
    assert "two batch numbers with a comma between them, got '0'" in capsys.readouterr().err


def test_a_pipe_that_closes(traces: tuple[str, str]) -> None:
    """``| head`` ends it without a word."""
    command = [sys.executable, "-m", "fxguard", "diff", *traces]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 141
