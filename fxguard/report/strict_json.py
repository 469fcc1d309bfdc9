"""Records as plain data and as JSON that every reader accepts. Knows nothing of torch."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

__all__ = ["plain_data", "strict_json"]


def plain_data(record: Any) -> dict[str, Any]:
    """A record as dicts, lists, strings and numbers, with its fields by name.

    Rows without a fingerprint, such as all rows of a report, have no such field.
    """
    data: dict[str, Any] = _with_lists(dataclasses.asdict(record, dict_factory=_fields))
    return data


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


def _with_words(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _with_words(item) for key, item in value.items()}
    return list(map(_with_words, value)) if isinstance(value, list) else value
