"""Runs a program once more with a patch, in a copy of its folder and a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxguard.errors import UsageError

__all__ = ["MAY_WRITE", "Program", "run_patched"]

MOST_BYTES = 100 * 2**20  # of the folder
MOST_SECONDS = 600.0
GRACE = 20.0  # seconds for a process to say what it has checked
LEFT_OUT = (".git", ".hg", "__pycache__")
MAY_WRITE = (
    "it runs in a copy of its folder, which is then removed; what it writes to absolute paths or "
    "through links, and what it sends over a network, is written and sent once more"
)
# Trackers of experiments that a variable switches off.
TRACKERS_OFF = {
    "CLEARML_OFFLINE_MODE": "1",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "SWANLAB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "WANDB_MODE": "disabled",
}
# Variables that make a process one of several, or that speak of the first run.
NOT_HANDED_ON = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("FXGUARD", "FXGUARD_OPTIONS", "FXGUARD_SESSION"),
)


@dataclass(frozen=True)
class Program:
    """A program as a command line ran it."""

    module: str | None  # of ``-m``
    words: Sequence[str]  # the script, unless there is a module, and its arguments
    options: Sequence[str]  # of ``fxguard run``
    seconds: float  # that the run took

    @property
    def folder(self) -> Path:
        """The folder of the script; the working directory if that is around it."""
        here = Path(os.path.realpath(os.curdir))
        if self.module is not None:
            return here
        script = Path(os.path.realpath(self.words[0])).parent
        return here if here in script.parents else script


def run_patched(program: Program, file: str, text: str) -> str:
    """Run a program with another text of one of its files, and say how it went.

    Args:
        program: the program.
        file: the file.
        text: its text in that run.

    Raises:
        FxguardError: why it was not run.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("one process of several cannot be run alone")
    folder, real = program.folder, Path(os.path.realpath(file))
    if folder not in real.parents:
        raise UsageError(f"{file} is outside of {folder}, the folder that would be copied")
    if (size := _size(folder)) > MOST_BYTES:
        raise UsageError(f"{folder} has {size / 2**20:.0f} MB; at most 100 MB are copied")
    with _copied(folder) as copy:
        (copy / real.relative_to(folder)).write_bytes(text.encode())
        return _run(program, folder, copy)


def _size(folder: Path) -> int:
    total = 0
    for base, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(base, name)).st_size
        if total > MOST_BYTES:
            return total
    return total


@contextlib.contextmanager
def _copied(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fxguard-patch-", ignore_cleanup_errors=True) as made:
        copy = Path(os.path.realpath(made)) / folder.name
        try:
            shutil.copytree(folder, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        except (OSError, shutil.Error) as error:
            raise UsageError(f"{folder} could not be copied: {error}") from None
        yield copy


def _run(program: Program, folder: Path, copy: Path) -> str:
    here = Path(os.path.realpath(os.curdir))
    inside = here == folder or folder in here.parents
    start = copy / here.relative_to(folder) if inside else copy
    words = list(program.words)
    if program.module is None:
        script = Path(os.path.realpath(words[0])).relative_to(folder)
        words[0] = str(copy / script)
    record = copy.parent / "record.json"
    command = [sys.executable, "-m", "fxguard", "run", *program.options, "--json", str(record)]
    command += ["-m", program.module] if program.module is not None else []
    limit = min(2 * program.seconds, MOST_SECONDS)
    output = copy.parent / "output.txt"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [*command, *words],
            cwd=start,
            env=_environment(folder, copy),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    return _told(status, limit, _read(record), [line for line in lines if line.strip()])


def _environment(folder: Path, copy: Path) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
    if paths := known.get("PYTHONPATH"):
        moved = [_moved(path, folder, copy) for path in paths.split(os.pathsep)]
        known["PYTHONPATH"] = os.pathsep.join(moved)
    offline = (copy.parent / "mlruns").as_uri()
    return {**known, **TRACKERS_OFF, "MLFLOW_TRACKING_URI": offline}


def _moved(path: str, folder: Path, copy: Path) -> str:
    real = Path(os.path.realpath(path or os.curdir))
    is_inside = real == folder or folder in real.parents
    return str(copy / real.relative_to(folder)) if is_inside else path


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started; first let it say what it has checked."""
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        if hasattr(os, "killpg"):
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)
        elif process.poll() is None:
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


def _read(record: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _told(status: int | None, limit: float, record: dict[str, Any], lines: list[str]) -> str:
    own = [line.removeprefix("fxguard: ") for line in lines if line.startswith("fxguard: ")]
    last = own[-1] if own else ""
    if found := record.get("detections"):
        return f"with the patch the program still finds an inf or a NaN: {found[0]}"
    if status is None:
        told = last or "it had not checked anything"
        return f"with the patch the program was stopped after {limit:.0f} s: {told}"
    if status == 0:
        return f"with the patch the program ran to its end without an inf or a NaN: {last}"
    return f"with the patch the program ended with status {status}: {lines[-1] if lines else ''}"
