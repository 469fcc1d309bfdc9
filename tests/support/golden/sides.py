"""The two sides: each checkout makes its records in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .folders import HERE, without_paths

__all__ = ["Side", "is_in_sample", "log_of", "made_in", "write"]


@dataclass(frozen=True, slots=True)
class Side:
    """The records of one checkout, and what each family took.

    Attributes:
        records: by name.
        seconds: of each family: seconds of the processor, and seconds on the clock, which count
            what else runs on this machine, and the programs that are started.
    """

    records: dict[str, dict[str, Any]]
    seconds: dict[str, list[float]]

    @classmethod
    def read(cls, file: Path) -> Side:
        """What :func:`write` wrote."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    @property
    def runs(self) -> int:
        """How many second runs all records took."""
        return sum(record["runs"] for record in self.records.values())


def write(root: Path, families: Sequence[str], every: int, file: Path) -> None:
    """Write the records of a checkout, whose ``fxguard`` and ``support`` are imported."""
    sys.path[:0] = [str(root), str(root / "tests")]
    import torch
    import torch._dynamo.guards

    import fxguard

    assert root in Path(fxguard.__file__).resolve().parents, fxguard.__file__
    # TorchDynamo times the guards of each graph, behind a flush of the cache: 30 ms, for a log.
    torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0
    torch.set_num_threads(1)

    from .families import cases_of
    from .records import recorded

    side = Side({}, {})
    for family in families:
        began = clocks()
        torch._dynamo.reset()
        torch.manual_seed(0)  # for models that are made when a file of stories is imported
        for name, run in cases_of(family, lambda name: is_in_sample(name, every)):
            assert name not in side.records, name
            side.records[name] = recorded(run)
        side.seconds[family] = [now - before for now, before in zip(clocks(), began, strict=True)]
        print(family, *map(round, side.seconds[family]), file=sys.stderr)
    text = json.dumps({"records": side.records, "seconds": side.seconds}, indent=0, default=str)
    file.write_text(without_paths(text, root), encoding="utf-8")


def clocks() -> tuple[float, float]:
    """Seconds that this process and its children took, and the time."""
    return sum(os.times()[:4]), time.monotonic()


def is_in_sample(name: str, every: int) -> bool:
    """Whether a case is one of those that are tried, by its name: the same ones on both sides."""
    return zlib.crc32(name.encode()) % every == 0


def made_in(root: Path, families: Sequence[str], every: int, file: Path) -> subprocess.Popen[bytes]:
    """A process that writes the records of a checkout, and what it prints beside the file."""
    options = ["--root", str(root), "--write", str(file), "--every", str(every)]
    return subprocess.Popen(
        [sys.executable, str(HERE), *options, "--only", *families],
        env={**os.environ, "PYTHONPATH": str(root), "NO_COLOR": "1", "COLUMNS": "100"},
        cwd=root,
        stderr=log_of(file).open("wb"),
    )


def log_of(file: Path) -> Path:
    """Where the process that writes a file prints: torch says much that is of no interest."""
    return file.with_suffix(".log")
