"""Records as plain data and as JSON that every reader accepts. Knows nothing of torch."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

__all__ = ["SCHEMA", "plain_data", "recorded", "strict_json", "write_json"]

SCHEMA = 1  # the version of schema.json, beside this file, which describes all records


def plain_data(record: Any) -> dict[str, Any]:
    """A record as dicts, lists, strings and numbers, with its fields by name.

    Rows without a fingerprint, such as all rows of a report, have no such field.
    """
    data: dict[str, Any] = _with_lists(dataclasses.asdict(record, dict_factory=_fields))
    return data


def recorded(kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """Plain data that says what it is, in which version.

    Example:
        >>> recorded("report", {"batch_number": 0})
        {'fxguard_report': 1, 'batch_number': 0}
    """
    return {f"fxguard_{kind}": SCHEMA, **data}


def _fields(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if name != "fingerprint" or value is not None}


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return list(map(_with_lists, value)) if isinstance(value, (list, tuple)) else value


def strict_json(data: Any, indent: int | None = None) -> str:
    """Plain data as strict JSON: NaN and infinities are the strings "nan", "inf" and "-inf".

    Args:
        data: dicts, lists, strings and numbers.
        indent: blanks for each level; None writes one line.

    Example:
        >>> strict_json({"abs_max": float("inf")})
        '{"abs_max": "inf"}'
    """
    return json.dumps(_with_words(data), indent=indent, allow_nan=False)


def write_json(file: str | Path, data: Any) -> None:
    """Write plain data into a file as strict JSON; ``-`` is stdout.

    Raises:
        OSError: when the file cannot be written.
    """
    text = strict_json(data, indent=2) + "\n"
    if str(file) == "-":
        sys.stdout.write(text)
    else:
        Path(file).write_text(text, encoding="utf-8")


def _with_words(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _with_words(item) for key, item in value.items()}
    return list(map(_with_words, value)) if isinstance(value, list) else value
