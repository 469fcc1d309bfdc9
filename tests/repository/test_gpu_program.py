"""``./dev gpu`` runs where there is no GPU as well, and says what failed."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fxguard
from support.loading import module_of

ROOT = Path(fxguard.__file__).parents[1]
gpu = module_of(ROOT / "gpu.py", "the_gpu_program")


def result_of(code: str, seconds: float = 60, missing: str = "") -> tuple[object, str]:
    """What comes of a part that runs some code, and its log."""
    log = io.StringIO()
    part = gpu.Part("part", ("-c", code), 1, gpu.last_line, missing=missing)
    return gpu.run(part, time.monotonic() + seconds, log), log.getvalue()


def test_a_part_that_passes_tells_its_last_line() -> None:
    row, log = result_of("print('one'); print('3 passed in 1 s'); print('leaks')")
    assert (row.result, row.told) == (gpu.PASSED, "3 passed in 1 s")
    assert "one\n" in log


@pytest.mark.parametrize(
    ("code", "seconds", "result"),
    [("raise SystemExit('wrong')", 60, "FAILED"), ("input()\nimport time; time.sleep(60)", 0, "")],
)
def test_what_fails_is_said(code: str, seconds: float, result: str) -> None:
    """A failure with its last line, a part without time as that."""
    row, _ = result_of(code.replace("input()", "print('begun', flush=True)"), seconds)
    assert row.result == (result or gpu.LATE)
    assert row.told in ("wrong", "begun", "it printed nothing")


def test_what_is_missing_is_left_out() -> None:
    row, _ = result_of("raise SystemExit(1)", missing="there is no Triton")
    assert (row.result, row.told) == (gpu.LEFT_OUT, "there is no Triton")


@pytest.mark.campaign
def test_the_smallest_sizes_pass_on_a_cpu(tmp_path: Path) -> None:
    """All parts: the one screen, its file, the log, the numbers of the table."""
    command = [sys.executable, "gpu.py", "--quick", "--out", str(tmp_path), "--seconds", "400"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = (tmp_path / "summary.txt").read_text()
    for part in ("part in C", "kernel", "machine code", "tests", "times, eager"):
        assert f"\n{part} " in summary
    assert summary.count("FAILED") == 0
    assert len(summary.splitlines()) < 40
    assert "passed" in (tmp_path / "log.txt").read_text()
    record = json.loads((tmp_path / "eager.json").read_text())
    assert {result["case"]["model"] for result in record["results"]} == {"mlp", "vit"}
