"""What is known about the series and the runs of a history, beside their numbers: ``meta.json``.

Each rank writes its own: rank 0 ``meta.json``, rank 1 ``meta-rank1.json``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxguard.errors import UsageError
from fxguard.history._files import meta_name, replace
from fxguard.history._series import Series
from fxguard.history._stream import SCHEMA, series_of
from fxguard.report.frames_json import of_type
from fxguard.report.strict_json import strict_json

__all__ = [
    "Meta",
    "RunOfRank",
    "metas_of",
    "plain",
    "read_meta",
    "update_meta",
]

NAME = re.compile(r"meta(-rank\d+)?\.json")


@dataclass(frozen=True, slots=True)
class RunOfRank:
    """One run of a training program, as one rank saw it begin."""

    run: int
    rank: int
    first_step: int
    began: float  # seconds since 1970
    about: dict[str, Any]  # what the recorder says of it


@dataclass(slots=True)
class Meta:
    """The series and runs of one rank."""

    series: dict[str, Series] = field(default_factory=dict)  # by name, in order of registration
    runs: dict[int, RunOfRank] = field(default_factory=dict)

    def add(self, series: Iterable[Series]) -> None:
        """Take series over; one of the same name is the same series."""
        self.series.update((each.name, each) for each in series)


def update_meta(
    folder: Path, rank: int, *, series: Iterable[Series] = (), runs: Iterable[RunOfRank] = ()
) -> None:
    """Add series and runs to the file of a rank, which is written anew.

    Raises:
        UsageError: if the one that is there is damaged, or of another version.
        OSError: when it cannot be written; then the old one stays.
    """
    path = folder / meta_name(rank)
    meta = read_meta(path) if path.exists() else Meta()
    before = dict(meta.series)
    meta.add(series)
    meta.runs.update(known := {each.run: each for each in runs})
    if known or meta.series != before:
        data = {
            "fxguard_history": SCHEMA,
            "runs": [dataclasses.asdict(run) for run in meta.runs.values()],
            "series": [dataclasses.asdict(each) for each in meta.series.values()],
        }
        replace(path, strict_json(data, indent=1).encode())


def plain(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a recorder says of a run, as JSON holds it; what JSON does not know becomes words."""
    data: dict[str, Any] = json.loads(strict_json(json.loads(json.dumps(dict(about), default=str))))
    return data


def metas_of(folder: Path) -> list[Path]:
    """The files of all ranks."""
    return sorted(folder / name for name in os.listdir(folder) if NAME.fullmatch(name))


def read_meta(path: Path) -> Meta:
    """What a file says.

    Raises:
        UsageError: if it is damaged, or of another version.
        OSError: when it cannot be read.
    """
    try:
        data = of_type(json.loads(path.read_bytes()), dict)
        if data.get("fxguard_history") != SCHEMA:
            raise ValueError(f"schema {str(data.get('fxguard_history'))[:40]}")
        meta = Meta()
        meta.add(map(series_of, of_type(data["series"], list)))
        runs = map(_run_of, of_type(data["runs"], list))
        meta.runs = {each.run: each for each in runs}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path}: not a history of fxguard: {error}") from error
    return meta


def _run_of(data: Any) -> RunOfRank:
    data = of_type(data, dict)
    numbers = {key: of_type(data[key], int) for key in ("run", "rank", "first_step")}
    began = float(of_type(data["began"], int, float))
    return RunOfRank(**numbers, began=began, about=of_type(data["about"], dict))
