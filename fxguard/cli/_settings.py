"""A project's defaults: ``[tool.fxguard]`` in pyproject.toml. They do not switch fxguard on."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fxguard.errors import UsageError
from fxguard.options import Options

__all__ = [
    "NAMES",
    "UnreadError",
    "nearest",
    "options_as_words",
    "options_of",
    "settings_of_project",
]

NAMES = (*(option.name for option in fields(Options)), "report")
PATHS = ("report", "trace_to", "reproduce_to", "history")
NOT_REPEATED = (
    *PATHS,
    "reproduce_ranges_only",
    "history_weights",
    "stop_at_event",
    "trace_batch_nums",
    "abort_after_batch_num",
)


class UnreadError(UsageError):
    """The project has settings that this Python cannot read."""


def options_of(settings: Mapping[str, Any]) -> Options:
    """The settings that are options of :func:`fxguard.instrument`.

    Raises:
        FxguardError: when the options cannot work.
    """
    return Options(**{name: value for name, value in settings.items() if name != "report"})


def options_as_words(settings: Mapping[str, Any]) -> list[str]:
    """The settings as a command line has them, without what writes files or prints traces.

    Example:
        >>> options_as_words({"strict": True, "ignore": ["*:log"], "trace_to": "traces"})
        ['--strict', '--ignore=*:log']
    """
    words = []
    for name, value in settings.items():
        option = "--" + name.replace("_", "-")
        if name in NOT_REPEATED or value is None:
            continue
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            each = [value] if isinstance(value, (str, int, float)) else value
            words += [f"{option}={item}" for item in each]
    return words


def settings_of_project(start: Path) -> dict[str, Any]:
    """The table ``[tool.fxguard]`` of the nearest pyproject.toml that has one.

    Args:
        start: the folder where the search begins; parent folders follow.

    Returns:
        Options by name, with paths relative to the file's folder; empty if there is no table.

    Raises:
        FxguardError: when the file cannot be read as TOML, or a key is unknown.
    """
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file() and (table := _table(file)) is not None:
            return _checked(table, file)
    return {}


def _table(file: Path) -> dict[str, Any] | None:
    text = file.read_text(encoding="utf-8")
    if not re.search(r"fxguard", text):
        return None
    toml = _toml()
    if toml is None:
        if re.search(r"^\s*\[\s*tool\s*\.\s*fxguard\s*\]", text, re.MULTILINE) is None:
            return None
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UnreadError(
            f"[tool.fxguard] in {file} was not read: Python {version} has no tomllib; "
            "pip install tomli"
        )
    try:
        found = toml.loads(text).get("tool", {}).get("fxguard")
    except toml.TOMLDecodeError as error:
        raise UsageError(f"{file}: {error}") from None
    if found is not None and not isinstance(found, dict):
        raise UsageError(f"{file}: [tool.fxguard] has to be a table, got {found!r}")
    return found


def _toml() -> Any:
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    return None


def _checked(table: dict[str, Any], file: Path) -> dict[str, Any]:
    found = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in NAMES:
            raise UsageError(f"{file}: [tool.fxguard] has no option {key!r}{nearest(name, NAMES)}")
        if name in PATHS and isinstance(value, str):
            value = str(file.parent / value)
        found[name] = value
    return found


def nearest(word: str, words: Iterable[str]) -> str:
    """``"; did you mean ...?"`` if a known word is similar."""
    found = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {found[0]}?" if found else ""
