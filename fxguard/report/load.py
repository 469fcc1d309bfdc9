"""Reads reports that were written as JSON. Knows nothing of torch."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

from fxguard.errors import UsageError
from fxguard.report.frames_json import of_type, read_text
from fxguard.report.report import Report
from fxguard.report.strict_json import SCHEMA

__all__ = ["load_report"]

NOT_FINITE = ("nan", "inf", "-inf")  # as `Report.to_json` writes them


def load_report(path: str | Path) -> Report:
    """Read a file of :meth:`Report.to_json` or ``fxguard run --report FILE.json``.

    Raises:
        FxguardError: when it is not such a file, or cannot be read.
        OSError: when there is no such file.

    Example:
        >>> load_report("report.json").to_html("report.html")
    """
    text = read_text(Path(path))
    try:
        data = json.loads(text)
        version = data.get("fxguard_report", SCHEMA) if isinstance(data, dict) else SCHEMA
        if version != SCHEMA:
            raise ValueError(f"schema {str(version)[:40]}, and this version reads {SCHEMA}")
        return typing.cast(Report, _read(Report, data))
    except (ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"{path}: not a report of fxguard: {error}") from error


def _read(wanted: Any, data: Any) -> Any:
    """Plain data converted to the type of an annotation."""
    if isinstance(wanted, types.UnionType):  # X | None
        [kind] = [each for each in typing.get_args(wanted) if each is not type(None)]
        return None if data is None else _read(kind, data)
    if typing.get_origin(wanted) is typing.Literal:
        if data not in typing.get_args(wanted):
            raise ValueError(f"{str(data)[:40]!r} is not known")
        return data
    if typing.get_origin(wanted) is tuple:  # tuple[X, ...]
        kind, _ = typing.get_args(wanted)
        return tuple(_read(kind, item) for item in of_type(data, list))
    if dataclasses.is_dataclass(wanted) and isinstance(wanted, type):
        hints = typing.get_type_hints(wanted)
        fields = of_type(data, dict)
        for field in dataclasses.fields(wanted):
            if field.name not in fields and field.default is dataclasses.MISSING:
                raise ValueError(f"it lacks {field.name!r}")
        return wanted(
            **{name: _read(hints[name], fields[name]) for name in hints if name in fields}
        )
    if wanted is float:
        return float(data if data in NOT_FINITE else of_type(data, float, int))
    return of_type(data, wanted)
