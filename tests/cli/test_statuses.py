"""The table of exit statuses in docs/records.md, each of its cells tried."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fxguard
from fxguard.cli._statuses import Status
from fxguard.records import Frame, Row
from fxguard.trace.trace import TracedBatch
from fxguard.trace.writer import TraceWriter
from support.histories import write_history
from support.needs import needs
from support.programs import run_python
from support.schema import told

needs("pyarrow")
needs("safetensors")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "records.md"

FINE = "import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\n"
BAD = "import torch\ntorch.nn.Linear(2, 2)(torch.tensor([[float('nan')] * 2]))\n"
# Nobody sets gradients to 0.
NOTED = """\
import torch

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(9):
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
"""
JUMPS = """\
import torch

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(160):
    x = torch.randn(16, 8) * (1e3 if step == 150 else 1)
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    optimizer.step()
"""
FILES = {
    "noted.py": NOTED,
    "jumps.py": JUMPS,
    "fine.py": FINE,
    "bad.py": BAD,
    "raises.py": FINE + "raise KeyError(3)\n",
    "both.py": BAD.replace("torch.nn", "try: torch.nn") + "except ValueError: raise KeyError(3)\n",
    "ends.py": FINE + "raise SystemExit(5)\n",
    "damaged.jsonl": "nonsense\n",
}

# For a command and a status the arguments that end so.
CASES = {
    ("run", 0): ["fine.py", "--forecast float16 fine.py", "--on-detect warn bad.py"],
    ("run", 1): ["raises.py"],
    ("run", 2): ["", "missing.py", "--strict --replay fine.py", "--json missing/x.json fine.py"],
    ("run", 3): ["bad.py", "both.py", "--fail-on note bad.py"],
    ("run", 4): ["--history kept --stop-at-event jumps.py"],
    ("run", 5): ["--fail-on note noted.py"],
    ("report", 0): ["a.jsonl", "--json - a.jsonl"],
    ("report", 2): ["damaged.jsonl", "missing.jsonl", "empty", "--opne a.jsonl"],
    ("report", 141): ["a.jsonl"],
    ("diff", 0): ["a.jsonl a.jsonl"],
    ("diff", 1): ["a.jsonl b.jsonl", "--json - a.jsonl b.jsonl"],
    ("diff", 2): ["a.jsonl", "a.jsonl other.jsonl", "a.jsonl damaged.jsonl"],
    ("diff", 141): ["a.jsonl b.jsonl"],
    ("compare", 0): ["one one", "--json - one one"],
    ("compare", 1): ["one two"],
    ("compare", 2): ["one missing", "one empty", "one third", "one"],
    ("compare", 141): ["one two"],
    ("history", 0): ["well", "well well", "--json - well"],
    ("history", 1): ["well jump"],
    ("history", 2): ["missing", "empty", "--series nothing well", "well later"],
    ("history", 3): ["jump", "--html page.html jump"],
    ("history", 141): ["jump"],
    ("netcheck", 0): ["--timeout 20"],
    ("netcheck", 1): ["--timeout 1"],
    ("netcheck", 2): ["--timeout 0", "--timeout 1"],
}


def table() -> dict[tuple[str, int], str]:
    """The cells of the table that say something."""
    lines = PAGE.read_text(encoding="utf-8").partition("## Exit statuses")[2].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    commands = [cell.strip("`").removeprefix("fxguard ") for cell in rows[0][1:]]
    return {
        (command, int(row[0])): cell
        for row in rows[2:]
        for command, cell in zip(commands, row[1:], strict=True)
        if cell
    }


def test_the_table_is_what_is_tried_below() -> None:
    """No status without a test, and none that the code does not name."""
    assert set(table()) == set(CASES)
    assert {status for _, status in CASES} == {int(status) for status in Status}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Scripts, traces and histories."""
    for name, text in FILES.items():
        tmp_path.joinpath(name).write_text(text)
    tmp_path.joinpath("empty").mkdir()
    for name, kind, largest in (("a", "mul", 1.0), ("b", "mul", 2.0), ("other", "conv2d", 1.0)):
        frame = Frame(kind, kind, True, (Row("output", 0.0, largest, dtype="float32"),))
        TraceWriter(tmp_path, name, "2.13.0").write(TracedBatch(0, (frame,)), None)
        tmp_path.joinpath(f"{name}-0.jsonl").rename(tmp_path / f"{name}.jsonl")
    torch.manual_seed(0)
    for name, size in (("one", 2), ("two", 2), ("third", 3)):
        fxguard.record(torch.nn.Linear(2, size), tmp_path / name, torch.ones(1, 2))
    write_history(tmp_path / "well", 100)
    write_history(tmp_path / "jump", 100, jump=90)
    write_history(tmp_path / "later", 20, first=200)
    return tmp_path


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def environment(command: str, status: int) -> dict[str, str]:
    """Variables of torchrun, for one rank that is alone or waits for another one."""
    if command != "netcheck" or status == 2:
        return {}
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1" if status == 0 else "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def into_a_closed_pipe(folder: Path, *words: str) -> int:
    """The status of a command whose output nobody reads any more."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        argv = [sys.executable, "-u", "-m", "fxguard", *words]
        return subprocess.run(argv, cwd=folder, stdout=writes, env=ALONE, timeout=60).returncode
    finally:
        os.close(writes)


ALONE = {**os.environ, "PYTHONPATH": str(PAGE.parents[1])}


@pytest.mark.parametrize(
    ("command", "status", "line"),
    [(*key, line) for key, lines in CASES.items() for line in lines],
)
def test_a_status(here: Path, command: str, status: int, line: str) -> None:
    """The command ends as the table says."""
    words = line.split()
    if status == Status.PIPE_CLOSED:
        assert into_a_closed_pipe(here, command, *words) == status
        return
    done = run_python(here, "-m", "fxguard", command, *words, env=environment(command, status))
    assert done.returncode == status, done.stdout + done.stderr


def test_a_script_keeps_its_own_status(here: Path) -> None:
    """Where it ends itself, and nothing was found; the record has it too."""
    done = run_python(here, "-m", "fxguard", "run", "--json", "run.json", "ends.py")
    assert done.returncode == 5
    assert json.loads(here.joinpath("run.json").read_text())["status"] == 5


# What `--json FILE` writes.


def record(folder: Path, *words: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """The record that a command writes; it is held to the schema."""
    run_python(folder, "-m", "fxguard", words[0], "--json", "x.json", *words[1:], env=env)
    written: dict[str, Any] = json.loads(folder.joinpath("x.json").read_text(), parse_constant=no)
    assert told("", written) == []
    return written


def no(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_the_record_of_a_run(here: Path) -> None:
    """Healthy, with a detection, with a failure, with a forecast, traced."""
    fine = record(here, "run", "fine.py")
    assert (fine["status"], fine["report"], fine["detections"]) == (0, None, [])
    assert fine["checked"]["batches"] == {"Linear": 1}
    assert fine["verdict"] == ["checked 1 batch of Linear (1 operation); nothing found"]
    bad = record(here, "run", "bad.py")
    assert (bad["status"], bad["checked"]["detections"]) == (3, 1)
    assert bad["report"]["origins"][0]["cause"] == "data"
    assert len(bad["detections"]) == 1
    warned = record(here, "run", "--on-detect", "warn", "bad.py")
    assert (warned["status"], warned["report"]) == (0, bad["report"])
    assert record(here, "run", "raises.py")["status"] == 1
    forecast = record(here, "run", "--forecast", "float16", "fine.py")
    assert [each["dtype"] for each in forecast["forecasts"]] == ["float16"]
    assert forecast["checked"] is None
    budget = record(here, "run", "--error-budget", "float16", "fine.py")
    assert [each["dtype"] for each in budget["error_budgets"]] == ["float16"]
    assert budget["checked"] is None
    assert record(here, "run", "--trace-batch-nums", "0", "fine.py")["checked"]["traced"] == [0]


def test_a_report_of_a_process_that_the_script_started(here: Path) -> None:
    """It is in the record of the run."""
    here.joinpath("starts.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, 'bad.py'])\n"
    )
    found = record(here, "run", "starts.py")
    assert found["status"] == 3
    assert found["report"]["origins"][0]["cause"] == "data"


def test_each_rank_writes_its_own_file(here: Path) -> None:
    """Under torchrun they would overwrite each other's."""
    run_python(here, "-m", "fxguard", "run", "--json", "x.json", "fine.py", env={"RANK": "3"})
    assert told("Run", json.loads(here.joinpath("x-rank3.json").read_text())) == []
    assert not here.joinpath("x.json").exists()


def test_the_records_of_the_other_commands(here: Path) -> None:
    """Of pages, a file that cannot be read among them; of traces that differ; of the network."""
    pages = record(here, "report", ".")
    assert {each["file"] for each in pages["pages"]} == {"a.jsonl", "b.jsonl", "other.jsonl"}
    assert [each["file"] for each in pages["damaged"]] == ["damaged.jsonl"]
    found = record(here, "diff", "a.jsonl", "b.jsonl")
    assert (found["differs"], found["batches"][0]["differing"][0]["operation"]) == (True, "mul mul")
    works = record(here, "netcheck", env=environment("netcheck", 0))
    assert (works["works"], works["ranks"], len(works["hosts"])) == (True, 1, 1)
    fails = record(here, "netcheck", "--timeout", "1", env=environment("netcheck", 1))
    assert (fails["works"], fails["ranks"]) == (False, 2)
    assert "rank 1 did not arrive" in fails["problem"]
